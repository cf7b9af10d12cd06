"""`bench offload` and `bench prediction-accuracy`: what they record and report. No time is checked here."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import multiprocessing
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from test_bench import SMALL, last_line
from test_bench import pair as pair  # a fixture
from tiny_models import byte_ids, tiny_target
from transformers import AutoModelForCausalLM

import bench.__main__ as command_line
from bench import prediction_accuracy, random_models, runner, side_by_side, synthetic_acceptance, worker
from bench.cases import CASES, IN_PLACE, STREAMED, Named, Place, declared, in_place
from bench.random_models import SHAPES, checkpoint, random_prompt
from bench.recorded_text import Text
from bench.report import page, spread
from bench.rounds import (
    BESIDE_A_PASS,
    Recorded,
    acceptance,
    alike,
    busy,
    check_tokens,
    drafting_ms,
    figures,
    lanes,
    link_use,
    summarise,
    window,
    worst,
)
from bench.runner import Worker
from bench.systems import Setup
from cpu_kv import CudaLink, KVLayout, PacedLink, PagedKVStore, TransferEngine
from cpu_kv.link import CopyRecord
from offload_rt.config import Config
from offload_rt.engine.controller import RoundTimes, SpeculationController
from offload_rt.errors import UsageError
from offload_rt.machine.hardware import named_hardware
from offload_rt.model.cuda_graphs import GraphedModel
from offload_rt.timeline import Span
from offload_rt.toml import load_config

TINY_KEYS = SMALL | {"speculation.gamma2": 3, "store.segment_bytes": 8192, "offload.refresh_from": "stream"}
SMALLER = dataclasses.replace(
    SHAPES["tiny"], hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16
)


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
def test_records_of_a_cuda_link() -> None:
    link = CudaLink("cuda")
    link.record()
    source = torch.ones(2**20, pin_memory=True)
    there = torch.empty(2**20, device="cuda")
    sent = link.copy([(there, source)], after=link.record_event())
    link.copy([(source, there)], after=sent, to_host=True).synchronize()
    first, second = link.recorded()
    assert (first.to_host, second.to_host) == (False, True)
    assert first.byte_count == second.byte_count == 2**22
    assert 0 < first.end - first.start < 1 and 0 < second.end - second.start < 1


# --------------------------------------------------------------------------------------------- arithmetic


def copies(*times: tuple[float, float], to_host: bool = False) -> list[CopyRecord]:
    return [CopyRecord(to_host, 1, start, end) for start, end in times]


def passing(passes: list[tuple[float, float]], carried: list[CopyRecord]) -> Recorded:
    """Of such passes, after a first one that does not count."""
    spans = [Span("pass", "verify", start, end) for start, end in [(-1.0, 10.0), *passes]]
    return Recorded([], spans, carried)


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


def run_of(rounds: list[RoundTimes]) -> Recorded:
    spans = [Span("pass", "verify", one.started, one.started + one.ms / 1e3) for one in rounds]
    carried = [CopyRecord(False, 1, rounds[0].started, rounds[-1].started + 1.0)]
    return Recorded(rounds, spans, carried)


def row_of(system: str, rounds: list[RoundTimes], turns: int = 3) -> dict[str, Any]:
    told = [figures(run_of(rounds)) | {"streamed_tokens": 8} for _ in range(turns)]
    return {"system": system, "figures": told}


LATE, AHEAD = "ours:retrieval+offload.ahead=0", "ours:retrieval"


def test_figures_tell_rounds_that_were_guessed_from_others() -> None:
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
    assert one["acceptance"] == pytest.approx(14 / 15), "14 stood, and one that was judged did not"
    assert one["hits"] == pytest.approx(3 / 4)
    assert one["guessed_round_ms"] == pytest.approx(45), "the last of three was not guessed"
    assert one["pass_ms"] == pytest.approx(45) and one["drafted"] == 4
    assert one["link_use"] == pytest.approx(1.0)
    assert "draft_token_ms" not in one, "drafted beside a pass"
    alone = [dataclasses.replace(each, ahead_ms=0.0) for each in rounds]
    assert figures(run_of(alone))["draft_token_ms"] == pytest.approx(50 / 12)
    assert acceptance([]) is None
    short = figures(run_of(rounds[:2]))
    assert short["ms_per_token"] == pytest.approx((100 + 44) / 10), "too few rounds to leave some out"


def test_rows_are_held_against_those_of_the_same_turns_and_of_the_same_pass_in_place() -> None:
    plain = [times(float(at), 80.0, None, proposed=0, accepted=0) for at in range(4)]
    late = [dataclasses.replace(times(0.5 * at, 90.0, None, draft=40.0), ahead_ms=0.0) for at in range(4)]
    ahead = [times(0.1 * at, 60.0, True) for at in range(4)]
    rows = [
        row_of("ours:plain", plain),
        row_of(LATE, late),
        row_of(AHEAD, ahead),
        {"system": "ours:triforce", "error": "no draft"},
    ]
    for factor, turn in zip((1.0, 10.0, 1.0), range(3), strict=True):
        for row in rows[:3]:  # a machine that slows down slows all
            row["figures"][turn]["ms_per_token"] *= factor
    rows[2]["figures"][2]["ms_per_token"] *= 3
    alone = [row_of("ours:plain", plain), row_of(AHEAD, late)]
    summarise(alone, 0.0, [])
    assert drafting_ms(alone) == pytest.approx(BESIDE_A_PASS * 40)
    summarise(rows, 4.0, alone)
    assert rows[0]["rounds"]["times_plain"] == 1 and rows[1]["rounds"]["times_plain"] == pytest.approx(10)
    assert rows[2]["rounds"]["times_plain"] == pytest.approx(50), "the median of ratios"
    assert rows[2]["rounds"]["ahead_speedup"] == pytest.approx(5) and "ahead_speedup" not in rows[1]["rounds"]
    assert rows[2]["rounds"]["stream_ms"] == 32
    assert rows[2]["rounds"]["round_over_max"] == pytest.approx(60 / 40), "drafts take longer"
    assert rows[0]["rounds"]["pass_over_bound"] == pytest.approx(80 / 80), "its pass in place"
    assert rows[2]["rounds"]["pass_over_bound"] == pytest.approx(60 / 50)
    summarise(rows, 10.0, [])
    assert rows[2]["rounds"]["round_over_max"] == pytest.approx(60 / 80)
    assert rows[2]["rounds"]["pass_over_bound"] == pytest.approx(60 / 80)
    with pytest.raises(UsageError, match="none has drafted"):
        drafting_ms(rows[:1])
    assert worst([1.1, 0.8, 1.2]) == 0.8 and worst([1.3, 0.8]) == 1.3 and worst([]) is None


def test_systems_have_settings_and_acceptances() -> None:
    named = Named.parse("ours:retrieval+offload.ahead=0+retrieval.budget=512+acceptance=0.5")
    assert named.settings == {"offload.ahead": 0, "retrieval.budget": 512} and named.acceptance == 0.5
    assert named.config({"retrieval.budget": 64, "retrieval.recent": 16}).retrieval.budget == 512
    systems = ("transformers:static", "ours:plain", LATE, AHEAD, "ours:trees")
    held = declared(systems, (0.8, 0.92), {}, draft=False, paced=True)
    assert held == (
        *systems[:2],
        *(f"{name}+acceptance={rate}" for name in (LATE, AHEAD) for rate in (0.8, 0.92)),
        "ours:trees",
    )
    assert in_place(f"{LATE}+acceptance=1") == f"{AHEAD}+acceptance=1"
    with pytest.raises(UsageError, match="none of --systems drafts chains"):
        declared(held, (1.0,), {}, draft=False, paced=False)  # one that is held stays so


def test_what_a_merge_drafts_is_not_held() -> None:
    merged = {"speculation.levels": [{"model": "target", "cache": "retrieved", "merge": "lookup"}]}
    with pytest.raises(UsageError, match="held where chains are drafted alone"):
        Named.parse("ours:retrieval+acceptance=0.5").config(merged)


def test_rows_of_other_settings_tell_nothing() -> None:
    """But those of another way over the link do."""
    rounds = [dataclasses.replace(times(0.1 * at, 60.0, None, draft=20.0), ahead_ms=0.0) for at in range(4)]
    rows = [row_of(f"{LATE}+speculation.gamma2=12", rounds), row_of(LATE, rounds)]
    summarise(rows, 0.0, [])
    assert alike(rows, "ours:retrieval+speculation.gamma2=4") is None
    system = "ours:retrieval+speculation.gamma2=12+offload.refresh_from=store"
    assert alike(rows, system, late=True) is rows[0] and alike(rows, AHEAD) is rows[1]
    del rows[0]["rounds"]["draft_token_ms"]
    assert alike(rows, system, late=True) is None, "it has drafted nothing"


def test_tokens_are_held_against_plain_decoding_in_place() -> None:
    def row(system: str, *tokens: int, **changes: Any) -> dict[str, Any]:
        told = {"rounds": {"ms_per_token": 1.0}, "first_difference": None, "steady": True}
        return {"system": system, "tokens": list(tokens)} | told | changes

    in_place = [row("ours:plain", 1, 2, 3)]
    held = row(AHEAD, 9, 9, 9, synthetic=0.5)
    del held["first_difference"]
    peer = {"system": "transformers:static", "tokens": [4, 4, 4], "first_difference": 0, "steady": True}
    near = row(AHEAD, 1, 2, 4, first_difference=2, logit_gap=1e-4)
    fine = [in_place[0], held, peer, near, {"system": AHEAD, "error": "no draft"}]
    check_tokens(fine, in_place, "3 tokens, streamed")
    check_tokens([row(AHEAD, 4, 4, 4)], [], "where nothing lies in place")
    for wrong in (
        row(AHEAD, 1, 2, 4, first_difference=2, logit_gap=0.5),
        row(AHEAD, 1, 2, 4, first_difference=2),
        row(AHEAD, 1, 4, 4, first_difference=2, logit_gap=1e-4),  # of a later token
        row("ours:plain", 1, 2, 4),  # as are all others there
        row(AHEAD, 1, 2, 3, steady=False),
    ):
        with pytest.raises(UsageError, match=f"{wrong['system']}, 3 tokens, streamed: its tokens are not"):
            check_tokens([*in_place, wrong], in_place, "3 tokens, streamed")


def tiny_text(link: PacedLink, config: Config, capacity: int) -> Text:
    target = GraphedModel(tiny_target("llama-gqa", spread=0.4), "tiny", lambda _: None)
    return Text(target, None, link, config, capacity)


def config_of(name: str, ahead: int, **changes: object) -> Config:
    return load_config(name, TINY_KEYS | {"offload.ahead": ahead} | changes)


def test_a_text_continues_from_its_prompt_whatever_came_before() -> None:
    config, plain = config_of("retrieval", 1), config_of("plain", 0)
    with closing(tiny_text(PacedLink(1e12), config, 224)) as text:
        for prompt in ([byte_ids(200)], [byte_ids(150, start=9), byte_ids(150)]):
            assert text.read(prompt) == text.read(prompt) > 0
            found = [text.run(config, 16), text.run(plain, 24), text.run(config, 16)]
            first, second, third = ([result.tokens for result in results] for results, _ in found)
            assert first == [tokens[:16] for tokens in second] == third
            assert [len(tokens) for tokens in second] == [24] * len(prompt)
            for _, run in found:
                assert run.rounds and run.spans and run.copies, "of this run"
                assert all(span.start >= run.rounds[0].started for span in run.spans)


# ------------------------------------------------------------------------------------ the synthetic verdict


@pytest.fixture
def endless_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every pass took long enough to draft for all outcomes."""
    monkeypatch.setattr(SpeculationController, "over", lambda *_: False)


