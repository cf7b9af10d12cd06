"""The search for blocks to skip: what it measures, what it finds, and the file that it writes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from small_engine import SIZES
from tiny_models import byte_tokenizer, real_text, tiny_target

from offload_rt import LLM, SamplingParams, cli
from offload_rt.commands import search_skips
from offload_rt.config import Config
from offload_rt.layers import EXACT, LayerPlan, blocks_of, skipping
from offload_rt.skips import PLAIN, Trial, compare, fastest, search
from offload_rt.toml import config_names, load_config, to_toml

LAYERS = 3
GAIN = {"0a": -0.2, "0m": -0.05, "1a": 0.1, "1m": 0.04, "2a": 0.06, "2m": -0.01}
"""Of speed, by the block that is left out alone."""


def speed(layers: str) -> float:
    """Declared: 1a and 2a gain each and lose together, 0m gains where 1a is missing too."""
    plan = LayerPlan.parse(layers, LAYERS)
    if plan is None:
        return 1.0
    blocks = {*(f"{layer}a" for layer in plan.no_attention), *(f"{layer}m" for layer in plan.no_mlp)}
    together = -0.2 * ({"1a", "2a"} <= blocks) + 0.2 * ({"0m", "1a"} <= blocks)
    return 1.0 + sum(GAIN[block] for block in blocks) + together


def drifting() -> Callable[[str, int], float]:
    """Tokens a second on a machine that halves its speed with every text."""
    return lambda layers, text: 100.0 * speed(layers) / 2.0**text


def every_plan() -> list[str]:
    blocks = blocks_of(LAYERS)
    chosen = (some for count in range(len(blocks)) for some in combinations(blocks, count))
    return [skipping(some) for some in chosen if sum(block[-1] == "a" for block in some) < LAYERS]


def test_the_best_of_all_plans_is_found_while_the_clock_drifts() -> None:
    best = max(every_plan(), key=speed)
    assert best == "skip:0m,1"
    trials = list(search(LAYERS, 40, 0, drifting()))
    assert len(trials) == 40
    (found,) = fastest(trials, 1)
    assert found == Trial(best, pytest.approx(speed(best)))
    assert trials == list(search(LAYERS, 40, 0, drifting())), "a seed repeats its trials"


def test_a_search_begins_with_single_blocks_and_leaves_some_attention() -> None:
    asked: list[tuple[str, int]] = []

    def rate(layers: str, text: int) -> float:
        asked.append((layers, text))
        return speed(layers)

    plans = [trial.layers for trial in search(LAYERS, 60, 5, rate)]
    alone = ["skip:0a", "skip:0m", "skip:1a", "skip:1m", "skip:2a", "skip:2m"]
    assert plans[:7] == [EXACT, *alone]
    assert plans[7:10] == ["skip:1a,2a", "skip:1,2a", "skip:1,2"], "the harmless ones together"
    # Each beside all layers, on a text of its own.
    assert asked[:4] == [("skip:0a", 6), (EXACT, 6), ("skip:0m", 7), (EXACT, 7)]
    for plan in plans:
        LayerPlan.parse(plan, LAYERS)  # refuses one without attention


def test_only_the_mlp_of_a_single_layer_can_be_skipped() -> None:
    assert {trial.layers for trial in search(1, 12, 0, lambda layers, text: 1.0)} == {EXACT, "skip:0m"}


def test_the_fastest_plans_by_the_mean_of_their_trials_are_compared_on_new_texts() -> None:
    trials = [Trial(EXACT, 9.0), Trial("skip:1", 3.0), Trial("skip:2", 2.0), Trial("skip:1", 0.0)]
    assert fastest(trials, 2) == [Trial("skip:2", 2.0), Trial("skip:1", 1.5)]
    asked: list[tuple[str, int]] = []
    rounds = compare(trials, 10, lambda layers, text: asked.append((layers, text)) or 1.0, most=1)
    assert next(rounds) == {PLAIN: 1.0, EXACT: 1.0, "skip:2": 1.0}
    next(rounds)
    assert [text for _, text in asked] == [14, 14, 14, 15, 15, 15]


def test_what_is_skipped_is_written_as_it_is_read() -> None:
    assert skipping([]) == EXACT
    assert skipping(["10m", "2a", "10a", "3m"]) == "skip:2a,3m,10"
    for plan in every_plan()[1:]:
        read = LayerPlan.parse(plan, LAYERS)
        assert read is not None
        blocks = [f"{layer}a" for layer in read.no_attention] + [f"{layer}m" for layer in read.no_mlp]
        assert skipping(blocks) == plan


@pytest.mark.parametrize("name", config_names())
def test_a_configuration_is_written_as_it_is_read(name: str, tmp_path: Path) -> None:
    level = {"model": "target", "cache": "retrieved", "layers": "skip:1a", "calibrate": False}
    changes: dict[str, object] = {
        "retrieval.refresh": "acceptance:0.5",
        "draft.window": 100,
        "speculation.step_down": False,
        "datastore.path": 'a "path"\\with ü.safetensors',
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
    return cli.main(shlex.split(f"search-skips --device cpu -n 8 {files} {sizes} {more}"))


def found(out: Path) -> Config:
    config = load_config(str(out))
    assert config.retrieval.budget == SIZES["retrieval.budget"], "what was set is kept"
    return config


def measured_as(rate: Callable[[str], float], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, drafting with some layers is as fast as `rate` says."""
    monkeypatch.setattr(search_skips, "rate", lambda *given: rate(given[-2]))


