"""The search for blocks to skip: its measurements, its result, and the file that it writes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from itertools import combinations, count
from pathlib import Path
from typing import Any

import pytest
from support.small_engine import SIZES
from support.tiny_models import byte_tokenizer, real_text, tiny_target

from bench import search_skips
from bench.__main__ import main
from bench.search_skips import PLAIN, ROUNDS, finalists, search
from offload_rt import LLM, SamplingParams
from offload_rt.api.context import Context
from offload_rt.config.files import config_names, to_toml
from offload_rt.config.schema import Config
from offload_rt.drafting.levels.configs import load_config
from offload_rt.model.layer_order import EXACT, LayerOrder, blocks_of, skipping

LAYERS = 3
GAIN = {"0a": -0.2, "0m": -0.05, "1a": 0.1, "1m": 0.04, "2a": 0.06, "2m": -0.01}
"""Change of the speed when a block alone is skipped."""
BEST = "skip:1"
PATH = [EXACT, "skip:1a", BEST]


def speed(layers: str) -> float:
    """Returns a declared speed: 1a and 2a gain each and lose together."""
    plan = LayerOrder.parse(layers, LAYERS)
    if plan is None:
        return 1.0
    blocks = {*(f"{layer}a" for layer in plan.no_attention), *(f"{layer}m" for layer in plan.no_mlp)}
    return 1.0 + sum(GAIN[block] for block in blocks) - 0.2 * ({"1a", "2a"} <= blocks)


def every_plan() -> list[str]:
    blocks = blocks_of(LAYERS)
    chosen = (some for size in range(len(blocks)) for some in combinations(blocks, size))
    return [skipping(some) for some in chosen if sum(block[-1] == "a" for block in some) < LAYERS]


def test_the_best_plan_is_found_while_the_machine_slows_down() -> None:
    assert max(every_plan(), key=speed) == BEST
    # Half as fast with every seed: only measurements of one seed can be compared.
    *_, plans = search(LAYERS, lambda layers, seed: speed(layers) / 2.0**seed, count())
    assert plans == PATH


def test_a_step_measures_only_what_may_gain_most() -> None:
    asked: list[tuple[str, int]] = []

    def rate(layers: str, seed: int) -> float:
        asked.append((layers, seed))
        return speed(layers)

    found = list(search(LAYERS, rate, count(5)))
    alone = ["skip:0a", "skip:0m", "skip:1a", "skip:1m", "skip:2a", "skip:2m"]
    # 2a gained more alone than 1m; beside 1a it loses, and then 1m gains more than any other ever did.
    again = ["skip:1a,2a", "skip:1"]
    assert [plan for plan, _ in asked[::2]] == [*alone, *again]
    assert [plan for plan, _ in asked[1::2]] == [EXACT] * 6 + ["skip:1a"] * 2
    assert [seed for _, seed in asked] == [seed for seed in range(5, 13) for _ in "ab"]
    # The results if the search ended there.
    assert found[:3] == [[EXACT], [EXACT], PATH[:2]] and found[-2:] == [PATH[:2], PATH]


@pytest.mark.parametrize(("layers", "last"), [(1, "skip:0m"), (2, "skip:0,1m"), (3, "skip:0,1,2m")])
def test_some_attention_is_always_left(layers: int, last: str) -> None:
    def rate(plan: str, seed: int) -> float:
        skipped = LayerOrder.parse(plan, layers)  # refuses a plan without attention
        return 1.0 if skipped is None else 2.0 + len(skipped.no_attention) + len(skipped.no_mlp)

    *_, plans = search(layers, rate, count())
    assert plans[-1] == last, "each block gains"


def test_finalists_are_spread_over_the_plans_found() -> None:
    assert finalists([EXACT]) == [EXACT]
    assert finalists(PATH) == PATH
    assert finalists([EXACT, *"abcdefghi"]) == [EXACT, "c", "f", "i"]


def test_what_is_skipped_is_written_as_it_is_read() -> None:
    assert skipping([]) == EXACT
    assert skipping(["10m", "2a", "10a", "3m"]) == "skip:2a,3m,10"
    for plan in every_plan()[1:]:
        read = LayerOrder.parse(plan, LAYERS)
        assert read is not None
        blocks = [f"{layer}a" for layer in read.no_attention] + [f"{layer}m" for layer in read.no_mlp]
        assert skipping(blocks) == plan


@pytest.mark.parametrize("name", config_names())
def test_a_configuration_is_written_as_it_is_read(name: str, tmp_path: Path) -> None:
    level = {"model": "target", "cache": "retrieved", "layers": "skip:1a", "calibrate": False}
    changes: dict[str, object] = {
        "retrieval.refresh": "acceptance:0.5",
        "streaming.window": 100,
        "speculation.step_down": False,
        "datastore.path": 'a "path"\\with ü, 🐋, \x7f,\n\t and \x01.safetensors',
        "offload.refresh_from": "store",
    }
    for overrides in ({}, changes, changes | {"speculation.levels": ["draft:streaming", level]}):
        config = load_config(name, overrides)
        path = tmp_path / f"{name}.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        assert load_config(str(path)) == config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a sample text."""
    folder = tmp_path_factory.mktemp("search")
    tiny_target("llama-gqa", layers=LAYERS).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "sample.txt").write_text(real_text()[:400], encoding="utf-8")
    return folder


def searched(folder: Path, out: Path, more: str) -> int:
    sizes = " ".join(f"--set {key}={str(value).lower()}" for key, value in SIZES.items())
    files = f"--model {folder}/model --prompt-file {folder}/sample.txt -o {out}"
    return main(shlex.split(f"search-skips --device cpu -n 8 {files} {sizes} {more}"))


