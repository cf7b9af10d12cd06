"""Models on this machine: what is found, what runs how far and with which draft, and the draft of `auto`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from huggingface_hub import constants
from support.machine_cases import HOST
from support.tiny_models import MAX_POSITIONS, byte_ids, byte_tokenizer, tiny_target

from offload_rt import LLM, SamplingParams
from offload_rt.commands import cli
from offload_rt.errors import UsageError
from offload_rt.machine import inspection
from offload_rt.model.local_models import LocalModel, local_models
from offload_rt.planning.local_plans import choose_draft
from offload_rt.system.hardware import GIB, Hardware

MACHINE = Hardware(HOST, (), measured=True)


def save(folder: Path, **settings: Any) -> Path:
    """Saves a tiny model with the tokenizer of bytes."""
    folder.mkdir(parents=True)
    tiny_target("llama", **settings).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache with two models, a data set and a broken entry; a folder of models and of such folders."""
    place = tmp_path_factory.mktemp("place")

    def cached(name: str, revision: str = "1") -> Path:
        repository = place / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(revision)
        return repository / "snapshots" / revision

    save(cached("owner/big"), hidden=128, layers=3)
    save(cached("owner/small"), hidden=32, layers=1)
    (place / "hub" / "models--owner--torn").mkdir()
    (place / "hub" / "datasets--owner--texts" / "snapshots" / "1").mkdir(parents=True)
    quantized = save(place / "models" / "quantized") / "config.json"
    stated = json.loads(quantized.read_text()) | {"quantization_config": {"quant_method": "hqq"}}
    quantized.write_text(json.dumps(stated))
    save(place / "models" / "owner" / "deep", layers=1)
    tokens = save(place / "models" / "other", hidden=32, layers=1) / "tokenizer.json"
    swapped = json.loads(tokens.read_text())
    letters = swapped["model"]["vocab"]
    letters["a"], letters["b"] = letters["b"], letters["a"]
    tokens.write_text(json.dumps(swapped))
    shards = save(place / "models" / "shards")
    (shards / "model.safetensors").rename(shards / "model-2.safetensors")
    index = {
        "weight_map": {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}
    }
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "models" / "nothing" / ".hidden").mkdir(parents=True)
    return place


@pytest.fixture(autouse=True)
def machine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is a desktop without a GPU, and its hub cache that of the test."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setattr(inspection, "inspect", lambda **options: SimpleNamespace(hardware=MACHINE))