@pytest.mark.parametrize("more", ["--trials 3", "--trials 2 --temperature 0.8 --config streaming"])
def test_what_is_written_runs_losslessly(folder: Path, tmp_path: Path, more: str) -> None:
    out = tmp_path / "found.toml"
    assert searched(folder, out, more) == 0
    found(out)
    prompt, params = list(real_text().encode()[:400]), SamplingParams(max_tokens=24)
    layers = {"speculation.levels": [{"model": "target", "cache": "retrieved", "layers": "skip:0m,1"}]}
    with LLM(folder / "model", config=str(out), device="cpu") as llm:
        result = llm.generate(prompt, params)
        assert result.tokens == llm.plain(params).tokens
        if "streaming" not in more:
            assert llm.rerun(params, str(out), layers).tokens == result.tokens


def test_the_fastest_is_written_and_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_as(lambda layers: 50.0 if layers == PLAIN else 100.0 * speed(layers), monkeypatch)
    out = tmp_path / "found.toml"
    assert searched(folder, out, "") == 0  # 36 trials
    assert [level.layers for level in found(out).speculation.levels] == ["skip:0m,1"]
    said, written = capsys.readouterr().out, out.read_text()
    rows = [line.split() for line in said.splitlines()]
    assert rows[1:4] == [["plain", "50.0", "1.00"], ["all", "100.0", "2.00"], ["skip:0m,1", "129.0", "2.58"]]
    verdict = "129.0 tokens/s, 2.58 times as fast as plain decoding; 1.29 times as fast as all layers\n"
    assert f"layers = skip:0m,1; {verdict}" in said and f"# {verdict}" in written
    assert "3 layers; sample of 400 tokens, temperature 0.\n" in written


def test_nothing_is_skipped_where_nothing_is_gained(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_as(lambda layers: 5.0 - len(layers) * (layers != EXACT) / 9, monkeypatch)
    out = tmp_path / "found.toml"
    assert searched(folder, out, "--trials 8") == 0
    assert [level.layers for level in found(out).speculation.levels] == [EXACT]
    assert "nothing is gained by skipping" in out.read_text()


@pytest.mark.parametrize(("trial", "kept"), [(0, None), (2, EXACT), (5, "skip:1a"), (14, "skip:1a")])
def test_ctrl_c_keeps_the_best_so_far(
    trial: int, kept: str | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first trial there is nothing to keep; the last case interrupts the comparison."""
    calls: list[str] = []

    def rate(layers: str) -> float:
        calls.append(layers)
        if len(calls) > 2 * trial:
            raise KeyboardInterrupt
        return 0.5 if layers == PLAIN else speed(layers)

    measured_as(rate, monkeypatch)
    if trial == 0:
        monkeypatch.setattr(LLM, "generate", lambda *given: rate(PLAIN))
    out = tmp_path / "found.toml"
    assert searched(folder, out, "--trials 7") == 130
    assert out.exists() == (kept is not None)
    if kept is not None:
        assert [level.layers for level in found(out).speculation.levels] == [kept]
        assert f"# interrupted after {min(trial + 1, 7)} of 7 trials, " in out.read_text()


def test_a_missing_library_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "optuna" else name)
    assert searched(folder, tmp_path / "found.toml", "") == 2
    assert "search-skips needs optuna: pip install optuna\n" in capsys.readouterr().err
