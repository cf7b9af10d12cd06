"""`bench offload` and `bench prediction-accuracy`: what they record and report. No time is checked here."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from test_bench import SMALL, last_line
from test_bench import pair as pair  # a fixture
from test_bench import text as text
from tiny_models import byte_ids, tiny_target

import bench.__main__ as command_line
from bench.offload import gpu, held, prediction_accuracy, references
from bench.offload.cases import ACCEPTANCES, Sizes, System, held_systems, paced_systems
from bench.offload.random_models import SHAPES, random_model
from bench.offload.rows import acceptance, busy, draft_token_ms, link_use, ms_per_token, row, times_as_fast
from bench.offload.text import Run, Subject, Text
from bench.offload.timeline_plot import lanes, window
from cpu_kv import CudaLink, KVLayout, PacedLink, PagedKVStore, TransferEngine
from cpu_kv.link import CopyRecord
from offload_rt.caches.places import Shares
from offload_rt.graphs import GraphedModel
from offload_rt.machine.hardware import Hardware, named_hardware
from offload_rt.pace import Pace, RoundTimes
from offload_rt.planning.placement import Placement as PlannedPlacement
from offload_rt.timeline import Span

TINY_KEYS = {key: value for key, value in SMALL.items() if key != "speculation.gamma2"}
TINY_KEYS |= {"store.segment_tokens": 32}
TINY = Sizes(200, 3, new_tokens=16, plain_tokens=4, repeats=1, settings=TINY_KEYS)
SMALLER = dataclasses.replace(
    SHAPES["tiny"], hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16
)
SUMMARY = {
    "round_over_max",
    "link_use",
    "pass_over_bound",
    "ahead_speedup",
    "outcome_hit_rate",
    "ratio_over_plain",
    "ms_per_token",
    "predicted_over_measured",
}


# ---------------------------------------------------------------------------------------- recorded copies


def layout() -> KVLayout:
    return KVLayout(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, page_size=4)


def test_records_of_a_paced_link_add_up_to_the_counters_and_keep_its_pace() -> None:
    link = PacedLink(1e7, latency_s=1e-4)
    store = PagedKVStore(layout(), slab_tokens=16)
    sequence = store.new_sequence()
    engine = TransferEngine(sequence, link, segment_tokens=8, ring_buffers=2)
    link.record()
    try:
        for layer in range(2):
            engine.write_prompt(layer, torch.ones(2, 32, 4), torch.ones(2, 32, 4))
        engine.flush()
        stream = engine.stream(32)
        for layer in range(2):
            for _ in stream.segments(layer):
                pass
        engine.finish_compute()
        records = link.recorded()
        assert link.recorded() == []
    finally:
        engine.close()
        link.close()
        sequence.close()
        store.close()
    for to_host, counted in (
        (False, engine.counters.bytes_to_device),
        (True, engine.counters.bytes_to_host),
    ):
        lane = [one for one in records if one.to_host == to_host]
        assert sum(one.byte_count for one in lane) == counted == 2 * 32 * 2 * 2 * 4 * 4
        for one in lane:
            assert one.end - one.start == pytest.approx(1e-4 + one.byte_count / 1e7)
        assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(lane))


def test_a_link_that_is_not_asked_records_nothing() -> None:
    link = PacedLink(1e9)
    link.copy([(torch.empty(4), torch.ones(4))]).synchronize()
    assert link.recorded() == []
    link.record()
    link.copy([(torch.empty(4), torch.ones(4))], to_host=True).synchronize()
    link.close()  # waits for the thread, which notes a copy when it is done
    assert [(one.to_host, one.byte_count) for one in link.recorded()] == [(True, 16)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_records_of_a_cuda_link() -> None:
    link = CudaLink("cuda")
    link.record()
    source = torch.ones(2**20, pin_memory=True)
    there = torch.empty(2**20, device="cuda")
    link.copy([(there, source)])
    link.copy([(source, there)], to_host=True).synchronize()
    first, second = link.recorded()
    assert (first.to_host, second.to_host) == (False, True)
    assert first.byte_count == second.byte_count == 2**22
    assert 0 < first.end - first.start < 1 and 0 < second.end - second.start < 1


# --------------------------------------------------------------------------------------------- arithmetic


def copies(*times: tuple[float, float], to_host: bool = False) -> list[CopyRecord]:
    return [CopyRecord(to_host, 1, start, end) for start, end in times]


def passing(passes: list[tuple[float, float]], carried: list[CopyRecord]) -> Run:
    """Of such passes, after a first one that does not count."""
    spans = [Span("pass", "verify", start, end) for start, end in [(-1.0, 10.0), *passes]]
    return Run([], [], spans, carried)


def test_link_use_is_the_busy_share_of_a_pass() -> None:
    # Busy 1 s before the pass, 6 of its first 8, then nothing until the pass ends.
    carried = copies((-1, 3), (3, 4), (6, 8)) + copies((0, 10), to_host=True)
    assert link_use(passing([(0, 10)], carried)) == pytest.approx(6 / 8)
    assert link_use(passing([(0, 10), (20, 30)], carried)) == pytest.approx(6 / 8), (
        "a pass without copies says nothing"
    )
    median_of_three = passing([(2, 4), (0, 10), (6, 7)], carried)
    assert link_use(median_of_three) == pytest.approx(1.0), "the median over passes"
    assert link_use(passing([(4.5, 7)], carried)) == pytest.approx(1 / 2.5), "idle at its begin"
    assert link_use(passing([(20, 30)], carried)) is None


def test_a_direction_is_busy_while_it_carries_anything() -> None:
    assert busy(copies((4, 5), (0, 2), (1, 3), (3, 3.5))) == [(0, 3.5), (4, 5)]
    assert busy(copies((0, 1), to_host=True)) == []
    assert busy(copies((0, 1), to_host=True), to_host=True) == [(0, 1)]


def times(
    started: float,
    ms: float,
    guessed: bool | None,
    *,
    draft: float = 0.0,
    proposed: int = 4,
    accepted: int = 4,
) -> RoundTimes:
    return RoundTimes(
        started=started,
        ms=ms,
        draft_ms=draft,
        pass_ms=ms - draft,
        ahead_ms=ms - draft,
        verdict_ms=0.0,
        nominal_ms=0.0,
        guessed=guessed,
        asked=proposed,
        proposed=proposed,
        accepted=accepted,
        drawn=proposed,
    )


def run_of(rounds: list[RoundTimes], tokens: int) -> Run:
    spans = [Span("pass", "verify", one.started, one.started + one.ms / 1e3) for one in rounds]
    carried = [CopyRecord(False, 1, rounds[0].started, rounds[-1].started + 1.0)]
    return Run([0] * tokens, rounds, spans, carried)


def test_rows_tell_rounds_that_were_guessed_from_others() -> None:
    rounds = [
        times(0.0, 90.0, True, draft=50.0),
        times(0.1, 44.0, True),
        times(0.2, 46.0, False, accepted=1),
        times(0.3, 95.0, True, draft=50.0),
        times(0.4, 30.0, None, proposed=1, accepted=1),
    ]
    run = run_of(rounds, 18)
    one = row([run], [40.0], compute=20.0, draft_token=10.0)
    assert one["ms_per_token"]["median"] == pytest.approx(300 / 12), "without the first round and the last"
    assert one["tokens_per_round"] == pytest.approx(12 / 3)
    assert one["acceptance"] == pytest.approx(14 / 15), "14 stood, and one that was judged did not"
    assert one["rounds"] == 5 and one["outcome_hit_rate"] == pytest.approx(3 / 4)
    assert one["round_over_max"] == pytest.approx(45 / 40)
    assert one["pass_over_bound"] == pytest.approx(45 / 40)
    assert one["draft_alone_ms"] == pytest.approx(40.0)
    assert one["link_use"] == pytest.approx(1.0)
    assert draft_token_ms([run]) == pytest.approx(0.0)
    assert row([run], [10.0], None, draft_token=30.0)["round_over_max"] == pytest.approx(45 / 120)
    # A link that is paced anew: each run is held against its own.
    two = row([run, run], [40.0, 80.0], compute=20.0, draft_token=10.0)
    assert two["stream_ms"] == 60.0
    assert two["round_over_max"] == pytest.approx((44 / 40 + 46 / 80) / 2)
    assert acceptance([]) is None
    short = run_of(rounds[:2], 10)
    assert ms_per_token(short) == pytest.approx((100 + 44) / 10), "too few rounds to leave some out"


def test_rows_are_compared_and_predicted_turn_by_turn(measured: dict[str, Any]) -> None:
    """On a machine that changes from turn to turn, medians of each side would come from different turns."""
    assert times_as_fast([3.0, 2.0, 20.0], [30.0, 10.0, 80.0]) == 5.0
    case = copy.deepcopy(measured["result"]["cases"][0])
    one = next(row for row in case["rows"] if row["system"] == "ahead 0")
    turn = one["turns"][0]
    turns = [turn | {"rate_bytes_per_second": turn["rate_bytes_per_second"] / by} for by in (1, 50, 5)]
    predicted = [prediction_accuracy.predict(case, one, each)["ms_per_token"] for each in turns]
    assert len(set(predicted)) == 3
    measured_ms = [ms * by for ms, by in zip(predicted, (1.0, 2.0, 4.0), strict=True)]
    one |= {"turns": turns, "ms_per_token": {"median": median(measured_ms), "runs": measured_ms}}
    prediction_accuracy.predict_rows(case | {"rows": [one]})
    assert one["predicted_over_measured"] == pytest.approx(1 / 2)
    assert one["predicted"]["ms_per_token"] == pytest.approx(median(predicted))


def test_a_text_continues_from_its_prompt_whatever_came_before() -> None:
    target = GraphedModel(tiny_target("llama-gqa", spread=0.4), "tiny", lambda _: None)
    config = TINY.config(System(1))
    with closing(Text(Subject(target, None, byte_ids(200)), PacedLink(1e12), config, 24)) as text:
        assert text.read() > 0
        found = [text.run(config, 16), text.run(TINY.config(), 24), text.run(config, 16)]
    assert found[0].tokens == found[1].tokens[:16] == found[2].tokens and len(found[1].tokens) == 24
    for run in found:
        assert run.rounds and run.spans and run.copies, "of this run"
        assert all(span.start >= run.rounds[0].started for span in run.spans)


# ------------------------------------------------------------------------------------ the synthetic verdict


@pytest.fixture
def endless_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every pass took long enough to draft for all outcomes."""
    monkeypatch.setattr(Pace, "over", lambda *_: False)


