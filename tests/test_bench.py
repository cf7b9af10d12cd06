"""The benchmarks: what they compare, what they time and what they report. No time is checked here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import byte_ids, byte_tokenizer, noisy_copy, real_text, tiny_target
from transformers import DynamicCache, PreTrainedModel

import bench.__main__ as command_line
import bench.model_card
from bench import acceptance, inputs, loss, machine, needles, report
from bench.context import ContextReader
from cpu_kv import head_major
from offload_rt import LLM, SamplingParams
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.config import Config, load_config
from offload_rt.errors import UsageError
from offload_rt.model import CausalModel

SMALL: dict[str, object] = {
    "retrieval.budget": 64,
    "retrieval.recent": 16,
    "retrieval.refresh": "stride:1000",
    "draft.sinks": 4,
    "draft.window": 28,
    "speculation.gamma2": 5,
    "speculation.step_down": False,
    "store.page": 16,
    "store.slab_tokens": 64,
    "store.segment_tokens": 64,
}
SETTINGS = [argument for key, value in SMALL.items() for argument in ("--set", f"{key}={json.dumps(value)}")]
CONFIGS = ("plain", "retrieval", "triforce", "lookup", "streaming", "naive")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a target with a tokenizer and of its draft."""
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    target = tiny_target("llama-gqa", seed=3)
    for folder, model in zip(folders, (target, noisy_copy(target)), strict=True):
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return str(folders[0]), str(folders[1])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(real_text().encode()[:6000])
    return path


@pytest.fixture
def rate(monkeypatch: pytest.MonkeyPatch) -> float:
    """Memory that is read at 10 GB/s."""
    monkeypatch.setattr(machine, "read_rate", lambda device: 10.0)
    return 10.0


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


# LLM.rerun, by which one prefill serves every composition


def counted(result: Any) -> Any:
    return (
        result.config,
        result.tokens,
        result.rounds,
        [(x.name, x.proposed, x.accepted) for x in result.levels],
    )


def test_rerun_decodes_as_a_new_reading_would(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama-gqa", seed=3)
    draft, prompt, params = noisy_copy(target), byte_ids(200), SamplingParams(max_tokens=16)
    fresh = {}
    for config in CONFIGS:
        with LLM.from_models(target, draft, config=config, overrides=SMALL) as llm:
            fresh[config] = counted(llm.generate(prompt, params))
    with LLM.from_models(target, draft, config="triforce", overrides=SMALL) as llm:
        # Longer than what follows, so that it leaves queries and chunks behind that must not be used.
        first = llm.generate(prompt, SamplingParams(max_tokens=30))
        for config in CONFIGS:
            assert counted(llm.rerun(params, config, SMALL)) == fresh[config]
        monkeypatch.setattr(
            RetrievedCache, "adopt", lambda *_: pytest.fail("a cache that is not read is kept up")
        )
        assert counted(llm.plain(params)) == fresh["plain"]
        monkeypatch.undo()
        assert llm.last_result is first
        assert counted(llm.rerun(params)) == fresh["triforce"]


def test_rerun_needs_a_prompt_and_its_chunks() -> None:
    with LLM.from_models(tiny_target(), config="plain", overrides=SMALL) as llm:
        with pytest.raises(UsageError, match="generate first"):
            llm.rerun()
        llm.generate(byte_ids(100), SamplingParams(max_tokens=2))
        with pytest.raises(UsageError, match=r"retrieval\.rest needs .* set retrieval\.rest=false"):
            llm.rerun(SamplingParams(max_tokens=2), "retrieval", SMALL)
        alone = SMALL | {"retrieval.rest": False}
        by_means = alone | {"retrieval.select": "mean_keys"}
        with pytest.raises(UsageError, match="keys of chunks of 8 tokens, .* retrieval.select=attention"):
            llm.rerun(SamplingParams(max_tokens=2), "retrieval", by_means)
        assert len(llm.rerun(SamplingParams(max_tokens=2), "retrieval", alone).tokens) == 2
        with pytest.raises(UsageError, match="more than the 8192 positions"):
            llm.rerun(SamplingParams(max_tokens=9000))
        assert len(llm.plain(SamplingParams(max_tokens=3)).tokens) == 3
    with LLM.from_models(tiny_target(), config="retrieval", overrides=SMALL) as llm:
        llm.generate(byte_ids(100), SamplingParams(max_tokens=2))
        with pytest.raises(
            UsageError, match="keys of chunks of 8 tokens"
        ):  # chosen by attention, none are kept
            llm.rerun(SamplingParams(max_tokens=2), "retrieval", by_means)


# bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("speedup --contexts 7000 --text TEXT", "--contexts 7000: the text has 6000 tokens"),
        ("speedup --contexts 4k", "'4k' is not a whole number of at least 2"),
        ("speedup --systems ours:warp", "no such config; there are easyspec"),
        ("speedup --turns 0", "'0' is not a whole number of at least 1"),
        ("speedup --set retrieval.budgt=3", "unknown key retrieval.budgt"),
        ("speedup --text missing.txt", "text missing.txt: cannot be read"),
        ("speedup --out missing/folder.json --contexts 16 --text TEXT", "its folder does not exist"),
        ("model-card --context 5000 --step 512 --text TEXT", "--context 5000 is no multiple of --step 512"),
        (
            "model-card --context 256 --text TEXT",
            "--context 256 is too short: it must be at least 1024 tokens",
        ),
        ("model-card --context 6000 --text TEXT", "text book.txt: has 6000 tokens, and 6256 are needed"),
        ("model-card --positions 12 --context 2048 --text TEXT", "--positions 12 is no multiple of 8"),
        ("model-card --parts loss,luck --text TEXT", "'luck' is none of loss, needle, acceptance"),
        ("model-card", "the following arguments are required: --text"),
        ("fly", "invalid choice: 'fly'"),
    ],
)
def test_bad_input(
    arguments: str,
    message: str,
    pair: tuple[str, str],
    text: Path,
    rate: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "RESULTS", tmp_path / "results")
    given = arguments.replace("TEXT", str(text)).split()
    if given[0] in ("speedup", "model-card"):
        given += ["--model", pair[0]]
    assert command_line.main(given) == 2
    out, err = capsys.readouterr()
    # Loading weights draws a bar of its own.
    error = next(line for line in err.splitlines() if line.startswith("bench: error: "))
    assert message in error and out == ""
    assert not list(tmp_path.glob("**/*.json"))


