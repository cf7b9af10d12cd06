"""The benchmarks: what they compare, what they time and what they report. No time is checked here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from reference_attention import ReferenceBackend, attend
from small_engine import again
from tiny_models import LONGROPE_BORDER, byte_ids, byte_tokenizer, noisy_copy, real_text, tiny_target
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import bench.__main__ as command_line
import bench.attention
from bench import acceptance, inputs, machine, needles, report, studies, texts
from bench.attention import CPU, AttentionCase, exact, measure
from bench.model_card import MODEL_CARD, Sizes, of_change, token_losses, window_of
from bench.texts import sequence_over, take
from cpu_kv import head_major
from offload_rt import LLM, SamplingParams, native
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.engine.sequence import TokenSequence
from offload_rt.errors import UsageError
from offload_rt.model.runner import CausalModel
from offload_rt.toml import load_config

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
    "store.segment_bytes": 16384,
}
SETTINGS = [argument for key, value in SMALL.items() for argument in ("--set", f"{key}={json.dumps(value)}")]
TITLES = ("Loss with more and more text before it", "Needle score by depth", "What a small cache holds")
CONFIGS = ("plain", "retrieval", "triforce", "lookup", "streaming", "naive")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama-gqa", seed=3)


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


@contextmanager
def reading(target: PreTrainedModel, tokens: Sequence[int], room: int = 0) -> Iterator[TokenSequence]:
    """A sequence that has read `tokens`, for any small cache."""
    config = load_config("retrieval", SMALL)
    with sequence_over(CausalModel(target, "tiny"), config, len(tokens), room) as sequence:
        take(sequence, tokens)
        yield sequence


@pytest.fixture
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the search for cycles behind every sequence, which takes longer than a tiny model does."""
    monkeypatch.setattr(texts.gc, "collect", lambda: 0)


@pytest.fixture
def rate(monkeypatch: pytest.MonkeyPatch) -> float:
    """Memory that is read at 10 GB/s."""
    monkeypatch.setattr(machine, "read_rate", lambda device: 10.0)
    return 10.0


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


# Contexts, by which one prefill serves every composition


def counted(result: Any) -> Any:
    return (
        result.config,
        result.tokens,
        result.rounds,
        [(x.name, x.proposed, x.accepted) for x in result.levels],
    )


def test_a_context_is_decoded_as_a_new_reading_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama-gqa", seed=3)
    draft, prompt, params = noisy_copy(target), byte_ids(200), SamplingParams(max_tokens=16)
    fresh = {}
    for config in CONFIGS:
        with LLM.from_models(target, draft, config=config, overrides=SMALL) as llm:
            fresh[config] = counted(llm.generate(prompt, params))
    with LLM.from_models(target, draft, config="triforce", overrides=SMALL) as llm:
        # Longer than what follows, so that it leaves queries and chunks behind that must not be used.
        text = llm.read(prompt)
        again(text, SamplingParams(max_tokens=30))
        for config in CONFIGS:
            assert counted(again(text, params, config, SMALL)) == fresh[config]
        monkeypatch.setattr(
            RetrievedCache, "adopt", lambda *_: pytest.fail("a cache that is not read is kept up")
        )
        assert counted(again(text, params, "plain")) == fresh["plain"]
        monkeypatch.undo()
        assert counted(again(text, params)) == fresh["triforce"]


def test_another_config_needs_the_means_that_it_retrieves_by() -> None:
    params = SamplingParams(max_tokens=2)
    with LLM.from_models(tiny_target(), config="plain", overrides=SMALL) as llm:
        text = llm.read(byte_ids(100))
        with pytest.raises(UsageError, match=r"retrieval\.rest needs .* set retrieval\.rest=false"):
            text.generate((), params, "retrieval", SMALL)
        alone = SMALL | {"retrieval.rest": False}
        by_means = alone | {"retrieval.select": "mean_keys"}
        with pytest.raises(UsageError, match="keys of chunks of 8 tokens, .* retrieval.select=attention"):
            text.generate((), params, "retrieval", by_means)
        assert len(again(text, params, "retrieval", alone).tokens) == 2
        with pytest.raises(UsageError, match="more than the 8192 positions"):
            text.generate((), SamplingParams(max_tokens=9000))
        assert len(again(text, params).tokens) == 2
    with LLM.from_models(tiny_target(), config="retrieval", overrides=SMALL) as llm:
        text = llm.read(byte_ids(100))
        with pytest.raises(UsageError, match="keys of chunks of 8 tokens"):  # by attention, none are kept
            text.generate((), params, "retrieval", by_means)