def decoded(acceptance: float, ahead: int, tokens: int) -> Run:
    sizes = dataclasses.replace(TINY, gamma=4)
    target = GraphedModel(tiny_target("llama-gqa", spread=0.4), "tiny", lambda _: None)
    config = sizes.config(System(ahead))
    with closing(Text(Subject.random(target, 200), PacedLink(1e9), config, tokens)) as text:
        text.read()
        return text.run(config, tokens, acceptance)


def test_a_held_acceptance_is_held_by_its_coins() -> None:
    found = decoded(0.8, ahead=0, tokens=200)
    coins = torch.Generator().manual_seed(0)

    def chance() -> float:
        return float(torch.rand((), generator=coins, dtype=torch.float64))

    assert len(found.rounds) > 45
    for one in found.rounds:
        stands = []
        for _ in range(one.proposed):
            stands.append(chance() < 0.8)
            chance(), chance()
        chance(), chance(), chance()  # of the token after them, which nothing had guessed
        assert one.accepted == (stands.index(False) if False in stands else one.proposed)
    assert acceptance(found.rounds) == pytest.approx(0.8, abs=0.06)


@pytest.mark.usefixtures("endless_passes")
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_held_acceptance_of_none_and_all(rate: float) -> None:
    found = decoded(rate, ahead=4, tokens=30)
    whole = found.rounds[:-1]
    assert all(one.accepted == rate * one.proposed for one in whole)
    guessed = [one.guessed for one in whole[:-1] if one.guessed is not None]
    assert rate == 0.0 or (guessed and all(guessed)), guessed


