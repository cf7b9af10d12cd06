"""`python -m bench`: bad input, and `model-card` with the figures that it computes. No time is checked."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench_setup import SETTINGS, SMALL, bench_main, records, save_pair
from support.tiny_models import byte_ids, real_text, tiny_target
from transformers import PreTrainedModel

from bench import COMMANDS, results
from bench.studies import acceptance, model_card, needles
from bench.studies.model_card import STUDY, Sizes, of_change, token_losses, window_of
from bench.studies.study import Part, Study
from bench.studies.texts import sequence_over, take
from offload_rt.drafting.levels.configs import load_config
from offload_rt.engine.sequence import TokenSequence
from offload_rt.model.runner import CausalModel


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama-gqa", seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_pair(folder)
    return folder


@contextmanager
def reading(target: PreTrainedModel, tokens: Sequence[int], room: int = 0) -> Iterator[TokenSequence]:
    """A sequence that has read `tokens`, for any small cache."""
    config = load_config("retrieval", SMALL)
    with sequence_over(CausalModel(target, "tiny"), config, len(tokens), room) as sequence:
        take(sequence, tokens)
        yield sequence


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys; from bench.__main__ import main; main(['--help']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "model-card" in done.stdout


def test_commands_in_the_documents_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    root, given = Path(__file__).parents[2], list[Namespace]()
    names = "README.md", "docs/measurements.md", "docs/usage.md", "Makefile"
    texts = [(root / name).read_text() for name in names]
    lines = "\n".join(texts).replace("\\\n", "")
    found = re.findall(r"(?:python -m |')bench ([a-z][^`'\n]*)", lines)
    assert {words.split()[0] for words in found} == set(COMMANDS)
    monkeypatch.setattr(Study, "run", lambda study, arguments: given.append(arguments))
    for module in (import_module(f"bench.{name}") for name, _ in COMMANDS.values()):
        if not hasattr(module, "STUDY"):
            monkeypatch.setattr(module, "run", given.append)
    for words in found:
        known = words.replace(" --shapes …", "").replace("$(RANDOM_ON_CUDA)", "--model random")
        known = known.replace("$(shape)", "shape").replace("$(CUDA_PEERS)", "ours:plain")
        assert bench_main(known) == 0, words
    assert len(given) == len(found)


BAD_INPUT = [
    ("fly", "invalid choice: 'fly'"),
    ("speedup --contexts 7000 {model}", "--contexts 7000: the text has 6000 tokens"),
    ("peers --contexts 4k", "'4k' is not a whole number of at least 2"),
    ("speedup --turns 0", "'0' is not a whole number of at least 1"),
    ("peers --acceptance 2", "'2' is not a number of at least 0 and at most 1"),
    ("speedup --set retrieval.budgt=3", "unknown key retrieval.budgt"),
    ("speedup --text missing.txt", "text missing.txt: cannot be read"),
    ("speedup --out missing/folder.jsonl --contexts 16", "its folder does not exist"),
    ("peers --systems ours:plain --contexts 16 --out page.md", "the page or the picture goes there"),
    ("peers --systems ours:plain --contexts 16 --out {torn}", "line 1 is no benchmark result"),
    ("peers --systems sglang:plain", "argument --systems: sglang:plain: write adapter:system; adapters are"),
    ("peers --systems ours:fastest", "fastest"),
    ("peers --systems transformers:static+a.b=1", "only ours:… takes settings after a +"),
    ("peers --systems ours:plain+store.page=64", "all systems of ours share store.page; use --set"),
    ("peers --systems ours:plain+acceptance=2", "acceptance must be a number from 0 to 1, got 2"),
    ("peers --systems ours:trees+acceptance=0.5", "can be held for chains only"),
    ("peers --systems ours:plain --acceptance 0.5", "no system of ours among --systems drafts chains"),
    ("link --device cuda", "give --link 0"),
    ("peers --model random:tiny --text book.txt", "reads no text; leave out --text"),
    ("peers --model random:huge", "there is no such shape; there are tiny"),
    ("prediction-accuracy missing.jsonl", "cannot be read"),
    ("prediction-accuracy {results}/peers-cpu.jsonl", "is no result of `bench offload`"),
    ("model-card --context 1000", "'1000' is not a whole number of at least 1024"),
    ("model-card --context 6000 {model}", "text book.txt: has 6000 tokens, and 6256 are needed"),
    ("model-card --parts loss,luck", "'luck' is none of loss, needle, acceptance"),
    ("paper --datastore missing", "missing"),
    ("paper --shapes chain@7", "'chain@7' is none of chain@8"),
]


@pytest.mark.parametrize(("words", "message"), BAD_INPUT, ids=[one for one, _ in BAD_INPUT])
def test_bad_input_is_one_line(
    words: str,
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torn, stored = tmp_path / "torn.jsonl", results.RESULTS
    torn.write_text('{"benchmark": "other"}\n{"benchmark": "pee')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "cache"))
    model = f"--model {folder}/target --text {folder}/book.txt"
    assert bench_main(words.format(model=model, torn=torn, results=stored)) == 2
    out, err = capsys.readouterr()
    # Loading weights draws a bar of its own.
    (error,) = [line for line in err.splitlines() if line.startswith("bench: error: ")]
    assert message in error and out == ""
    assert not list(tmp_path.glob("**/*.json")), "neither a result nor a checkpoint was written"


def transformers_losses(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens)])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor([*tokens[1:]]), reduction="none").double()


def test_model_card(
    folder: Path,
    tmp_path: Path,
    target: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kinds = (acceptance.RETRIEVAL, acceptance.RETRIEVAL_STRIDE, acceptance.STREAMING)
    small = dataclasses.replace(STUDY, sizes=Sizes(shares=(8,), caches=kinds))
    monkeypatch.setattr(model_card, "STUDY", small)
    monkeypatch.setattr("gc.collect", lambda: 0)  # it takes longer than a tiny model does
    other, out = tmp_path / "other.txt", tmp_path / "card.jsonl"
    other.write_text(real_text()[20_000:23_000], encoding="utf-8")
    words = f"model-card --model {folder}/target --text {folder}/book.txt --text {other} --out {out}"
    sizes = ["--context 2048 --step 600 --positions 128", *SETTINGS]
    assert bench_main(words, *sizes, "--parts loss") == 0
    assert bench_main(words, *sizes) == 0
    printed, progress = capsys.readouterr()
    assert "part 3 of 3: acceptance" in progress and "as measured at" in progress, (
        "loss is not measured again"
    )
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads(out.with_suffix(".summary.json").read_text())
    assert found == {record["part"]: record["rows"] for record in records(out)}
    prompts = {"book.txt": real_text().encode()[:2048], "other.txt": other.read_bytes()[:2048]}
    losses = {name: transformers_losses(target, tokens) for name, tokens in prompts.items()}
    along, windows = found["loss"][:4], found["loss"][4:]
    assert [(row["from"], row["to"]) for row in along] == [(0, 600), (600, 1200), (1200, 1800), (1800, 2048)]
    for name, expected in losses.items():
        steps = [expected[:599], *expected[599:].split(600)]
        assert [row[name] for row in along] == pytest.approx([float(part.mean()) for part in steps], abs=1e-4)
    ends = [(n, n - 32) for n in (64, 128, 256, 512, 1024, 2048)]
    assert [(row["prompt"], row["from"]) for row in windows] == ends
    half = torch.cat([transformers_losses(target, tokens[-1024:])[-32:] for tokens in prompts.values()])
    whole = torch.cat([expected[-32:] for expected in losses.values()])
    assert windows[-1]["loss"] == pytest.approx(float(whole.mean()), abs=1e-4)
    assert windows[-1]["change"] == pytest.approx(float((whole - half).mean()), abs=1e-4)
    assert [(row["context"], row["passages"]) for row in found["needle"]] == [(1024, 1), (2048, 1)]
    contexts = [(kind, context, context // 8) for context in (512, 2048) for kind in kinds]
    assert [(row["cache"], row["context"], row["entries"]) for row in found["acceptance"]] == contexts
    assert all(0 < row["books"] < 1 and 0 < row["needles"] < 1 for row in found["acceptance"])
    page = out.with_suffix(".md").read_text()
    for part in STUDY.parts.values():
        assert f"## {part.title}\n" in page and f"## {part.title}\n" in printed


def test_an_interrupt_shows_the_rows_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(subject: object) -> Iterator[results.Row]:
        """Title."""
        yield {"name": "first", "value": 0.5}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        STUDY._measured(Part(measure), None)
    assert "| first | 0.500 |" in capsys.readouterr().out


def test_a_loss_rises_by_two_standard_errors_or_not() -> None:
    noise = torch.linspace(-1, 1, 50, dtype=torch.float64)  # a standard error of 0.083
    found = [of_change(noise + change) for change in (0.2, 0.12, -0.1)]
    assert [row["change"] for row in found] == pytest.approx([0.2, 0.12, -0.1])
    assert [row["error"] for row in found] == pytest.approx([float(noise.std()) / 50**0.5] * 3)
    assert [row["rises"] for row in found] == [True, False, False]
    assert window_of([7, 1, 2, 3, 4], 3, beginning=7) == [7, 3, 4]
    assert window_of([7, 1, 2, 3, 4], 3, beginning=None) == [2, 3, 4]


def test_a_loss_is_that_of_transformers(target: PreTrainedModel) -> None:
    tokens = byte_ids(300)
    with sequence_over(CausalModel(target, "tiny"), load_config("plain"), 300) as sequence:
        found = token_losses(sequence, tokens)
    torch.testing.assert_close(found, transformers_losses(target, tokens), atol=1e-4, rtol=1e-4)


def test_needles_lie_at_their_depths_and_are_scored(target: PreTrainedModel) -> None:
    text, generator = [*range(1000, 4000)], torch.Generator().manual_seed(0)
    prompt, passages = needles.plant(text, 2000, 5, 2, range(1000), generator)
    # Without the passages the text is as it was.
    assert [t for t in prompt if t >= 1000] == text[: 2000 - 10 * needles.PASSAGE] and len(prompt) == 2000
    starts = [at for at in range(1, 2000) if prompt[at] < 1000 <= prompt[at - 1]]
    assert [prompt[start : start + needles.PASSAGE] for start in starts] == passages
    for depth, start in enumerate(starts[::2]):
        assert start == pytest.approx(1 + depth / 4 * (2000 - 1 - 128), abs=1)
    with pytest.raises(ValueError, match="do not fit"):
        needles.plant(text, 400, 5, 2, range(1000), generator)
    prompt, passages = needles.plant(byte_ids(500), 400, 2, 2, range(256), generator)

    def chosen(passage: list[int]) -> torch.Tensor:
        """The target's choice in the place of each token after the cue."""
        logits: torch.Tensor = target(torch.tensor([prompt + passage])).logits[0]
        return logits.argmax(-1)[400 + needles.CUE - 1 : -1]

    # This model recalls nothing by itself: two passages continue as it does.
    for passage in (passages[0], passages[3]):
        passage[needles.CUE] = int(chosen(passage)[0])
    right = [int((chosen(one) == torch.tensor(one[needles.CUE :])).sum()) for one in passages]
    asked = 2 * (needles.PASSAGE - needles.CUE)
    with reading(target, prompt) as sequence:
        found = needles.recall(sequence, passages, count=2)
    assert found == pytest.approx([(right[0] + right[1]) / asked, (right[2] + right[3]) / asked])