def found(out: Path) -> Config:
    config = load_config(str(out))
    assert config.retrieval.budget == SIZES["retrieval.budget"], "what was set is kept"
    return config


def measured_as(rate: Callable[[str], float], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, drafting with some layers is as fast as `rate` says."""
    monkeypatch.setattr(search_skips, "rate", lambda *given: rate(given[-2]))


def test_the_written_configuration_is_lossless(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, lengths, rate = tmp_path / "found.toml", set[int](), search_skips.rate

    def noted(context: Context, *given: Any) -> float:
        lengths.add(len(context))
        return rate(context, *given)

    monkeypatch.setattr(search_skips, "rate", noted)
    assert searched(folder, out, "--config streaming") == 0
    assert lengths == {400}, "each measurement continues the sample text itself"
    found(out)
    prompt, params = list(real_text().encode()[:400]), SamplingParams(max_tokens=24)
    with LLM(folder / "model", config=str(out), device="cpu") as llm, llm.read(prompt) as context:
        expected = context.generate(params=params, config="plain").tokens
        context.rewind(len(prompt))
        assert context.generate((), params, str(out)).tokens == expected


def test_the_fastest_plan_is_written_and_reported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int]] = []

    def rate(*given: Any) -> float:
        *_, layers, seed = given
        asked.append((layers, seed))
        return 50.0 if layers == PLAIN else 100.0 * speed(layers)

    monkeypatch.setattr(search_skips, "rate", rate)
    out = tmp_path / "found.toml"
    assert searched(folder, out, "--seed 3") == 0
    assert [level.layers for level in found(out).speculation.levels] == [BEST]
    said, written = capsys.readouterr().out, out.read_text()
    rows = [line.split() for line in said.splitlines()]
    assert rows[1:3] == [["plain", "50.0", "1.00"], ["all", "100.0", "2.00"]]
    assert rows[3:5] == [["skip:1a", "110.0", "2.20"], ["skip:1", "114.0", "2.28"]]
    verdict = "114.0 tokens/s, 2.28 times as fast as plain decoding; 1.14 times as fast as all layers\n"
    assert f"layers = skip:1; {verdict}" in said and f"# {verdict}" in written
    assert "3 layers; sample of 400 tokens, temperature 0.\n" in written
    compared = asked[-4 * ROUNDS :]
    assert compared == [(plan, seed) for seed in range(11, 16) for plan in (PLAIN, *PATH)], "in turn"


@pytest.mark.parametrize("first_is_lucky", [False, True])
def test_without_a_gain_nothing_is_skipped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_is_lucky: bool
) -> None:
    """Even if the first measurement of each plan is too high: the final comparison decides."""
    seen: set[str] = set()

    def rate(layers: str) -> float:
        luck = 1.5 if first_is_lucky and layers not in seen else 1.0
        seen.add(layers)
        return luck * {PLAIN: 0.5, EXACT: 1.0}.get(layers, 0.9)

    measured_as(rate, monkeypatch)
    out = tmp_path / "found.toml"
    assert searched(folder, out, "") == 0
    assert [level.layers for level in found(out).speculation.levels] == [EXACT]
    assert "nothing is gained by skipping" in out.read_text()


def test_the_search_ends_in_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best block of an unfinished step counts."""
    asked: list[str] = []

    def rate(layers: str) -> float:
        asked.append(layers)
        return 0.5 if layers == PLAIN else speed(layers)

    measured_as(rate, monkeypatch)
    monkeypatch.setattr("time.monotonic", lambda: 10.1 * len(asked))
    out = tmp_path / "found.toml"
    assert searched(folder, out, "--minutes 1") == 0
    assert asked[:7] == ["skip:0a", EXACT, "skip:0m", EXACT, "skip:1a", EXACT, PLAIN]
    assert [level.layers for level in found(out).speculation.levels] == ["skip:1a"]


@pytest.mark.parametrize(("measured", "kept"), [(0, None), (5, "skip:1a"), (9, BEST)])
def test_ctrl_c_keeps_the_best_so_far(
    measured: int, kept: str | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first measurement there is nothing to keep; the last case interrupts the comparison."""
    calls: list[str] = []

    def rate(layers: str) -> float:
        if len(calls) == 2 * measured:
            raise KeyboardInterrupt
        calls.append(layers)
        return 0.5 if layers == PLAIN else speed(layers)

    measured_as(rate, monkeypatch)
    out = tmp_path / "found.toml"
    assert searched(folder, out, "") == 130
    assert out.exists() == (kept is not None)
    if kept is not None:
        assert [level.layers for level in found(out).speculation.levels] == [kept]
        assert "# interrupted before the final comparison\n" in out.read_text()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--minutes 0", "'0' is not an integer of at least 1"),
        ("-n 0 -o F/new", "max-tokens 0 is out of range"),
        ("-o F", "is a folder; name a file in it"),
        ("-o F/sample.txt", "sample.txt: exists; name another file, or remove it"),
        ("-o F/no/new", "its folder does not exist"),
        ("-o F/new --config auto", "--config auto: selects among several configurations; name one in which"),
        ("-o F/new --config plain", "--config plain: has no level in which the target drafts"),
        ("-o F/new --config naive", "--config naive: has no level in which the target drafts"),
        ("-o F/new --config F/no.toml", "no such file"),
        ("-o F/new --prompt a --model F/model", "the sample text has 1 tokens; give one of at least 256"),
    ],
)
def test_what_cannot_be_searched_is_a_line(
    flags: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search-skips", *(flag.replace("F", str(folder), 1) for flag in flags.split())]) == 2
    out, error = capsys.readouterr()
    assert out == "" and line in " ".join(error.split()) and not (folder / "new").exists()