@pytest.mark.usefixtures("endless_passes")
@pytest.mark.parametrize("runner_up", [0.0, 1.0])
def test_a_runner_up_is_held_too(runner_up: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "RUNNER_UP_HITS", runner_up)
    found = decoded(0.0, ahead=4, tokens=30)
    guessed = [one.guessed for one in found.rounds if one.guessed is not None]
    # Until it is known that all is rejected, the likeliest outcome is another one.
    assert len(guessed) > 20 and sum(guessed[15:]) == runner_up * len(guessed[15:])


def test_every_row_of_held_systems_is_labelled() -> None:
    systems = held_systems(ACCEPTANCES)
    assert {system.held for system in systems if system.held} == set(ACCEPTANCES)
    assert all((system.held is None) == system.plain for system in systems)
    assert all(system.held is None for those in paced_systems("balanced").values() for system in those)


# ----------------------------------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def measured(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a tiny run of `bench offload` writes."""
    folder = tmp_path_factory.mktemp("offload")
    book = folder / "book.txt"
    book.write_bytes(bytes(byte_ids(400)))
    out = folder / "offload.json"
    arguments = ["--model", pair[0], "--draft", pair[1], "--text", str(book), "--out", str(out)]
    sizes = ["--context", "160", "--gamma", "3", "-n", "14", "--repeats", "1", "--acceptances", "1"]
    settings = [f"{key}={json.dumps(value)}" for key, value in TINY_KEYS.items()]
    given = [part for setting in settings for part in ("--set", setting)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "ATTENTION_REPEATS", 1)
        patch.setattr(references, "BALANCING_TURNS", 1)
        patch.setitem(SHAPES, "tiny", SMALLER)
        assert command_line.main(["offload", "--quick", "--device", "cpu", *arguments, *sizes, *given]) == 0
    assert torch.get_num_threads() == 2, "given back"
    torch.set_num_threads(threads)
    result: dict[str, Any] = json.loads(out.read_text())
    return {"path": out, "result": result}


