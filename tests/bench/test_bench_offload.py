"""`bench offload`, `prediction-accuracy`, and the figures that they compute. No time is checked."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench_setup import SMALL, SMALLER, Inside, bench_main, records, save_pair
from support.tiny_models import byte_ids, tiny_target

from bench import cases, prediction_accuracy, random_models, runner, synthetic_acceptance
from bench.cases import CASES, IN_PLACE, STREAMED, Named, Place, in_place, with_acceptances
from bench.random_models import SHAPES, checkpoint, random_prompt
from bench.recorded_text import RecordedText
from bench.rounds import (
    BESIDE_A_PASS,
    Recorded,
    acceptance,
    alike,
    busy,
    drafting_ms,
    figures,
    link_use,
    summarise,
    worst,
)
from cpu_kv import CudaLink, PacedLink
from cpu_kv.link import CopyRecord
from offload_rt.drafting.levels.configs import load_config
from offload_rt.engine.controller import RoundTimes, SpeculationController
from offload_rt.errors import UsageError
from offload_rt.model.runner import open_runner
from offload_rt.system.hardware import named_hardware
from offload_rt.system.timeline import Span

LATE, AHEAD = "ours:retrieval+offload.ahead=0", "ours:retrieval"


def test_a_paced_link_records_its_copies_if_asked() -> None:
    link = PacedLink(1e7, latency_s=1e-4)
    ones = torch.ones(2**12)
    link.copy([(torch.empty(2**12), ones)]).synchronize()
    assert link.recorded() == []
    link.record()
    events = [link.copy([(torch.empty(2**12), ones)], to_host=way) for way in (False, True, False)]
    for event in events:
        event.synchronize()
    link.close()  # waits for the thread, which records a copy when it is done
    found = link.recorded()
    assert sorted(one.to_host for one in found) == [False, False, True] and link.recorded() == []
    for one in found:
        assert one.byte_count == 2**14 and one.end - one.start == pytest.approx(1e-4 + 2**14 / 1e7)
    first, second = (one for one in found if not one.to_host)
    assert first.end <= second.start + 1e-9


@pytest.mark.gpu
def test_a_cuda_link_records_its_copies() -> None:
    link = CudaLink("cuda")
    link.record()
    source, there = torch.ones(2**20, pin_memory=True), torch.empty(2**20, device="cuda")
    sent = link.copy([(there, source)], after=link.record_event())
    link.copy([(source, there)], after=sent, to_host=True).synchronize()
    found = link.recorded()
    assert [(one.to_host, one.byte_count) for one in found] == [(False, 2**22), (True, 2**22)]
    assert all(0 < one.end - one.start < 1 for one in found)


# ---------------------------------------------------------------------------------------------- arithmetic


def copies(*times: tuple[float, float], to_host: bool = False) -> list[CopyRecord]:
    return [CopyRecord(to_host, 1, start, end) for start, end in times]


def test_link_use_is_the_busy_share_of_a_pass() -> None:
    # Busy 1 s before the pass and 6 of its first 8 s, then idle until the pass ends.
    carried = copies((-1, 3), (3, 4), (6, 8)) + copies((0, 10), to_host=True)

    def use(*passes: tuple[float, float]) -> float | None:
        spans = [Span("pass", "verify", *times) for times in [(-1.0, 10.0), *passes]]  # the first is left out
        return link_use(Recorded([], spans, carried))

    assert use((0, 10)) == pytest.approx(6 / 8)
    assert use((0, 10), (20, 30)) == pytest.approx(6 / 8), "a pass without copies does not count"
    assert use((2, 4), (0, 10), (6, 7)) == pytest.approx(1.0), "the median over passes"
    assert use((4.5, 7)) == pytest.approx(1 / 2.5), "idle at its begin"
    assert use((20, 30)) is None
    assert busy(copies((4, 5), (0, 2), (1, 3), (3, 3.5))) == [(0, 3.5), (4, 5)]
    assert busy(copies((0, 1), to_host=True)) == []


def times(started: float, ms: float, guessed: bool | None, draft: float = 0.0, **changes: Any) -> RoundTimes:
    """A round of 4 drafted and accepted tokens; whatever else it has is 0."""
    given: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(RoundTimes)), 0)
    given |= {"started": started, "ms": ms, "draft_ms": draft, "pass_ms": ms - draft}
    given |= {"ahead_ms": ms - draft, "proposed": 4, "accepted": 4}
    return RoundTimes(**given | {"guessed": guessed} | changes)


def run_of(rounds: list[RoundTimes]) -> Recorded:
    spans = [Span("pass", "verify", one.started, one.started + one.ms / 1e3) for one in rounds]
    return Recorded(rounds, spans, copies((rounds[0].started, rounds[-1].started + 1.0)))


def row_of(system: str, rounds: list[RoundTimes]) -> dict[str, Any]:
    told = [figures(run_of(rounds)) | {"streamed_tokens": 8} for _ in range(3)]
    return {"system": system, "figures": told}


def test_figures_of_rounds() -> None:
    rounds = [
        times(0.0, 90.0, True, draft=50.0),
        times(0.1, 44.0, True),
        times(0.2, 46.0, False, accepted=1),
        times(0.3, 95.0, True, draft=50.0),
        times(0.4, 30.0, None, proposed=1, accepted=1),
    ]
    one = figures(run_of(rounds))
    assert one["ms_per_token"] == pytest.approx(300 / 12), "without the first round and the last"
    assert one["tokens_per_round"] == pytest.approx(12 / 3)
    assert one["acceptance"] == pytest.approx(14 / 15), "14 were accepted, and one that was judged was not"
    assert one["hits"] == pytest.approx(3 / 4) and one["link_use"] == pytest.approx(1.0)
    assert one["guessed_round_ms"] == pytest.approx(45), "the last of three was not guessed"
    assert one["pass_ms"] == pytest.approx(45) and one["drafted"] == 4
    assert "draft_token_ms" not in one, "drafted beside a pass"
    alone = [dataclasses.replace(each, ahead_ms=0.0) for each in rounds]
    assert figures(run_of(alone))["draft_token_ms"] == pytest.approx(50 / 12)
    assert acceptance([]) is None
    assert figures(run_of(rounds[:2]))["ms_per_token"] == pytest.approx(144 / 10), "too few to leave some out"


def test_rows_are_compared_with_those_of_the_same_turns_and_the_same_pass_in_place() -> None:
    plain = [times(float(at), 80.0, None, proposed=0, accepted=0) for at in range(4)]
    late = [times(0.5 * at, 90.0, None, draft=40.0, ahead_ms=0.0) for at in range(4)]
    ahead = [times(0.1 * at, 60.0, True) for at in range(4)]
    rows = [
        row_of("ours:plain", plain),
        row_of(LATE, late),
        row_of(AHEAD, ahead),
        {"system": "x", "error": ""},
    ]
    for factor, turn in zip((1.0, 10.0, 1.0), range(3), strict=True):
        for row in rows[:3]:  # a machine that slows down slows all
            row["figures"][turn]["ms_per_token"] *= factor
    rows[2]["figures"][2]["ms_per_token"] *= 3
    alone = [row_of(AHEAD, late)]
    summarise(alone, 0.0)
    assert drafting_ms(alone) == pytest.approx(BESIDE_A_PASS * 40)
    summarise(rows, 4.0)
    assert rows[0]["rounds"]["times_plain"] == 1 and rows[1]["rounds"]["times_plain"] == pytest.approx(10)
    found = rows[2]["rounds"]
    assert found["times_plain"] == pytest.approx(50), "the median of ratios"
    assert found["ahead_speedup"] == pytest.approx(5) and "ahead_speedup" not in rows[1]["rounds"]
    assert found["round_over_max"] == pytest.approx(60 / 40), "drafts take longer than 32 ms of stream"
    summarise(rows, 10.0)
    assert found is not rows[2]["rounds"] and rows[2]["rounds"]["round_over_max"] == pytest.approx(60 / 80)
    with pytest.raises(UsageError, match="none of ours drafts"):
        drafting_ms(rows[:1])
    other = "ours:retrieval+speculation.gamma2=12"
    assert alike(rows, other) is None and alike(rows, f"{AHEAD}+offload.refresh_from=store") is rows[1]
    assert alike(rows, AHEAD, late=True) is rows[1] and alike(rows[2:], AHEAD, late=True) is None
    assert worst([1.1, 0.8, 1.2]) == 0.8 and worst([1.3, 0.8]) == 1.3 and worst([]) is None


def test_systems_have_settings_and_acceptances() -> None:
    named = Named.parse(f"{LATE}+retrieval.budget=512+acceptance=0.5")
    assert named.settings == {"offload.ahead": 0, "retrieval.budget": 512} and named.acceptance == 0.5
    assert named.config({"retrieval.budget": 64, "retrieval.recent": 16}).retrieval.budget == 512
    held = with_acceptances(("transformers:static", "ours:plain", LATE, "ours:trees"), (0.8, 0.92), {})
    both = tuple(f"{LATE}+acceptance={rate}" for rate in (0.8, 0.92))
    assert held == ("transformers:static", "ours:plain", *both, "ours:trees")
    assert in_place(f"{LATE}+acceptance=1") == f"{AHEAD}+acceptance=1"


# ----------------------------------------------------------------------- continuations, and held acceptance


def tiny_text(link: PacedLink, capacity: int) -> RecordedText:
    target = open_runner(tiny_target("llama-gqa", spread=0.4), "tiny", lambda _: None)
    return RecordedText(target, None, link, load_config("retrieval", SMALL), capacity)


def test_a_text_continues_from_its_prompt_whatever_came_before() -> None:
    config, plain = load_config("retrieval", SMALL), load_config("plain", SMALL)
    with closing(tiny_text(PacedLink(1e12), 224)) as text:
        for prompt in ([byte_ids(200)], [byte_ids(150, start=9), byte_ids(150)]):
            assert text.prefill(prompt) == text.prefill(prompt) > 0
            found = [text.run(config, 16), text.run(plain, 24), text.run(config, 16)]
            first, second, third = ([result.tokens for result in results] for results, _ in found)
            assert first == [tokens[:16] for tokens in second] == third
            assert [len(tokens) for tokens in second] == [24] * len(prompt)
            assert all(run.rounds and run.spans and run.copies for _, run in found)
            assert all(span.start >= run.rounds[0].started for _, run in found for span in run.spans)


def decoded(rate: float, ahead: int, tokens: int) -> Sequence[RoundTimes]:
    config = load_config("retrieval", SMALL | {"offload.ahead": ahead, "speculation.gamma2": 4})
    with closing(tiny_text(PacedLink(1e9), 200 + tokens)) as text:
        text.prefill([random_prompt(64, 200)])
        return text.run(config, tokens, rate)[1].rounds


def test_acceptance_is_held() -> None:
    assert acceptance(decoded(0.8, ahead=0, tokens=200)) == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize(("rate", "runner_up"), [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0)])
def test_drafting_ahead_guesses_as_often_as_it_is_held(
    rate: float, runner_up: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if every pass took long enough to draft for all outcomes.
    monkeypatch.setattr(SpeculationController, "over", lambda *_: False)
    monkeypatch.setattr(synthetic_acceptance, "RUNNER_UP_HITS", runner_up)
    found = decoded(rate, ahead=4, tokens=30)[:-1]
    assert all(one.accepted == rate * one.proposed for one in found)
    guessed = [one.guessed for one in found if one.guessed is not None]
    if rate:
        assert guessed and all(guessed)
    else:  # until it is known that all is rejected, the likeliest outcome is another one
        assert len(guessed) > 20 and sum(guessed[15:]) == runner_up * len(guessed[15:])


def test_a_random_checkpoint_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", SMALLER)
    folder = checkpoint("random:tiny", torch.bfloat16, tmp_path)
    written = (folder / "config.json").stat()
    assert checkpoint("random:tiny", torch.bfloat16, tmp_path) == folder
    assert (folder / "config.json").stat() == written
    monkeypatch.setitem(SHAPES, "tiny", dataclasses.replace(SMALLER, parameters=2**50))
    with pytest.raises(UsageError, match="do not fit in memory"):
        checkpoint("random:tiny", torch.float16, tmp_path)
    monkeypatch.setattr(random_models, "available_memory", lambda: 2**60)
    with pytest.raises(UsageError, match=r"take 2097152.0 GiB, and \d.* are free in .*OFFLOAD_RT_CACHE"):
        checkpoint("random:tiny", torch.float16, tmp_path)


# ------------------------------------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of tiny runs of `bench offload`: `real.jsonl`, and `random.jsonl` at held acceptances."""
    folder = tmp_path_factory.mktemp("offload")
    places = (
        IN_PLACE,
        Place("both", 2.0, (0.25, 0.25), timeline=True),
        Place("over two links", 2.0, STREAMED, gpus=1),
    )
    case = dataclasses.replace(CASES["offload"], places=places, options=SMALL)
    sizes = "--contexts 160 -n 14 --turns 1 --device cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cases.CASES, "offload", case)
        patch.setitem(SHAPES, "tiny", SMALLER)
        patch.setattr(prediction_accuracy, "ATTENTION_REPEATS", 1)
        patch.setattr(runner, "Worker", Inside)
        patch.setenv("OFFLOAD_RT_CACHE", str(folder / "cache"))
        assert bench_main("offload", *save_pair(folder), sizes, f"--out {folder}/real.jsonl") == 0
        systems = f"--systems ours:plain,{LATE},{AHEAD} --acceptance 0,1 --model random:tiny"
        assert bench_main("offload", systems, sizes, f"--out {folder}/random.jsonl") == 0
    return folder