# model-card


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama-gqa", seed=3)


@pytest.fixture
def config() -> Config:
    return load_config("retrieval", SMALL)


def transformers_losses(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none").double()


def test_model_card(
    pair: tuple[str, str],
    text: Path,
    tmp_path: Path,
    target: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = dataclasses.replace(
        bench.model_card.MODEL_CARD,
        windows=(128,),
        tail=60,
        needle_contexts=(400, 512),
        acceptance_contexts=(256,),
        shares=(8,),
        depths=3,
    )
    monkeypatch.setattr(bench.model_card, "MODEL_CARD", case)
    other = tmp_path / "other.txt"
    other.write_text(real_text()[20_000:23_000], encoding="utf-8")
    out = tmp_path / "card.json"
    arguments = f"--context 512 --step 128 --positions 128 --out {out} --text {text} --text {other}".split()
    assert command_line.main(["model-card", "--model", pair[0], *SETTINGS, *arguments]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads(out.read_text())
    prompts = {path.name: list(path.read_bytes()[:512]) for path in (text, other)}
    losses = {name: transformers_losses(target, tokens) for name, tokens in prompts.items()}
    along = found["loss"]["along"]
    assert along["ends"] == [128, 256, 384, 512]
    for name, expected in losses.items():
        steps = [expected[:127], *expected[127:].split(128)]
        assert along["by_text"][name] == pytest.approx([float(part.mean()) for part in steps], abs=1e-4)
    means = [(a + b) / 2 for a, b in zip(*along["by_text"].values(), strict=True)]
    assert along["mean"] == pytest.approx(means)
    paired = found["loss"]["paired"]
    assert paired["windows"] == [128, 512] and paired["tail"] == 60
    short = torch.cat([transformers_losses(target, tokens[-128:])[-60:] for tokens in prompts.values()])
    long = torch.cat([expected[-60:] for expected in losses.values()])
    assert paired["means"] == pytest.approx([float(short.mean()), float(long.mean())], abs=1e-4)
    assert paired["changes"] == pytest.approx([0, float((long - short).mean())], abs=1e-4)
    assert paired["errors"] == pytest.approx([0, float((long - short).std()) / 120**0.5], abs=1e-4)
    assert [len(c["score"]) for c in found["needle"]["contexts"]] == [3, 3]
    assert found["needle"]["depths"] == [0, 0.5, 1]
    assert [c["context"] for c in found["acceptance"]] == [256, 512]
    for contexts in found["acceptance"]:
        caches = {(c["cache"], c["budget"]): c for c in contexts["caches"]}
        assert set(caches) == {(kind, share) for kind in acceptance.USUAL for share in ("1/8",)}
        for (kind, share), cache in caches.items():
            assert cache["entries"] == contexts["context"] // int(share[2:])
            assert 0 < cache["mean"] < 1
            assert cache["mean"] == pytest.approx(sum(cache["by_text"]) / 2)
            assert len(cache["by_distance"]) == 8
            if kind != acceptance.RETRIEVAL_STRIDE:
                assert cache["mean"] == pytest.approx(sum(cache["by_distance"]) / 8)
    for table in ("| to 128 ", "| 128 ", "| 400 ", "| StreamingLLM, 1/8 "):
        assert table in printed


def test_where_a_loss_rises() -> None:
    assert loss.without_rise([1, 2, 3, 4, 5, 6], [False, False, False, False, True, False]) == 4
    assert loss.without_rise([1, 2], [False, True]) == 1
    assert loss.without_rise([1, 2], [False, False]) == 2
    steady = torch.full((50,), 2.0, dtype=torch.float64)
    noise = torch.linspace(-1, 1, 50, dtype=torch.float64)
    windows = [1, 2, 3, 4]
    falling = loss.paired(windows, [steady, steady - 0.1, steady - 0.05 + noise, steady + 2])
    assert falling["changes"] == pytest.approx([0, -0.1, 0.05, 2.05])
    assert falling["without_rise"] == 3
    assert loss.paired([1, 2], [steady, steady + 0.01])["without_rise"] == 1
    for change, largest in ((0.12, 2), (0.2, 1)):  # of a standard error of 0.083
        assert loss.paired([1, 2], [steady, steady + change + noise])["without_rise"] == largest


def test_a_shorter_window_keeps_the_beginning_of_text() -> None:
    assert loss.window_of([7, 1, 2, 3, 4], 3, beginning=7) == [7, 3, 4]
    assert loss.window_of([7, 1, 2, 3, 4], 3, beginning=None) == [2, 3, 4]
    assert loss.window_of([7, 1, 2], 3, beginning=7) == [7, 1, 2]


def test_needles_lie_at_their_depths() -> None:
    text, generator = [*range(1000, 4000)], torch.Generator().manual_seed(0)
    prompt, passages = needles.plant(text, 2000, depths=5, each=2, alphabet=range(1000), generator=generator)
    assert len(prompt) == 2000
    # Without the passages the text is as it was.
    assert [t for t in prompt if t >= 1000] == text[: 2000 - 10 * needles.PASSAGE]
    starts = [at for at in range(1, 2000) if prompt[at] < 1000 <= prompt[at - 1]]
    assert [prompt[start : start + needles.PASSAGE] for start in starts] == passages
    for depth, start in enumerate(starts[::2]):
        assert start == pytest.approx(1 + depth / 4 * (2000 - 1 - 128), abs=1)
    assert (starts[0], starts[-1]) == (1, 2000 - needles.PASSAGE)
    with pytest.raises(ValueError, match="do not fit"):
        needles.plant(text, 400, depths=5, each=2, alphabet=range(1000), generator=generator)


def test_recall_is_the_share_of_right_tokens(target: PreTrainedModel, config: Config) -> None:
    text, generator = byte_ids(500), torch.Generator().manual_seed(0)
    prompt, passages = needles.plant(text, 400, depths=2, each=2, alphabet=range(256), generator=generator)

    def chosen(passage: list[int]) -> torch.Tensor:
        """What the target would say in the place of each token behind the cue."""
        logits = target(torch.tensor([prompt + passage])).logits[0]
        return logits.argmax(-1)[400 + needles.CUE - 1 : -1]

    # This model recalls nothing by itself: let two passages continue as it does.
    for passage in (passages[0], passages[3]):
        passage[needles.CUE] = int(chosen(passage)[0])
    right = [int((chosen(one) == torch.tensor(one[needles.CUE :])).sum()) for one in passages]
    asked = 2 * (needles.PASSAGE - needles.CUE)
    expected = [(right[0] + right[1]) / asked, (right[2] + right[3]) / asked]
    model = CausalModel(target, "tiny")
    try:
        with ContextReader(model, config, 400) as reader:
            reader.read(prompt)
            assert needles.recall(reader, passages, each=2) == pytest.approx(expected)
            assert reader.full.verified_length == 400
    finally:
        model.restore()
    assert expected[0] > 0


def test_acceptance_is_one_where_everything_is_kept(target: PreTrainedModel, config: Config) -> None:
    text = byte_ids(240)
    model = CausalModel(target, "tiny")
    try:
        with ContextReader(model, config, 240) as reader:
            reader.read(text[:200])
            found = acceptance.acceptance(reader, text[200:240], {"all": 256, "some": 48})
            assert reader.full.verified_length == 240
            keys = reader.full.sequence.views(1, 0, 240)
    finally:
        model.restore()
    cache = DynamicCache(config=target.config)
    target(torch.tensor([text]), past_key_values=cache)
    torch.testing.assert_close(
        torch.cat([head_major(k) for k, _ in keys], 1), cache.layers[1].keys[0], atol=1e-4, rtol=1e-4
    )
    for (_, budget), values in found.items():
        assert values.shape == (40,)
        if budget == "all":
            assert values.tolist() == pytest.approx([1.0] * 40, abs=1e-4)
        else:
            assert 0 < float(values.mean()) < 0.999


def test_acceptance_of_exact_top_k_against_transformers(config: Config) -> None:
    model = tiny_target(seed=4, layers=1, spread=0.1)
    context, budget = 120, 30
    text = byte_ids(context + 8)
    block = model.model.layers[0].self_attn
    # The queries of the last 8 tokens over all keys, from transformers' own attention weights.
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model(torch.tensor([text]), output_attentions=True)
        weights = out.attentions[0][0, :, context:, :context]
        mass = (weights / weights.sum(-1, keepdim=True)).sum(1)
        mask = torch.full((1, block.config.num_attention_heads, 8, context + 8), -torch.inf)
        for head, kept in enumerate(mass.topk(budget).indices):
            mask[0, head, :, kept] = 0
        mask[..., context:] = torch.full((8, 8), -torch.inf).triu(1)
        hidden = model.model.embed_tokens(torch.tensor([text]))
        full = torch.full((1, mask.shape[1], context + 8, context + 8), -torch.inf).triu(1)
        full[:, :, context:] = mask
        rotation = model.model.rotary_emb(hidden, position_ids=torch.arange(context + 8)[None])
        layer = model.model.layers[0](hidden, attention_mask=full, position_embeddings=rotation)
        small = model.lm_head(model.model.norm(layer))[0, context:].softmax(-1)
        expected = torch.minimum(small, out.logits[0, context:].softmax(-1)).sum(-1)
    runner = CausalModel(model, "tiny")
    with ContextReader(runner, config, len(text)) as reader:
        reader.read(text[:context])
        found = acceptance.acceptance(reader, text[context:], {"1/4": budget})
    assert found[acceptance.TOP_K, "1/4"].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert float(expected.mean()) < 0.99


def test_caches_are_refreshed_as_their_policy_says(
    target: PreTrainedModel, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshes: list[str] = []
    build = RetrievedCache.fill
    # Once for the first round, then whenever it is due and read again.
    monkeypatch.setattr(
        RetrievedCache,
        "fill",
        lambda self, queries: (refreshes.append(str(self.refresh.policy)), build(self, queries))[1],
    )
    text = byte_ids(512 + 256)
    model = CausalModel(target, "tiny")
    try:
        with ContextReader(model, config, len(text)) as reader:
            reader.read(text[:512])
            kinds = (acceptance.RETRIEVAL, acceptance.RETRIEVAL_STRIDE)
            acceptance.acceptance(reader, text[512:], {"1/2": 256}, kinds)
    finally:
        model.restore()
    assert refreshes.count("every") == 256 // acceptance.ROUND
    assert refreshes.count("stride:128") == 256 // acceptance.STRIDE


def test_means_by_distance() -> None:
    values = torch.arange(12, dtype=torch.float64)
    assert acceptance.by_distance(values, 4) == [4, 5, 6, 7]
    assert acceptance.by_distance(values, 4, 2) == [4.5, 6.5]
    assert acceptance.by_distance(values[:11], 4) == [2, 3, 4, 5]


# reports


def test_table() -> None:
    assert report.table(["name", "n"], [["a", 1], ["long name", 22]]) == (
        "| name      |   n |\n|-----------|----:|\n| a         |   1 |\n| long name |  22 |"
    )


def test_machine() -> None:
    described = machine.describe(torch.device("cpu"))
    assert described["threads"] == torch.get_num_threads() and described["processor"]
    assert machine.read_rate(torch.device("cpu"), size=2**20) > 0
    named = machine.slug({"processor": "Intel(R) Xeon(R) CPU @ 2.20GHz", "threads": 2})
    assert named == "intel-xeon-cpu-2-20ghz-2-threads"