# bad input


BAD_INPUT = [
    ("fly", "invalid choice: 'fly'"),
    ("speedup --contexts 7000 --text {text} {model}", "--contexts 7000: the text has 6000 tokens"),
    ("peers --quick --systems ours:plain --batches 99999", "--contexts 4096, --batches 99999: the text has"),
    ("speedup --contexts 4k", "'4k' is not a whole number of at least 2"),
    ("speedup --turns 0", "'0' is not a whole number of at least 1"),
    ("peers --temperature -1", "'-1' is not a number of at least 0"),
    ("peers --acceptance 2", "'2' is not a number of at least 0 and at most 1"),
    ("speedup --set retrieval.budgt=3", "unknown key retrieval.budgt"),
    ("speedup --text missing.txt", "text missing.txt: cannot be read"),
    ("speedup --out missing/folder.json --contexts 16", "its folder does not exist"),
    ("peers --out {page}", "is where the page or the plots go; name it .jsonl"),
    (
        "peers --systems ours:plain --out {torn}",
        "line 1 is no result of a side-by-side run; use another file",
    ),
    ("peers --systems sglang:plain", "argument --systems: sglang:plain: write adapter:system; adapters are"),
    ("peers --systems ours", "argument --systems: ours: write adapter:system"),
    ("peers --systems ours:my.toml", "no such config; there are easyspec, heads, lookup"),
    ("peers --systems transformers:static+a.b=1", "only systems of ours take settings behind a +"),
    ("peers --systems ours:retrieval+retrieval.budgt=3", "unknown key retrieval.budgt"),
    ("peers --systems ours:plain+store.page=64", "is of the text, which all systems of ours share"),
    ("peers --systems ours:plain+acceptance=2", "is not a number of at least 0 and at most 1"),
    ("peers --systems ours:trees+acceptance=0.5", "is held where chains are drafted alone"),
    ("peers --systems ours:plain --acceptance 0.5", "none of --systems drafts chains"),
    ("peers --systems ours:lookup --acceptance 0.5 --temperature 1", "held for greedy decoding"),
    ("peers --systems ours:retrieval+retrieval.select=mean_keys", "needs means that are kept when the text"),
    (
        "peers --systems ours:retrieval+retrieval.rest=true --set retrieval.rest=false",
        "needs means that are",
    ),
    ("offload --systems ours:plain", "none of ours drafts"),
    ("peers --systems ours:plain --device cpu --gpu-memory 2", "--gpu-memory 2: runs on the CPU"),
    ("peers --systems ours:plain --link 4 --device cuda", "an emulated link is a processor's"),
    ("link --device cuda", "give --link 0"),
    ("peers --model random:tiny --needles", "reads no text; leave out --text and --needles"),
    ("peers --model random:huge", "there is no such shape; there are tiny"),
    ("peers --draft no/such/folder", "no/such/folder"),
    ("peers --needles --contexts 300 --systems ours:plain", "passages do not fit"),
    ("prediction-accuracy missing.jsonl", "cannot be read"),
    ("prediction-accuracy {results}/peers-cpu.jsonl", "is no result of `bench offload`"),
    ("model-card --context 1000 --text {text}", "'1000' is not a whole number of at least 1024"),
    (
        "model-card --context 6000 --text {text} {model}",
        "text book.txt: has 6000 tokens, and 6256 are needed",
    ),
    ("model-card --parts loss,luck --text {text}", "'luck' is none of loss, needle, acceptance"),
    ("model-card --out card.md --context 2048 {model}", "--out card.md: is where the page or the plots go"),
    ("paper --parts shapes,luck", "'luck' is none of policies, temperatures"),
    ("attention --queries 1,none", "'none' is not a whole number of at least 1"),
    (
        "attention --quick --tokens 100000000",
        "--tokens 100000000 needs 572.2 GiB of memory, and 1.5 GiB are free",
    ),
    ("attention --quick --tokens 10", "install a C++ compiler"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[one for one, _ in BAD_INPUT])
def test_bad_input(
    arguments: str,
    message: str,
    pair: tuple[str, str],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = inputs.RESULTS
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * 2**29, total=2**34))
    monkeypatch.setattr(bench.attention, "load_kernel", lambda: None)
    torn, page = tmp_path / "torn.jsonl", tmp_path / "page.md"
    torn.write_text('{"benchmark": "other"}\n{"benchmark": "pee')
    given = {"text": text, "model": f"--model {pair[0]}", "torn": torn, "page": page, "results": results}
    assert command_line.main(arguments.format(**given).split()) == 2
    out, err = capsys.readouterr()
    # Loading weights draws a bar of its own.
    error = next(line for line in err.splitlines() if line.startswith("bench: error: "))
    assert message in error and out == ""
    assert not list(tmp_path.glob("**/*.json")), "no result, and no checkpoint, was written"