def test_a_run_writes_complete_rows(measured: dict[str, Any]) -> None:
    path, result = measured["path"], measured["result"]
    assert str(path.parent) not in path.read_text(), "a report goes elsewhere: no paths in it"
    assert path.with_name("offload-timeline.png").stat().st_size > 5000
    cases = result["cases"]
    names = ["balanced", "stream-bound", "draft-bound", "synthetic acceptance"]
    assert [case["case"] for case in cases] == names
    assert result["command"].startswith("python -m bench offload --quick --device cpu --model ")
    assert set(result["summary"]) == {*SUMMARY, "synthetic"}
    assert all(result["summary"][key] is not None for key in SUMMARY if key not in ("round_over_max",))
    balanced = [(one["system"], one["placement"]) for one in cases[0]["rows"]]
    assert balanced == [
        ("plain", "streamed"),
        *((f"ahead {count}", "streamed") for count in (0, 1, 4)),
        ("ahead 4, refresh gathered", "streamed"),
        *((name, place) for place in ("resident", "cpu", "both") for name in ("plain", "ahead 0", "ahead 4")),
    ]
    for case in cases:
        for one in case["rows"]:
            assert one["resident_tokens"] + one["cpu_tokens"] + one["streamed_tokens"] == 144, "full pages"
            assert (one["resident_tokens"] > 0) == (one["placement"] in ("resident", "both"))
            assert (one["cpu_tokens"] > 0) == (one["placement"] in ("cpu", "both"))
            token_bytes = (
                2 * case["shape"]["layers"] * case["shape"]["kv_heads"] * case["shape"]["head_dim"] * 4
            )
            rates = [turn["rate_bytes_per_second"] for turn in one["turns"]]
            assert len(rates) == len(one["ms_per_token"]["runs"])
            assert one["rate_bytes_per_second"] == median(rates)
            stream = 1e3 * one["streamed_tokens"] * token_bytes / one["rate_bytes_per_second"]
            assert one["stream_ms"] == pytest.approx(stream)
            alone = "plain_pass_ms" if one["system"] == "plain" else "pass_ms"
            assert one["compute_ms"] == median(turn[alone] for turn in one["turns"])
            assert one["predicted_over_measured"] == pytest.approx(
                one["predicted"]["ms_per_token"] / one["ms_per_token"]["median"]
            )
            real = case["case"] != "synthetic acceptance" or one["system"] == "plain"
            assert (one["synthetic"] is None) == real
            assert 0 < one["link_use"] <= 1
            assert one["prefill_ms"] > 0
    plain = cases[0]["rows"][0]["ms_per_token"]["median"]
    for one in cases[0]["rows"][:5]:
        assert one["ratio_over_plain"] == pytest.approx(plain / one["ms_per_token"]["median"])
    whole = [one for one in cases[3]["rows"] if one["synthetic"] == 1.0]
    assert all(one["acceptance"] == 1.0 for one in whole)