def test_acceptance_is_one_where_everything_is_kept(target: PreTrainedModel) -> None:
    text = byte_ids(240)
    with reading(target, text[:200], room=40) as sequence:
        for kind in acceptance.CACHES:
            whole, some = (acceptance.acceptance(sequence, text[200:], kind, budget) for budget in (256, 48))
            rounded = {acceptance.EIGHT_BITS: 1e-2, acceptance.FOUR_BITS: 0.2}
            assert whole.tolist() == pytest.approx([1.0] * 40, abs=rounded.get(kind, 1e-4))
            assert some.shape == (40,) and 0 < float(some.mean()) < 0.999


def test_acceptance_of_exact_top_k_against_transformers() -> None:
    model = tiny_target(seed=4, layers=1, spread=0.1)
    context, budget = 120, 30
    text = byte_ids(context + 8)
    # The queries of the last 8 tokens over all keys, from transformers' own attention weights.
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model(torch.tensor([text]), output_attentions=True)
        weights = out.attentions[0][0, :, context:, :context]
        mass = (weights / weights.sum(-1, keepdim=True)).sum(1)
        mask = torch.full((1, len(mass), 8, context + 8), -torch.inf)
        for head, kept in enumerate(mass.topk(budget).indices):
            mask[0, head, :, kept] = 0
        mask[..., context:] = torch.full((8, 8), -torch.inf).triu(1)
        hidden = model.model.embed_tokens(torch.tensor([text]))
        full = torch.full((1, len(mass), context + 8, context + 8), -torch.inf).triu(1)
        full[:, :, context:] = mask
        rotation = model.model.rotary_emb(hidden, position_ids=torch.arange(context + 8)[None])
        layer = model.model.layers[0](hidden, attention_mask=full, position_embeddings=rotation)
        small = model.lm_head(model.model.norm(layer))[0, context:].softmax(-1)
        expected = torch.minimum(small, out.logits[0, context:].softmax(-1)).sum(-1)
    with reading(model, text[:context], room=8) as sequence:
        found = acceptance.acceptance(sequence, text[context:], acceptance.TOP_K, budget)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert float(expected.mean()) < 0.99