def decoded(acceptance: float, ahead: int, tokens: int) -> Sequence[RoundTimes]:
    config = config_of("retrieval", ahead, **{"speculation.gamma2": 4})
    with closing(tiny_text(PacedLink(1e9), config, 200 + tokens)) as text:
        text.read([random_prompt(64, 200)])
        return text.run(config, tokens, acceptance)[1].rounds


def test_a_held_acceptance_is_held_by_its_coins() -> None:
    found = decoded(0.8, ahead=0, tokens=200)
    coins = torch.Generator().manual_seed(0)

    def chance() -> float:
        return float(torch.rand((), generator=coins, dtype=torch.float64))

    assert len(found) > 45
    for one in found:
        stands = []
        for _ in range(one.proposed):
            stands.append(chance() < 0.8)
            chance(), chance()
        chance(), chance(), chance()  # of the token after them, which nothing had guessed
        assert one.accepted == (stands.index(False) if False in stands else one.proposed)
    assert acceptance(found) == pytest.approx(0.8, abs=0.06)


@pytest.mark.usefixtures("endless_passes")
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_held_acceptance_of_none_and_all(rate: float) -> None:
    found = decoded(rate, ahead=4, tokens=30)
    whole = found[:-1]
    assert all(one.accepted == rate * one.proposed for one in whole)
    guessed = [one.guessed for one in whole[:-1] if one.guessed is not None]
    assert rate == 0.0 or (guessed and all(guessed)), guessed