def test_offload(measured: Path) -> None:
    alone, *linked = records(measured / "real.jsonl")
    assert (measured / "real.png").stat().st_size > 5000
    assert [row["system"] for row in alone["rows"]] == ["ours:plain", AHEAD] and not alone["link_rate_gb_s"]
    kv_bytes = 160 * 2 * SMALLER.layers * SMALLER.kv_heads * SMALLER.head_dim * 4
    for one in linked:
        assert [row["system"] for row in one["rows"]] == list(CASES["offload"].systems)
        assert one["machine"]["threads"] == 1
        assert one["bound_ms"] == pytest.approx(2 * drafting_ms(alone["rows"]))
        assert one["link_rate_gb_s"] == pytest.approx(kv_bytes / 1e6 / one["bound_ms"])
        for row in one["rows"]:
            found, both = row["rounds"], one["place"] == "both"
            assert found["resident_tokens"] == found["cpu_tokens"] == (32 if both else 0)
            assert found["streamed_tokens"] == (80 if both else 64)
            assert found.get("other_gpus_tokens") == (None if both else 80)
            assert found["stream_ms"] == pytest.approx(one["bound_ms"] * found["streamed_tokens"] / 160)
            assert row["first_difference"] is None and 0 < found["link_use"] <= 1
            ratio = row["predicted"]["ms_per_token"] / found["ms_per_token"]
            assert found["predicted_over_measured"] == pytest.approx(ratio)
    page = (measured / "real.md").read_text()
    assert page.count("Carrying all KV once takes") == 2 and "| predicted/measured |" in page
    assert "\n\nRandom weights: for timing only. " in (measured / "random.md").read_text()
    plain, *held = records(measured / "random.jsonl")[1]["rows"]
    assert plain["synthetic"] is None and plain["first_difference"] is None
    for row in held:
        assert row["synthetic"] == row["rounds"]["acceptance"] and "first_difference" not in row
        assert row["notes"][0] == f"synthetic acceptance {row['synthetic']:g}"