# model-card


def transformers_losses(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none").double()


@pytest.mark.usefixtures("uncollected")
def test_model_card(
    pair: tuple[str, str],
    text: Path,
    tmp_path: Path,
    target: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kinds = (acceptance.RETRIEVAL, acceptance.RETRIEVAL_STRIDE, acceptance.STREAMING)
    small = dataclasses.replace(MODEL_CARD, sizes=Sizes(shares=(8,), caches=kinds))
    monkeypatch.setattr(command_line, "commands", lambda: (small,))
    other = tmp_path / "other.txt"
    other.write_text(real_text()[20_000:23_000], encoding="utf-8")
    out = tmp_path / "card.json"
    arguments = f"--context 2048 --step 600 --positions 128 --out {out} --text {text} --text {other}".split()
    assert command_line.main(["model-card", "--model", pair[0], *SETTINGS, *arguments]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads(out.read_text())
    prompts = {path.name: list(path.read_bytes()[:2048]) for path in (text, other)}
    losses = {name: transformers_losses(target, tokens) for name, tokens in prompts.items()}
    along, windows = found["loss"][:4], found["loss"][4:]
    assert [(row["from"], row["to"]) for row in along] == [(0, 600), (600, 1200), (1200, 1800), (1800, 2048)]
    for name, expected in losses.items():
        steps = [expected[:599], *expected[599:].split(600)]
        assert [row[name] for row in along] == pytest.approx([float(part.mean()) for part in steps], abs=1e-4)
    assert along[0]["loss"] == pytest.approx((along[0]["book.txt"] + along[0]["other.txt"]) / 2)
    assert [(row["prompt"], row["from"]) for row in windows] == [
        (n, n - 32) for n in (64, 128, 256, 512, 1024, 2048)
    ]
    half = torch.cat([transformers_losses(target, tokens[-1024:])[-32:] for tokens in prompts.values()])
    whole = torch.cat([expected[-32:] for expected in losses.values()])
    assert [row["loss"] for row in windows[4:]] == pytest.approx(
        [float(half.mean()), float(whole.mean())], abs=1e-4
    )
    assert windows[0]["change"] is None
    assert windows[-1]["change"] == pytest.approx(float((whole - half).mean()), abs=1e-4)
    # Of the prompts that are long enough for a passage at every depth.
    assert [(row["context"], row["passages"]) for row in found["needle"]] == [(1024, 1), (2048, 1)]
    assert {"0", "0.125", "1"} <= set(found["needle"][0])
    contexts = ((kind, context, context // 8) for context in (512, 2048) for kind in kinds)
    assert [(row["cache"], row["context"], row["entries"]) for row in found["acceptance"]] == list(contexts)
    for row in found["acceptance"]:
        assert 0 < row["books"] < 1 and 0 < row["needles"] < 1
        assert row["books"] == pytest.approx(sum(row[f"{at}/8"] for at in range(1, 9)) / 8)
    page = out.with_suffix(".md").read_text()
    assert all(f"## {title}\n" in page and f"## {title}\n" in printed for title in TITLES)
    assert out.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.usefixtures("uncollected")
def test_a_loss_needs_no_text_behind_the_context(pair: tuple[str, str], text: Path, tmp_path: Path) -> None:
    text.write_bytes(text.read_bytes()[:1024])
    given = f"model-card --context 1024 --parts loss --text {text} --out {tmp_path / 'card.json'}".split()
    assert command_line.main([*given, "--model", pair[0], *SETTINGS, "--no-plot"]) == 0


@pytest.mark.parametrize("length", [LONGROPE_BORDER, LONGROPE_BORDER + 1])
def test_a_loss_is_told_of_the_rotation_of_a_text_of_this_length(length: int) -> None:
    target, tokens = tiny_target("phi3", seed=3), byte_ids(length)
    with sequence_over(CausalModel(target, "tiny"), load_config("plain"), length) as sequence:
        found = token_losses(sequence, tokens)
    torch.testing.assert_close(found, transformers_losses(target, tokens), atol=1e-4, rtol=1e-4)


def test_where_a_loss_rises() -> None:
    noise = torch.linspace(-1, 1, 50, dtype=torch.float64)  # a standard error of 0.083
    found = [of_change(noise + change) for change in (0.2, 0.12, -0.1)]
    assert [row["change"] for row in found] == pytest.approx([0.2, 0.12, -0.1])
    assert [row["error"] for row in found] == pytest.approx([float(noise.std()) / 50**0.5] * 3)
    assert [row["rises"] for row in found] == [True, False, False]


def test_a_shorter_window_keeps_the_beginning_of_text() -> None:
    assert window_of([7, 1, 2, 3, 4], 3, beginning=7) == [7, 3, 4]
    assert window_of([7, 1, 2, 3, 4], 3, beginning=None) == [2, 3, 4]
    assert window_of([7, 1, 2], 3, beginning=7) == [7, 1, 2]


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


def test_recall_is_the_share_of_right_tokens(target: PreTrainedModel) -> None:
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
    with reading(target, prompt) as sequence:
        assert needles.recall(sequence, passages, each=2) == pytest.approx(expected)
        assert sequence.full.verified_length == 400
    assert expected[0] > 0


def test_acceptance_is_one_where_everything_is_kept(target: PreTrainedModel) -> None:
    text = byte_ids(240)
    with reading(target, text[:200], room=40) as sequence:
        for kind in acceptance.CACHES:
            whole, some = (acceptance.acceptance(sequence, text[200:], kind, budget) for budget in (256, 48))
            assert whole.tolist() == pytest.approx([1.0] * 40, abs=1e-4)
            assert some.shape == (40,) and 0 < float(some.mean()) < 0.999
        keys = torch.cat([head_major(keys) for keys, _ in sequence.full.sequence.views(1, 0, 240)], 1)
    cache = DynamicCache(config=target.config)
    target(torch.tensor([text]), past_key_values=cache)
    torch.testing.assert_close(keys, cache.layers[1].keys[0], atol=1e-4, rtol=1e-4)


def test_acceptance_of_exact_top_k_against_transformers() -> None:
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
    with reading(model, text[:context], room=8) as sequence:
        found = acceptance.acceptance(sequence, text[context:], acceptance.TOP_K, budget)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert float(expected.mean()) < 0.99


def test_caches_are_refreshed_as_their_policy_says(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshes, fill = list[str](), RetrievedCache.fill

    def counted(cache: RetrievedCache, queries: Tensor) -> None:
        refreshes.append(str(cache.refresh.policy))
        fill(cache, queries)

    monkeypatch.setattr(RetrievedCache, "fill", counted)
    text = byte_ids(512 + 256)
    with reading(target, text[:512], room=256) as sequence:
        refreshes.clear()
        for kind in (acceptance.RETRIEVAL, acceptance.RETRIEVAL_STRIDE):
            acceptance.acceptance(sequence, text[512:], kind, 256)
    # Once for the first round, then whenever it is due and read again.
    assert refreshes.count("every") == 256 // acceptance.ROUND
    assert refreshes.count("stride:128") == 256 // acceptance.STRIDE


def test_means_by_distance() -> None:
    values = torch.arange(40, dtype=torch.float64)
    assert acceptance.by_distance(values, 8) == [16, 17, 18, 19, 20, 21, 22, 23]
    assert acceptance.by_distance(values, 16) == [8.5, 10.5, 12.5, 14.5, 16.5, 18.5, 20.5, 22.5]
    assert acceptance.by_distance(values, 64) == [None] * 8


# attention


@pytest.mark.skipif(native.load_kernel() is None, reason="no C++ compiler here: the kernel cannot be built")
def test_compares_ours_with_torchs(tmp_path: Path, rate: float, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "attention.json"
    arguments = f"--tokens 700 --queries 5,1 --repeats 3 --out {out}".split()
    assert command_line.main(["attention", *arguments]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads(out.read_text())
    assert found["machine"] == {**machine.describe(CPU), "load_average": found["machine"]["load_average"]}
    layers = product(((4, 64), (8, 128)), ("bfloat16", "float32"), (1, 5))
    for row, ((heads, dim), dtype, queries) in zip(found["measured"], layers, strict=True):
        named = row["key_heads"], row["head_dim"], row["dtype"], row["queries"]
        assert named == (heads, dim, dtype, queries)
        size = 2 if dtype == "bfloat16" else 4
        for ms, gb_s in ((row["ms"], row["gb_s"]), (row["torch_ms"], row["torch_gb_s"])):
            assert gb_s == pytest.approx(2 * heads * 700 * dim * size / ms / 1e6)
        assert row["over_torch"] == pytest.approx(row["torch_ms"] / row["ms"])
        assert row["of_read_rate"] == pytest.approx(row["gb_s"] / rate)
        for name in ("error", "torch_error"):
            assert 0 < row[name] < (1e-2 if size == 2 else 1e-5)
    assert (
        "## Over one layer's keys and values" in printed and "| 8         |      128 |  float32 " in printed
    )


def test_kernels_take_turns_and_are_held_against_float64(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []

    class Off(ReferenceBackend):
        by = 0.5

        def parts(
            self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            calls.append(self.by)
            out, lse = super().parts(queries, keys, values, scale, mask)
            return out + self.by, lse

    class Further(Off):
        by = 0.75

    monkeypatch.setattr(bench.attention, "TorchCpuBackend", Further)
    case = AttentionCase(shapes=((2, 16),), tokens=90, queries=(2, 7), repeats=2)
    for row in measure(Off(), 2, 16, torch.float32, case):
        assert (row["error"], row["torch_error"]) == pytest.approx((0.5, 0.75), abs=1e-5)
    assert calls == [0.5, 0.75] * 2 * (1 + 2)
    parts = [torch.randn(2, n, 16, generator=torch.Generator().manual_seed(n)) for n in (3, 50, 51)]
    parts[2] = parts[2][:, :50]
    queries, keys, values = (part.double() for part in parts)
    reference = attend(ReferenceBackend(), queries, keys[None], values[None], 0.2)
    for found, wanted in zip(exact(*parts, 0.2), reference, strict=True):
        torch.testing.assert_close(found, wanted)


# reports


def test_table() -> None:
    assert report.table(["name", "n"], [["a", 1], ["long name", 22]]) == (
        "| name      |   n |\n|-----------|----:|\n| a         |   1 |\n| long name |  22 |"
    )


def test_rows_as_a_table() -> None:
    found = studies.table([{"a_b": 0.5, "n": 3, "x": None}, {"a_b": 2e-5, "n": True, "x": 12.345}])
    assert found.splitlines()[2:] == ["| 0.500   |   3 |     – |", "| 2.0e-05 | yes | 12.35 |"]
    assert found.startswith("| a b ")


def test_a_part_without_rows_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of `paper` where every row needs a draft and there is none."""
    nothing = studies.Part(lambda study: [], ("label",), ("plotted",))
    subject = SimpleNamespace(device=CPU, settings={})
    study = studies.Study("none", "nothing", "", Sizes(), {}, lambda *_: subject, {"drafts": nothing})
    monkeypatch.setattr(command_line, "commands", lambda: (study,))
    assert command_line.main(["none", "--out", str(tmp_path / "none.json")]) == 0
    assert "\n\nNothing here can be measured with these models.\n" in (tmp_path / "none.md").read_text()
    assert last_line(capsys)["drafts"] == []


def test_machine() -> None:
    described = machine.describe(torch.device("cpu"))
    assert described["threads"] == torch.get_num_threads() and described["processor"]
    assert machine.read_rate(torch.device("cpu"), size=2**20) > 0
    named = machine.slug({"processor": "Intel(R) Xeon(R) CPU @ 2.20GHz", "threads": 2})
    assert named == "intel-xeon-cpu-2-20ghz-2-threads"