@pytest.mark.usefixtures("endless_passes")
@pytest.mark.parametrize("runner_up", [0.0, 1.0])
def test_a_runner_up_is_held_too(runner_up: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_acceptance, "RUNNER_UP_HITS", runner_up)
    found = decoded(0.0, ahead=4, tokens=30)
    guessed = [one.guessed for one in found if one.guessed is not None]
    # Until it is known that all is rejected, the likeliest outcome is another one.
    assert len(guessed) > 20 and sum(guessed[15:]) == runner_up * len(guessed[15:])


# ----------------------------------------------------------------------------------------- the commands


class Inside(Worker):
    """A worker in a thread of this process: to start one takes longer than what it does here."""

    def __init__(self, adapter: str, setup: Setup) -> None:
        self._patience_s = 100.0
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._thread = Thread(target=worker.main, args=(adapter, str(os.dup(theirs.fileno()))))
        self._thread.start()

    def close(self) -> None:
        self._connection.close()
        self._thread.join()


@pytest.fixture(scope="module")
def quick() -> Any:
    """`bench offload` at two places beside the one in place."""
    places = (
        IN_PLACE,
        Place("streamed", 1.0, STREAMED),
        Place("both", 2.0, (0.25, 0.25), drawn=True),
        Place("over two links", 2.0, STREAMED, cards=1),
    )
    case = dataclasses.replace(CASES[-1], places=places, options=TINY_KEYS, if_quick={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "CASES", (case,))
        patch.setattr(prediction_accuracy, "ATTENTION_REPEATS", 1)
        patch.setattr(runner, "Worker", Inside)
        yield


@pytest.fixture(scope="module")
def measured(quick: None, pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a tiny run of `bench offload` writes."""
    folder = tmp_path_factory.mktemp("offload")
    book, out = folder / "book.txt", folder / "offload.jsonl"
    book.write_bytes(bytes(byte_ids(400)))
    arguments = ["--model", pair[0], "--draft", pair[1], "--text", str(book), "--out", str(out)]
    sizes = ["--contexts", "160", "-n", "14", "--turns", "1", "--device", "cpu"]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert command_line.main(["offload", *arguments, *sizes]) == 0
    assert torch.get_num_threads() == 2, "as before, not the one of the case"
    torch.set_num_threads(threads)
    return {"path": out, "records": [json.loads(line) for line in out.read_text().splitlines()]}


def test_a_run_writes_complete_rows(measured: dict[str, Any]) -> None:
    path, records = measured["path"], measured["records"]
    assert str(path.parent) not in path.read_text(), "a report goes elsewhere: no paths in it"
    assert path.with_suffix(".png").stat().st_size > 5000
    assert [one["place"] for one in records] == ["in place", "streamed", "both", "over two links"]
    systems = list(CASES[-1].systems)
    alone, *linked = records
    assert [row["system"] for row in alone["rows"]] == ["ours:plain", AHEAD] and not alone["link_rate_gb_s"]
    assert all("error" not in row for one in records for row in one["rows"])
    kv_bytes = 160 * 2 * SHAPE["layers"] * SHAPE["kv_heads"] * SHAPE["head_dim"] * 4
    for one, ratio in zip(linked, (1, 2, 2), strict=True):
        assert [row["system"] for row in one["rows"]] == systems and one["machine"]["threads"] == 1
        drafting = drafting_ms(alone["rows"])
        assert one["bound_ms"] == pytest.approx(ratio * drafting)
        assert one["link_rate_gb_s"] == pytest.approx(kv_bytes / 1e6 / (ratio * drafting))
        for row in one["rows"]:
            found = row["rounds"]
            assert found["resident_tokens"] == found["cpu_tokens"] == (32 if one["place"] == "both" else 0)
            assert found["streamed_tokens"] == {"both": 80, "over two links": 64}.get(one["place"], 144)
            assert found.get("other_gpus_tokens") == (80 if one["cards"] else None), "full pages"
            assert found["stream_ms"] == pytest.approx(one["bound_ms"] * found["streamed_tokens"] / 160)
            assert row["first_difference"] is None and row["prefill_ms"] > 0
            assert 0 < found["link_use"] <= 1 and found["pass_over_bound"] > 0
            ratio_of_it = row["predicted"]["ms_per_token"] / found["ms_per_token"]
            assert found["predicted_over_measured"] == pytest.approx(ratio_of_it)
    page = path.with_suffix(".md").read_text()
    assert page.count("What a plain pass reads takes") == 1, "in place"
    assert page.count("Carrying all KV once takes") == 3
    assert page.index("## 160 tokens, in place") < page.index("## 160 tokens, streamed")
    assert "| predicted/measured |" in page and "offload.ahead = 0" in page


SHAPE = {"layers": 2, "kv_heads": 2, "head_dim": 16}


def test_random_weights_are_timed_at_acceptances_that_are_held(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(SHAPES, "tiny", SMALLER)
    given = ["offload", "--model", "random:tiny", "--acceptance", "0,1", "--contexts", "160", "-n", "14"]
    given += ["--turns", "1", "--device", "cpu", "--no-plot", "--out", str(tmp_path / "out.jsonl")]
    assert command_line.main([*given, "--systems", f"ours:plain,{LATE},{AHEAD}"]) == 0
    summary = last_line(capsys)
    keys = {"round_over_max", "link_use", "pass_over_bound", "ahead_speedup", "outcome_hit_rate", "synthetic"}
    keys |= {"ratio_over_plain", "ms_per_token", "predicted_over_measured"}
    assert set(summary) == keys and summary["synthetic"] == 1.0
    assert all(summary[key] is not None for key in keys - {"round_over_max"})
    _, record, *_ = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert record["model"] == "random:tiny" and record["texts"] == ["drawn at random"]
    plain, *rows = record["rows"]
    assert plain["synthetic"] is None and plain["first_difference"] is None
    for row in rows:
        assert row["synthetic"] == row["rounds"]["acceptance"] and "first_difference" not in row
        assert row["notes"][0] == f"synthetic acceptance {row['synthetic']:g}"
    page = (tmp_path / "out.md").read_text()
    assert "random weights: for timing only" in page and "synthetic acceptance 1 " in page


def test_a_random_checkpoint_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", SMALLER)
    folder = checkpoint("random:tiny", torch.bfloat16, tmp_path)
    written = os.stat(folder / "config.json")
    assert checkpoint("random:tiny", torch.bfloat16, tmp_path) == folder
    assert os.stat(folder / "config.json") == written
    assert checkpoint("random:tiny", torch.float32, tmp_path) != folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16 and model.config.num_key_value_heads == 2
    logits = model(torch.tensor([random_prompt(2048, 64)])).logits.float()
    assert logits.std().item() == pytest.approx(20, rel=0.2)
    monkeypatch.setitem(SHAPES, "tiny", dataclasses.replace(SMALLER, parameters=2**50))
    with pytest.raises(UsageError, match="do not fit in memory"):
        checkpoint("random:tiny", torch.float16, tmp_path)
    monkeypatch.setattr(random_models, "available_memory", lambda: 2**60)
    with pytest.raises(UsageError, match=r"take 2097152.0 GiB, and \d.* are free in .*OFFLOAD_RT_CACHE"):
        checkpoint("random:tiny", torch.float16, tmp_path)


def test_prediction_accuracy_holds_the_planner_against_every_row(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "accuracy.json"
    assert command_line.main(["prediction-accuracy", str(measured["path"]), "--out", str(out)]) == 0
    printed = last_line(capsys)
    report = json.loads(out.read_text())
    assert printed == {"worst": report["worst"], "rows": len(report["rows"])}
    linked = measured["records"][1:]
    assert printed["rows"] == sum(len(one["rows"]) for one in linked)
    again = [row["rounds"]["predicted_over_measured"] for one in linked for row in one["rows"]]
    assert [one["ratio"] for one in report["rows"]] == pytest.approx(again)
    for one in report["rows"]:
        assert set(one["predicted"]) == set(one["measured"])


def test_wrong_tokens_end_a_run(
    measured: dict[str, Any],
    pair: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone, streamed, *_ = (copy.deepcopy(one["rows"]) for one in measured["records"])
    streamed[-1] |= {"tokens": [0] * 14, "first_difference": 0}
    rows = iter([alone, streamed])
    monkeypatch.setattr(side_by_side.runner, "run", lambda job, say: next(rows))
    out, book = tmp_path / "out.jsonl", str(measured["path"].with_name("book.txt"))
    given = [
        "offload",
        "--model",
        pair[0],
        "--draft",
        pair[1],
        "--text",
        book,
        "--out",
        str(out),
        "--no-plot",
    ]
    assert (
        command_line.main([*given, "--contexts", "160", "-n", "14", "--turns", "1", "--device", "cpu"]) == 2
    )
    assert f"{AHEAD}, 160 tokens, streamed: its tokens are not those of plain" in capsys.readouterr().err
    assert [json.loads(line)["place"] for line in out.read_text().splitlines()] == ["in place"]


def test_predictions_go_by_what_was_run_in_place_with_the_same_settings(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, record, *_ = copy.deepcopy(measured["records"])
    others = tmp_path / "others.jsonl"
    others.write_text("".join(json.dumps(one) + "\n" for one in (alone | {"new_tokens": 7}, record)))
    assert command_line.main(["prediction-accuracy", str(others)]) == 0
    assert last_line(capsys) == {"worst": None, "rows": 0}


def test_a_row_that_drafts_is_not_predicted_by_one_that_does_not(measured: dict[str, Any]) -> None:
    alone, record, *_ = copy.deepcopy(measured["records"])
    record["rows"] = [row for row in record["rows"] if row["system"] != LATE]
    record["rows"][0]["system"] += "+offload.ahead=0"
    assert prediction_accuracy.predict(record, alone["rows"], record["rows"][-1]) is None


def test_a_peer_has_a_row_without_rounds(measured: dict[str, Any]) -> None:
    record = copy.deepcopy(measured["records"][0])
    del record["rows"][0]["rounds"]
    record["rows"][0]["ms_per_token"] = spread([7.25])
    peer = page([record]).splitlines()[-2]
    assert " 7.25 |" in peer and peer.count(" – |") == 11


def test_a_paced_machine_is_planned_with_what_was_measured_alone(measured: dict[str, Any]) -> None:
    alone, record, *_ = copy.deepcopy(measured["records"])
    plain, late, *_, ahead = record["rows"]
    for row in (plain, late, ahead):
        row["rounds"] |= {"acceptance": 1.0, "draft_token_ms": 7.0, "verdict_ms": 0.0}
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
    assert fast["round_ms"] == pytest.approx(10.0 + 21.0, rel=0.05)
    assert predict(ahead)["round_ms"] == pytest.approx(10.0 + 21.0, rel=0.05), "one processor does both"
    assert predict(plain)["tokens_per_round"] == 1
    assert predict(plain)["pass_ms"] == pytest.approx(6.0, rel=0.05)
    late["rounds"]["verdict_ms"] = 4.0
    assert predict(late)["round_ms"] - fast["round_ms"] == pytest.approx(4.0)
    record["link_rate_gb_s"] = 1e-6
    slow = predict(ahead)
    token_bytes = 2 * SHAPE["layers"] * SHAPE["kv_heads"] * SHAPE["head_dim"] * 4
    assert slow["pass_ms"] == pytest.approx(144 * token_bytes, rel=0.02), "1 ms a byte"
    assert slow["round_ms"] == pytest.approx(slow["pass_ms"], rel=0.2), "all is drafted meanwhile"
    assert prediction_accuracy.predict(record, [], ahead) is None, "nothing was measured in place"
    record["hardware"] = json.loads(json.dumps(dataclasses.asdict(named_hardware("rtx4090"))))
    del record["processor"]
    on_gpu = prediction_accuracy.predict(record, [], ahead)
    assert on_gpu is not None and 0 < on_gpu["round_ms"] < slow["round_ms"]


def test_a_timeline_shows_each_resource_in_the_rounds_that_were_guessed() -> None:
    config = config_of("retrieval", 2, **{"offload.cpu_tokens": 32})
    with closing(tiny_text(PacedLink(1e8), config, 224)) as text:
        text.read([byte_ids(200)])
        _, found = text.run(config, 24)
    shown = lanes(found)
    assert all(shown.values()), {name: len(times) for name, times in shown.items()}
    start, end = window(found, count=2)
    assert found.rounds[0].started <= start < end
    assert sum(start <= one.started < end for one in found.rounds) == 2