def test_prediction_accuracy(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "accuracy.json"
    assert bench_main("prediction-accuracy", measured / "real.jsonl", "--out", out) == 0
    printed, report = json.loads(capsys.readouterr().out.splitlines()[-1]), json.loads(out.read_text())
    linked = records(measured / "real.jsonl")[1:]
    again = [row["rounds"]["predicted_over_measured"] for one in linked for row in one["rows"]]
    assert [one["ratio"] for one in report["rows"]] == pytest.approx(again)
    assert printed == {"worst": worst(again), "rows": len(again)}
    # Earlier versions called GPUs cards.
    path = tmp_path / "cards.jsonl"
    text = (measured / "real.jsonl").read_text().replace('"gpus": ', '"cards": ')
    path.write_text(text.replace("other_gpus_tokens", "other_cards_tokens"))
    assert bench_main("prediction-accuracy", path) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == printed
    # Rows with the KV in place count only if they were measured with the same settings.
    others = tmp_path / "others.jsonl"
    alone, record, _ = records(measured / "real.jsonl")
    others.write_text("".join(json.dumps(one) + "\n" for one in (alone | {"new_tokens": 7}, record)))
    assert bench_main("prediction-accuracy", others) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"worst": None, "rows": 0}


def test_a_paced_machine_is_planned_with_what_was_measured_alone(measured: Path) -> None:
    alone, record, _ = copy.deepcopy(records(measured / "real.jsonl"))
    plain, late, *_, ahead = record["rows"]
    for row in (plain, late, ahead):
        row["rounds"] |= {"acceptance": 1.0, "draft_token_ms": 7.0, "verdict_ms": 0.0}
        row["rounds"] |= {"resident_tokens": 0, "cpu_tokens": 0, "streamed_tokens": 144}
    for row, pass_ms in zip(alone["rows"], (6.0, 10.0), strict=True):
        row["rounds"]["pass_ms"] = pass_ms
    record["processor"]["attention"] = [{"queries": count, "rate": 5.0} for count in (2, 8)]
    record["link_rate_gb_s"] = 1e3

    def predict(row: dict[str, Any]) -> dict[str, float]:
        found = prediction_accuracy.predict(record, alone["rows"], row)
        assert found is not None
        return found

    fast = predict(late)
    assert fast["draft_alone_ms"] == pytest.approx(21.0)
    assert fast["pass_ms"] == pytest.approx(10.0, rel=0.05), "what a pass takes in place"
    assert predict(ahead)["round_ms"] == pytest.approx(10.0 + 21.0, rel=0.05), "one processor does both"
    assert (
        predict(plain)["pass_ms"] == pytest.approx(6.0, rel=0.05) and predict(plain)["tokens_per_round"] == 1
    )
    late["rounds"]["verdict_ms"] = 4.0
    assert predict(late)["round_ms"] - fast["round_ms"] == pytest.approx(4.0)
    record["link_rate_gb_s"] = 1e-6
    slow, token_bytes = predict(ahead), 2 * SMALLER.layers * SMALLER.kv_heads * SMALLER.head_dim * 4
    assert slow["pass_ms"] == pytest.approx(144 * token_bytes / 0.98, rel=0.02), "1 ms a byte"
    assert prediction_accuracy.predict(record, [], ahead) is None, "nothing was measured in place"
    record["hardware"] = json.loads(json.dumps(dataclasses.asdict(named_hardware("rtx4090"))))
    del record["processor"]
    on_gpu = prediction_accuracy.predict(record, [], ahead)
    assert on_gpu is not None and 0 < on_gpu["round_ms"] < slow["round_ms"]