Run = Callable[..., tuple[str, str, dict[str, dict[str, Any]]]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command: stdout, stderr, and the models of the JSON by name."""

    def run(*arguments: object) -> tuple[str, str, dict[str, dict[str, Any]]]:
        file = tmp_path / "models.json"
        assert cli.main(["models", *map(str, arguments), "--json", str(file)]) == 0
        listed = json.loads(file.read_text())["models"]
        models = {one["name"]: one for one in listed}
        assert len(models) == len(listed), "each once"
        return *capsys.readouterr(), models

    return run


def test_everything_is_found_once_and_sorted(place: Path, run: Run) -> None:
    out, err, models = run(place / "models", place / "models" / "other", "--dtype", "float32")
    deep, other, quantized, shards = (
        str(place / "models" / name) for name in ("owner/deep", "other", "quantized", "shards")
    )
    assert list(models) == [other, deep, "demo", "demo-draft", "owner/big", "owner/small", quantized, shards]
    assert re.search(r"note +the hub's cache has a broken entry: .*models--owner--torn", err)
    big = models["owner/big"]
    assert big["runs"] and big["architecture"] == "LlamaForCausalLM" and big["refusal"] is None
    assert big["parameters"] * 4 <= big["weight_bytes"] < big["parameters"] * 4 + 2**16
    assert big["positions"] == big["longest_context"] == big["context"] == MAX_POSITIONS
    assert big["ms_per_token"] > 0
    assert models[quantized]["refusal"] == (
        "its weights are quantized (hqq), which is not supported; give its checkpoint in bfloat16 or float16,"
        " perhaps with --quantize nf4"
    )
    assert models[shards]["refusal"].startswith("1 of 2 files of weights are missing, the first is model-1.")
    assert not models[shards]["runs"] and models[shards]["longest_context"] is None
    # One table for people: the same facts.
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert f"all of its {MAX_POSITIONS:,}" in rows["owner/big"]
    assert f"{big['ms_per_token']:.1f}  " in rows["owner/big"]
    assert rows[quantized].rstrip().endswith(models[quantized]["refusal"])
    assert not re.search("[^\x00-\x7f]", out.replace(str(place), "")), "plain text"


def test_a_draft_has_the_targets_vocabulary_and_is_much_smaller(place: Path, run: Run) -> None:
    out, _, models = run(place / "models")
    drafts = {name: [draft["name"] for draft in one["drafts"]] for name, one in models.items()}
    deep = str(place / "models" / "owner" / "deep")
    assert sorted(drafts["owner/big"]) == [deep, "owner/small"]  # and not `other`
    assert drafts["demo"] == ["demo-draft"] and drafts["owner/small"] == []
    times = [draft["ms_per_token"] for draft in models["owner/big"]["drafts"]]
    assert times == sorted(times)
    assert f"demo-draft ({models['demo']['drafts'][0]['ms_per_token']:.1f})" in out


def test_the_longest_context_is_what_memory_holds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(gib: float) -> None:
        host = replace(HOST, memory_bytes=int(gib * GIB))
        hardware = Hardware(host, (), measured=True)
        monkeypatch.setattr(inspection, "inspect", lambda **options: SimpleNamespace(hardware=hardware))

    limited(2)
    out, _, models = run("--dtype", "float32")
    demo = models["demo"]
    longest = demo["longest_context"]
    assert 0 < longest < demo["positions"] and f"  {longest:,}  " in out
    # The planner agrees, page by page.
    page = 128
    flags = "plan --model demo --draft none --gpu none --ram 6 --new-tokens 256 --dtype float32 --context"
    assert cli.main([*flags.split(), str(longest - 256)]) == 0
    assert cli.main([*flags.split(), str(longest - 256 + page)]) == 2
    limited(1.01)
    _, _, models = run()
    assert not models["demo"]["runs"] and models["demo"]["refusal"].startswith("host memory has 1.0 GiB")


def test_speeds_at_a_context(run: Run) -> None:
    out, _, models = run("--context", "16k")
    assert models["demo"]["context"] == 16384 and "ms/token at 16,384" in out
    assert models["demo"]["ms_per_token"] < run()[2]["demo"]["ms_per_token"]
    big = models["owner/big"]
    assert big["longest_context"] == MAX_POSITIONS and big["ms_per_token"] is None
    assert re.search(r"owner/big .* does not fit", out)


def test_folders_of_the_settings_are_looked_into(
    place: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'folders = ["{place}/models", "/no/such/folder"]')
    monkeypatch.setenv("OFFLOAD_RT_CONFIG", str(file))
    _, err, models = run()
    assert str(place / "models" / "other") in models
    assert "note       /no/such/folder: there is no such folder\n" in err
    assert str(place / "models" / "other") not in run(place / "models" / "owner")[2]


def test_without_a_cache_there_is_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no"))
    assert [one.name for one in local_models([])] == ["demo", "demo-draft"]
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    skipped: list[str] = []
    assert [one.name for one in local_models([], skipped.append)] == ["demo", "demo-draft"]
    assert len(skipped) == 1 and skipped[0].startswith("the hub's cache cannot be read: ")


# The draft of `auto`.


def draft(name: str) -> LocalModel:
    return cast(LocalModel, SimpleNamespace(name=name, shape=name))


def planned(times: dict[Any, float | str]) -> Callable[[Any], Any]:
    """Returns plans that take so long; a text is a refusal."""

    def plan(shape: Any) -> Any:
        if isinstance(found := times[shape], str):
            raise UsageError(found)
        return SimpleNamespace(ms_per_token=found, fits=True, request=SimpleNamespace(context=9))

    return plan


def test_the_draft_with_the_fastest_plan_is_chosen() -> None:
    one, other = draft("one"), draft("other")
    chosen, plan, told = choose_draft([one, other], planned({None: 9.0, "one": 6.0, "other": 4.5}))
    assert chosen is other and plan.ms_per_token == 4.5
    assert told == "draft auto: other, 4.5 ms/token by the plan, 2.00 times as fast as without a draft"
    chosen, _, told = choose_draft([one, other], planned({None: 9.0, "one": 9.0, "other": "too large"}))
    assert chosen is None
    assert told == "draft auto: none; one, other would not make it faster by the plan"
    chosen, _, told = choose_draft([], planned({None: 9.0}))
    assert chosen is None and told == "draft auto: none; no local model has its vocabulary"
    # The config may need a draft.
    chosen, _, told = choose_draft([one], planned({None: "there is none", "one": 6.0}))
    assert chosen is one and told == "draft auto: one, 6.0 ms/token by the plan"
    with pytest.raises(UsageError, match="does not fit"):
        choose_draft([one], planned({None: "does not fit", "one": "nor this"}))


@pytest.mark.parametrize("size", [None, (64, 8)])
def test_an_llm_takes_the_draft_and_says_so(place: Path, size: tuple[int, int] | None) -> None:
    told: list[str] = []
    big = place / "hub" / "models--owner--big" / "snapshots" / "1"
    prompt, greedy = byte_ids(64), SamplingParams(max_tokens=8)
    options: dict[str, Any] = {"device": "cpu", "size_hint": size, "on_notice": told.append}
    with LLM(big, draft="auto", config="naive", **options) as llm:
        assert llm.engine.draft is not None and llm.engine.draft.name == "owner/small"
        assert (llm.plan is None) == (size is None)
        tokens = llm.generate(prompt, greedy).tokens
    assert any(re.fullmatch(r"draft auto: owner/small, \d+\.\d ms/token by the plan", line) for line in told)
    with LLM(big, draft="auto", config="plain", **options) as llm:
        assert llm.engine.draft is None
        assert llm.generate(prompt, greedy).tokens == tokens
    with LLM(big, config="plain", **options) as llm:  # none, unless it is asked for
        assert llm.engine.draft is None


def test_a_draft_is_found_beside_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no"))
    target = save(tmp_path / "target", hidden=128, layers=3)
    options: dict[str, Any] = {"draft": "auto", "config": "naive", "device": "cpu", "size_hint": (64, 8)}
    with pytest.raises(UsageError, match="drafts with a small model, and there is none"):
        LLM(target, **options)
    save(tmp_path / "small", hidden=32, layers=1)
    with LLM(target, **options) as llm:
        assert llm.engine.draft is not None and llm.engine.draft.name == str(tmp_path / "small")


def test_a_plan_takes_the_same_draft(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "plan --verbose --gpu none --context 9k --config naive --draft auto"
    assert cli.main([*flags.split(), "--model", "demo"]) == 0
    out = capsys.readouterr().out
    assert "plan       demo and demo-draft in " in out and "note       draft auto: demo-draft, " in out
    flags = "plan --gpu none --context 9k --draft auto --model llama3.2-1b"
    assert cli.main(flags.split()) == 0
    assert "draft auto: none; llama3.2-1b is a shape alone, without a tokenizer" in capsys.readouterr().out


# The first line of a run.


def test_the_first_line_says_what_runs_before_weights_are_read(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    big = place / "hub" / "models--owner--big" / "snapshots" / "1"
    line = f"generate --model {big} --config plain --prompt abcdefgh -n 4 --device cpu"
    expected = (
        rf"run        {re.escape(str(big))} on cpu: 8 prompt tokens \+ 4 new; plain;"
        r" expected \d+\.\d ms/token \(plain \d+\.\d\), first token in \d+\.\d s, at the rates of a usual"
        r" desktop\n"
    )
    assert cli.main(line.split()) == 0
    assert re.match(expected, capsys.readouterr().err)
    assert cli.main([*line.split(), "--quiet"]) == 0
    assert capsys.readouterr().err == ""

    def unread(*arguments: object, **more: object) -> None:
        raise UsageError("weights are read")

    monkeypatch.setattr("offload_rt.api.opening.load_model", unread)
    assert cli.main(line.split()) == 2
    assert re.fullmatch(f"{expected}offload-rt: error: weights are read\n", capsys.readouterr().err)


def test_a_local_model_tells_what_is_wrong_without_its_folder(place: Path) -> None:
    empty = LocalModel("empty", place / "models" / "nothing")
    assert empty.shape is None and empty.refusal == "there is no config.json in it"
    assert empty.architecture == "" and empty.weight_bytes == 0
