"""Configs by name and by file, overrides, and what is said about mistakes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.config.files import config_names, parse_override
from offload_rt.config.schema import (
    AUTOMATIC,
    EVERY,
    Config,
    LevelConfig,
    RefreshPolicy,
)
from offload_rt.drafting.levels.base import LEVELS, possible
from offload_rt.drafting.levels.configs import load_config, load_configs
from offload_rt.errors import UsageError

ROOT = Path(__file__).parents[2]

COMPOSITIONS = {
    "easyspec": ("draft:streaming",),
    "heads": ("head", "target:retrieved"),
    "lookup": ("lookup",),
    "naive": ("draft:streaming",),
    "plain": (),
    "retrieval": ("target:retrieved",),
    "shared": ("target:shared",),
    "streaming": ("target:streaming",),
    "suffix": ("suffix",),
    "trees": ("target:retrieved",),
    "triforce": ("draft:streaming", "target:retrieved"),
}


def test_the_shipped_configs_are_the_known_compositions() -> None:
    assert {name: load_config(name).speculation.names for name in config_names()} == COMPOSITIONS


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_shipped_config_states_only_what_differs(name: str) -> None:
    text = (ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    defaults = load_config("plain")
    for section, table in tomllib.loads(text).items():
        for key, value in table.items():
            if name != "plain":
                assert getattr(getattr(defaults, section), key) != value


def test_defaults_and_what_triforce_states(tmp_path: Path) -> None:
    config, triforce = written(tmp_path, "speculation.levels = []", {}), load_config("triforce")
    assert (config.retrieval.budget, config.retrieval.chunk, config.retrieval.recent) == (0, 8, 256)
    assert (config.retrieval.refresh, triforce.retrieval.refresh) == (EVERY, RefreshPolicy("stride", 32))
    for speculation in (config.speculation, triforce.speculation):
        assert (speculation.gamma1, speculation.gamma2, speculation.step_down) == (2, 0, True)


def test_former_names_of_sections_still_work(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text('[speculation]\nlevels = ["target:streaming"]\n[draft]\nsinks = 8\nwindow = 100\n')
    config = load_config(str(file), {"draft.window": 50})
    assert (config.streaming.sinks, config.streaming.window) == (8, 50)
    with pytest.raises(UsageError, match="unknown key streaming.size"):
        load_config(str(file), {"draft.size": 50})


def test_a_file_is_named_by_its_stem_and_overrides_win(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        '[speculation]\nlevels = ["lookup"]\ngamma2 = 5\n[retrieval]\nbudget = 512\nrefresh = "stride:4"',
        {"retrieval.budget": 1024, "speculation.step_down": False, "lookup.max_ngram": 7},
    )
    assert config.name == "mine"
    assert config.speculation.names == ("lookup",)
    assert config.speculation.gamma2 == 5
    assert config.retrieval.budget == 1024
    assert config.retrieval.refresh == RefreshPolicy("stride", 4)
    assert not config.speculation.step_down
    assert config.lookup.max_ngram == 7


def written(folder: Path, text: str | bytes, overrides: dict[str, object]) -> Config:
    path = folder / "mine.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_config(str(path), overrides)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("retrieval.budgte", 4, ["unknown key", "did you mean retrieval.budget?"]),
        ("budget", 4, ["unknown key budget", "retrieval.budget"]),
        ("retrieval.budget", "many", ["'many'", "an integer"]),
        ("retrieval.budget", 512.0, ["512.0", "an integer"]),
        ("retrieval.budget", True, ["true", "an integer"]),
        ("retrieval.budget", 4, ["= 4", "retrieval.chunk = 8"]),
        ("retrieval.budget", 263, ["= 263", "at least 264", "first chunk", "recent"]),
        ("retrieval.budget", 2**24 + 1, ["= 16777217", "at most 16777216"]),
        ("retrieval.chunk", 0, ["= 0", "at least 1"]),
        ("retrieval.chunk", 12, ["= 12", "divide store.page = 256"]),
        ("retrieval.recent", 0, ["= 0", "at least 1"]),
        ("retrieval.refresh", 4, ["= 4", "stride:N"]),
        ("retrieval.refresh", "sometimes", ["'sometimes'", "every", "stride:N", "acceptance:X"]),
        ("retrieval.refresh", "stride:0", ["'stride:0'", "at least 1"]),
        ("retrieval.refresh", "stride:", ["'stride:'"]),
        ("retrieval.refresh", "every:2", ["'every:2'"]),
        ("retrieval.refresh", "acceptance:1.5", ["'acceptance:1.5'", "(0, 1]"]),
        ("retrieval.refresh", "acceptance:nan", ["'acceptance:nan'"]),
        ("offload.refresh_from", "link", ["'link'", "one of auto, stream, store"]),
        ("offload.refresh_from", True, ["= true", "one of auto, stream, store"]),
        ("offload.refresh_from_stream", False, ["unknown key", "did you mean offload.refresh_from?"]),
        ("speculation.levels", "lookup", ["'lookup'", "list of names", "tables"]),
        ("speculation.levels", [1], ["= 1", "must be the name of a level", "or a table"]),
        ("speculation.levels", ["look-up"], ["'look-up'", "did you mean lookup?"]),
        ("speculation.levels", ["target:retrieved", "draft:streaming"], ["cheaper", "draft:streaming"]),
        ("speculation.levels", ["lookup", "lookup"], ["cheaper"]),
        ("speculation.gamma1", 0, ["= 0", "at least 1"]),
        ("speculation.gamma2", -3, ["= -3", "at least 0"]),
        ("speculation.gamma2", 10**8, ["= 100000000", "at most 1024"]),
        ("speculation.step_down", 1, ["= 1", "true or false"]),
        ("streaming.sinks", -1, ["= -1", "at least 0"]),
        ("streaming.window", 0, ["= 0", "at least 1"]),
        ("lookup.min_ngram", 0, ["= 0", "at least 1"]),
        ("lookup.max_ngram", 0, ["= 0", "lookup.min_ngram = 1"]),
        ("lookup.max_ngram", 65, ["= 65", "at most 64"]),
        ("prefill.chunk", 0, ["= 0", "at least 1"]),
        ("store.page", 0, ["= 0", "at least 1"]),
        ("store.slab_tokens", 300, ["= 300", "multiple of store.page = 256"]),
        ("store.segment_bytes", 0, ["= 0", "at least 1"]),
        ("store.ring_buffers", 1, ["= 1", "at least 2"]),
    ],
)
def test_a_bad_value_is_named_with_its_key_and_the_remedy(
    tmp_path: Path, key: str, value: object, said: list[str]
) -> None:
    with pytest.raises(UsageError) as override_error:
        load_config("triforce", {key: value})
    message = str(override_error.value)
    for part in ["override", key, *said]:
        assert part in message
    assert "\n" not in message

    if "." not in key:
        return
    levels = "" if key == "speculation.levels" else "speculation.levels = []\n"
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    with pytest.raises(UsageError) as file_error:
        written(tmp_path, f"{levels}{key} = {shown}", {})
    assert str(file_error.value) == message.replace("override", str(tmp_path / "mine.toml"), 1)


def test_levels_are_names_or_tables(tmp_path: Path) -> None:
    text = """
    [[speculation.levels]]
    model = "draft"
    cache = "streaming"
    layers = "groups:4"
    calibrate = false
    draft = "tree:4,2"

    [[speculation.levels]]
    model = "target"
    cache = "retrieved"
    """
    small, middle = written(tmp_path, text, {}).speculation.levels
    assert small == LevelConfig("draft", "streaming", "groups:4", calibrate=False, draft="tree:4,2")
    assert small.shape == DraftShape("tree", widths=(4, 2))
    assert middle == LevelConfig("target", "retrieved") == load_config("retrieval").speculation.levels[0]
    assert middle.calibrate and middle.layers == "all" and middle.shape == CHAIN
    mixed = load_config(
        "plain", {"speculation.levels": ["lookup", {"model": "target", "cache": "streaming"}]}
    )
    assert mixed.speculation.names == ("lookup", "target:streaming")
    # What was read is taken again.
    again = load_config("plain", {"speculation.levels": mixed.speculation.levels})
    assert again.speculation == mixed.speculation


def test_a_level_may_stand_below_each_dearer_one() -> None:
    models = ("draft:streaming", "target:streaming", "target:retrieved", "target:shared")
    sources = ("lookup", "suffix", "datastore")
    assert (*sources, "head", *models) == tuple(LEVELS)
    assert load_config("plain", {"speculation.levels": ["head", *models[1:]]}).speculation.names[0] == "head"
    for source in sources:
        overrides = {"speculation.levels": [source, *models], "datastore.path": "store.safetensors"}
        assert load_config("plain", overrides).speculation.names == (source, *models)
    for levels in ([MIDDLE | {"draft": "grown:12"}], [SMALL, MIDDLE | {"draft": "sequences:2"}]):
        load_config("plain", {"speculation.levels": levels})


SMALL = {"model": "draft", "cache": "streaming"}
MIDDLE = {"model": "target", "cache": "retrieved"}


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([{"cache": "streaming"}], ["names no model"]),
        ([{"model": "target"}], ["'target'", "is not a level", "target:streaming"]),
        ([{"model": "target", "cache": "retreived"}], ["did you mean target:retrieved?"]),
        ([{"model": "lookup", "cache": "streaming"}], ["'lookup:streaming'", "is not a level"]),
        ([{"model": "head", "cache": "retrieved"}], ["'head:retrieved'", "is not a level"]),
        ([SMALL | {"drafts": "chain"}], [".drafts", "did you mean draft?"]),
        ([SMALL | {"calibrate": 1}], [".calibrate = 1", "must be true or false"]),
        ([SMALL | {"layers": 4}], [".layers = 4", "must be a string"]),
        ([SMALL | {"draft": "bush:3"}], [".draft = 'bush:3'", "tree:W,W,..."]),
        ([SMALL | {"draft": "tree:2,0"}], [".draft = 'tree:2,0'", "grown:N"]),
        ([SMALL | {"draft": "sequences:2,2"}], ["sequences:K"]),
        ([SMALL | {"draft": "tree:2000"}], [".draft = 'tree:2000'", "2000 nodes", "at most 1024"]),
        ([SMALL | {"draft": "grown:1000000000"}], ["1000000000 nodes", "at most 1024"]),
        ([SMALL | {"merge": "luck"}], [".merge = 'luck'", "must be one of lookup, suffix, datastore"]),
        ([{"model": "lookup", "draft": "tree:2"}], [".draft = 'tree:2'", "must be chain for lookup"]),
        ([{"model": "datastore", "draft": "auto"}], ["must be chain or grown for datastore"]),
        ([{"model": "lookup", "layers": "skip:1"}], [".layers = 'skip:1'", "must be all for lookup"]),
        ([{"model": "head", "layers": "skip:1"}], [".layers = 'skip:1'", "must be all for head"]),
        ([{"model": "lookup", "merge": "suffix"}], ["must be empty for lookup"]),
        ([SMALL | {"merge": "suffix"}, MIDDLE], ["leave it empty below another level"]),
        ([SMALL | {"prefer": "luck"}, MIDDLE], [".prefer = 'luck'", "must be one of lookup, suffix"]),
        ([SMALL | {"prefer": "suffix"}], [".prefer = 'suffix'", "leave it empty for the last one"]),
        ([{"model": "suffix", "prefer": "lookup"}, MIDDLE], ["must be empty for suffix"]),
        ([SMALL | {"draft": "sequoia:8"}, MIDDLE], ["choose another shape below a level"]),
        ([SMALL, MIDDLE | {"draft": "tree:2,2"}], ["chain or sequences:K"]),
        ([SMALL, MIDDLE | {"draft": "grown:12"}], ["chain or sequences:K"]),
        (["lookup", "suffix"], ["has no model that could verify what the level below drafts"]),
        (["lookup", "head"], ["has no model that could verify what the level below drafts"]),
        (["head", "draft:streaming"], ["put a level of the target there"]),
    ],
)
def test_bad_levels_are_named(levels: list[object], said: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        load_config("plain", {"speculation.levels": levels})
    for part in ["override: speculation.levels", *said]:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[speculation]\nlevels = lookup", ["not valid TOML", "line 2"]),
        ("[speculate]\nlevels = []", ["unknown section speculate", "did you mean speculation?"]),
        ("retrieval = 3\n[speculation]\nlevels = []", ["retrieval = 3", "must be a table"]),
        ("", ["speculation.levels is missing"]),
        (b"# caf\xe9\n", ["not UTF-8"]),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str | bytes, said: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        written(tmp_path, text, {})
    for part in [str(tmp_path / "mine.toml"), *said]:
        assert part in str(error.value)


def test_a_default_that_no_longer_fits_is_called_a_default() -> None:
    with pytest.raises(
        UsageError, match="store.page does not go with the default of another key: retrieval.chunk = 8"
    ):
        load_config("plain", {"store.page": 4})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trifroce", ["unknown config 'trifroce'", "did you mean triforce?", *COMPOSITIONS]),
        ("", ["unknown config ''", *COMPOSITIONS]),
        ("x" * 5000, ["unknown config", *COMPOSITIONS]),
        ("no/such.toml", ["no/such.toml", "no such file", *COMPOSITIONS]),
        ("{folder}", ["is a folder", *COMPOSITIONS]),
    ],
)
def test_a_config_that_is_not_there(tmp_path: Path, name: str, said: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        load_config(name.format(folder=tmp_path))
    for part in said:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("retrieval.budget=4096", "retrieval.budget", 4096),
        (" retrieval.budget = 4_096 ", "retrieval.budget", 4096),
        ("retrieval.refresh=every", "retrieval.refresh", "every"),
        ("retrieval.refresh=stride:4", "retrieval.refresh", "stride:4"),
        ('retrieval.refresh="acceptance:0.5"', "retrieval.refresh", "acceptance:0.5"),
        ("speculation.step_down=false", "speculation.step_down", False),
        ('speculation.levels=["lookup"]', "speculation.levels", ["lookup"]),
        ("a.b=0.5", "a.b", 0.5),
        ("a.b=c=d", "a.b", "c=d"),
        ("a.b=1\nc=2", "a.b", "1\nc=2"),
    ],
)
def test_an_override_on_the_command_line(text: str, key: str, value: object) -> None:
    assert parse_override(text) == (key, value)


@pytest.mark.parametrize("text", ["", "retrieval.budget", "=3", "retrieval.budget="])
def test_an_override_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="section.key=value"):
        parse_override(text)


@pytest.mark.parametrize("text", ["every", "stride:16", "acceptance:0.75"])
def test_a_refresh_policy_is_written_as_it_is_read(text: str) -> None:
    assert str(RefreshPolicy.parse(text)) == text


def test_a_wheel_holds_the_packages_with_their_data_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("bench", "configs", "cpu_kv", "offload_rt", "tools"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    files = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in ("cpu_kv", "offload_rt")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected |= {f"offload_rt/configs/{name}.toml" for name in COMPOSITIONS}
    assert files == expected
    read = "from offload_rt.commands import prompts; print(prompts.__file__, prompts.built_in()[:10])"
    told = subprocess.check_output([sys.executable, "-c", read], cwd=tmp_path, env={"PYTHONPATH": str(wheel)})
    assert told.decode() == f"{wheel}/offload_rt/commands/prompts.py CHAPTER 1.\n"


def test_auto_stands_for_several_and_levels_leave_no_choice() -> None:
    assert [config.name for config in load_configs("auto")] == list(AUTOMATIC)
    assert [config.name for config in load_configs("naive")] == ["naive"]
    (given,) = load_configs("auto", {"speculation.levels": ["target:streaming"]})
    assert given.speculation.names == ("target:streaming",)
    assert [config.name for config in possible(load_configs("auto"), draft_model=False)] == [
        *("retrieval", "trees", "lookup", "plain")
    ]