def test_prediction_accuracy_holds_the_planner_against_every_row(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "accuracy.json"
    assert command_line.main(["prediction-accuracy", str(measured["path"]), "--out", str(out)]) == 0
    printed = last_line(capsys)
    report = json.loads(out.read_text())
    assert printed == {"worst": report["worst"], "rows": len(report["rows"])}
    assert printed["rows"] == sum(len(case["rows"]) for case in measured["result"]["cases"])
    for one in report["rows"]:
        assert set(one["predicted"]) == set(one["measured"])
        assert one["ratio"] == pytest.approx(
            one["predicted"]["ms_per_token"] / one["measured"]["ms_per_token"]
        )
    assert prediction_accuracy.worst([1.1, 0.8, 1.2]) == 0.8
    assert prediction_accuracy.worst([1.3, 0.8]) == 1.3


def test_a_paced_machine_is_planned_with_what_was_measured_alone(measured: dict[str, Any]) -> None:
    case = measured["result"]["cases"][0]
    one = next(row for row in case["rows"] if row["system"] == "ahead 4")
    alone = next(row for row in case["rows"] if row["system"] == "ahead 0")
    turn = {"draft_token_ms": 7.0, "verdict_ms": 0.0}
    turn |= {"plain_pass_ms": 6.0, "pass_ms": 10.0, "rate_bytes_per_second": 1e12}
    case["processor"]["attention"] = [{"queries": count, "rate": 5.0} for count in (1, 4)]
    request = prediction_accuracy._request(case, dict(one, acceptance=1.0), turn)
    sure = prediction_accuracy.MeasuredAlone(request, turn)
    place = PlannedPlacement(0, 0, one["streamed_tokens"], 3, 32, request.target)
    fast, draft = sure.verification(place, 3), sure.draft(3)
    assert draft.ms == pytest.approx(21.0)
    assert fast.ms == pytest.approx(10.0, rel=0.05), "what a pass takes in place"
    hit = sure.round(fast, draft, 1)
    assert hit.hit_rate == 1
    assert hit.ms == pytest.approx(10.0 + 21.0, rel=0.05), "one processor does both"
    slowly = turn | {"rate_bytes_per_second": 1e3}
    predicted = prediction_accuracy.predict(case, dict(one, acceptance=1.0), slowly)
    bytes_streamed = one["streamed_tokens"] * request.target.token_bytes
    assert predicted["pass_ms"] == pytest.approx(bytes_streamed, rel=0.02), "1 ms a byte"
    asked = prediction_accuracy._request(case, dict(one, acceptance=1.0), slowly)
    slow = prediction_accuracy.MeasuredAlone(asked, slowly)
    passed = slow.round(slow.verification(place, 3), draft, 1)
    refreshing = passed.refresh_share * passed.refresh_ms
    assert passed.ms - refreshing == pytest.approx(passed.verification.ms), "all is drafted meanwhile"
    assert predicted["round_ms"] == pytest.approx(predicted["pass_ms"] + refreshing)
    without = prediction_accuracy.predict(case, alone, turn)
    assert without["round_ms"] == pytest.approx(10.0 + 21.0, rel=0.05)
    with_verdict = prediction_accuracy.predict(case, alone, turn | {"verdict_ms": 4.0})
    assert with_verdict["round_ms"] - without["round_ms"] == pytest.approx(4.0)
    plain = next(row for row in case["rows"] if row["system"] == "plain")
    assert prediction_accuracy.predict(case, plain, turn)["tokens_per_round"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prediction-accuracy", "missing.json"], "run `python -m bench offload` first"),
        (["prediction-accuracy", "pyproject.toml"], "is no JSON"),
        (["prediction-accuracy", "bench/results/model-card.json"], "is no result of `bench offload`"),
        (["offload", "--config", "plain"], "name a config that drafts"),
        (["offload", "--acceptances", "2"], "'2' is not a number of at least 0 and at most 1"),
        (["offload", "--shapes", "huge"], "is none of tiny"),
        (["offload", "--context", "9999999", "--device", "cpu"], "give a longer --text"),
    ],
)
def test_mistakes_are_told_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_shape_on_a_device_is_measured_streamed_and_as_planned() -> None:
    """What runs on a GPU, with the processor in its place."""
    target = GraphedModel(random_model("tiny", torch.device("cpu"), torch.bfloat16), "tiny", lambda _: None)
    machine = named_hardware("rtx4090")
    card = dataclasses.replace(machine.gpus[0], memory_bytes=2**30)
    hardware = Hardware(machine.host, (card,), measured=False)
    ((case, runs),) = gpu.case_on_gpu(target, TINY, held_systems((1.0,)), hardware, lambda: PacedLink(25e9))
    assert [len(those) for those in runs] == [1] * len(case["rows"])
    assert [(one["system"], one["placement"]) for one in case["rows"]] == [
        (name, place) for place in ("streamed", "planned") for name in ("plain", "ahead 0", "ahead 4")
    ]
    assert case["rows"][-1]["resident_tokens"] > 0
    prediction_accuracy.predict_rows(case)
    assert all(one["predicted_over_measured"] > 0 for one in case["rows"])
    small = Hardware(machine.host, (dataclasses.replace(card, memory_bytes=2**20),), False)
    assert not list(gpu.case_on_gpu(target, TINY, held_systems((1.0,)), small, lambda: PacedLink(25e9)))


def test_a_timeline_shows_each_resource_in_the_rounds_that_were_guessed() -> None:
    target = GraphedModel(tiny_target("llama-gqa"), "tiny", lambda _: None)
    config, subject = TINY.config(System(2)), Subject(target, None, byte_ids(200))
    with closing(Text(subject, PacedLink(1e8), config, 24, Shares(cpu_tokens=32))) as text:
        text.read()
        found = text.run(config, 24)
    shown = lanes(found)
    assert all(shown.values()), {name: len(times) for name, times in shown.items()}
    start, end = window(found, count=2)
    assert found.rounds[0].started <= start < end
    assert sum(start <= one.started < end for one in found.rounds) == 2