def test_table() -> None:
    found = results.table([{"a_b": 0.5, "n": 3, "x": None}, {"a_b": 2e-5, "n": True, "x": 12.345}])
    assert found.splitlines() == [
        "| a b     |   n |     x |",
        "|---------|----:|------:|",
        "| 0.500   |   3 |     – |",
        "| 2.0e-05 | yes | 12.35 |",
    ]


@pytest.mark.parametrize(
    ("name", "sizes", "parts"),
    [
        (
            "rollback",
            {"contexts": (64,), "hidden": 256, "drafted": 2, "link": 100.0, "turns": 1},
            {"ways": 2},
        ),
        (
            "planes",
            {
                "layers": 1,
                "hidden": 128,
                "intermediate": 192,
                "heads": 4,
                "kv_heads": 2,
                "rows": (1, 3),
                "turns": 1,
            },
            {"passes": 2, "memory": 1},
        ),
        (
            "pieces",
            {"contexts": (300,), "link": 100.0, "turns": 1},
            {"in-place": 1, "link": 1},
        ),
        ("pages", {"context": 600, "rate": 100.0, "queries": (2,), "turns": 1}, {"code": 2, "passes": 1}),
    ],
)
def test_studies_without_texts(
    name: str, sizes: dict[str, Any], parts: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module(f"bench.{COMMANDS[name][0]}")
    monkeypatch.setattr(module, "STUDY", dataclasses.replace(module.STUDY, sizes=module.Sizes(**sizes)))
    assert bench_main(name, "--out", tmp_path / "out.jsonl") == 0
    assert {one["part"]: len(one["rows"]) for one in records(tmp_path / "out.jsonl")} == parts
