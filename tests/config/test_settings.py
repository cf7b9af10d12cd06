"""Settings: what a file may say, whose defaults they are, and what the command shows of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from offload_rt.commands import cli
from offload_rt.config.settings import CACHE_OFF, SettingDefault, Settings, fill_in, load_settings
from offload_rt.errors import UsageError
from offload_rt.model import loading

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a settings file, which the environment names."""

    def write(text: str) -> Path:
        path = tmp_path / "settings.toml"
        path.write_text(text, encoding="utf-8")
        monkeypatch.setenv("OFFLOAD_RT_CONFIG", str(path))
        return path

    return write


WHOLE = """\
model = "~/models/big"
draft = "auto"
device = "cuda:0,cuda:1"
dtype = "bfloat16"
folders = ["models", "/more/models"]
cache = "contexts"
cache_limit_gib = 20
"""


def test_a_file_is_read(write: Write, tmp_path: Path) -> None:
    write(WHOLE)
    assert load_settings() == Settings(
        model=os.path.expanduser("~/models/big"),
        draft="auto",
        device="cuda:0,cuda:1",
        dtype="bfloat16",
        folders=(tmp_path / "models", Path("/more/models")),
        cache=tmp_path / "contexts",
        cache_limit_gib=20.0,
    )
    write('cache = "off"')
    assert load_settings() == Settings(cache=CACHE_OFF)


def test_a_missing_file_has_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_RT_CONFIG", str(tmp_path / "no" / "settings.toml"))
    assert load_settings() == Settings()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('modle = "x"', "unknown key modle; did you mean model? there are model, draft, device, dtype, "),
        ("[model]\nname = 'x'", "model = {'name': 'x'}: must be a string, not empty"),
        ('draft = ""', "draft = '': must be a string, not empty"),
        ('device = "tpu"', "device = 'tpu': must be auto, cpu, cuda or cuda:0,cuda:1"),
        ('dtype = "bf16"', "dtype = 'bf16': must be one of auto, float32, bfloat16, float16"),
        ('folders = "/models"', "folders = '/models': must be a list of folders"),
        ("folders = [1]", "folders = [1]: must be a list of folders"),
        ("cache = false", "cache = false: must be a string, not empty"),
        ("cache_limit_gib = true", "cache_limit_gib = true: must be a number of GiB above 0"),
        ("cache_limit_gib = 0", "cache_limit_gib = 0: must be a number of GiB above 0"),
        ("cache_limit_gib = nan", "cache_limit_gib = nan: must be a number of GiB above 0"),
        ('model = "x', "not valid TOML: "),
    ],
)
def test_a_mistake_is_a_line(text: str, told: str, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(text)
    assert cli.main(["config", "show"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"offload-rt: error: {path}: {told}") and err.count("\n") == 1


class Refused(Exception):
    """Raised instead of opening models."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Returns a function that returns what a command line asks of the runtime."""

    def asked(line: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def opened(model: str | None, **options: Any) -> None:
            found.update(model=model, **options)
            raise Refused

        api: Any = ModuleType("offload_rt.api.llm")
        api.LLM = opened
        monkeypatch.setitem(sys.modules, "offload_rt.api.llm", api)
        monkeypatch.setattr(loading, "load_tokenizer", lambda source: None)
        with pytest.raises(Refused):
            cli.main(["generate", "--prompt-tokens", os.devnull, *line.split()])
        return found

    monkeypatch.setattr("offload_rt.model.hub.located", lambda source: source)  # the hub has any model
    monkeypatch.setattr("offload_rt.commands.prompts.read", lambda arguments, console: [1, 2])
    return asked


def test_settings_are_defaults_of_flags(write: Write, asked: Callable[[str], dict[str, Any]]) -> None:
    names = ("model", "draft", "device", "dtype")

    def values(line: str) -> list[object]:
        found = asked(line)
        return [found[name] for name in names]

    assert values("") == [None, None, "auto", "auto"]
    write('model = "a/b"\ndraft = "a/small"\ndevice = "cpu"\ndtype = "float16"')
    assert values("") == ["a/b", "a/small", "cpu", "float16"]
    assert values("--draft none --device auto --dtype float32") == ["a/b", "none", "auto", "float32"]
    # The draft is that of the settings' target.
    assert values("--model c/d") == ["c/d", None, "cpu", "float16"]
    write('model = "a/b"\ndraft = "auto"')
    assert values("--model c/d")[:2] == ["c/d", "auto"]
    write('draft = "a/small"')
    assert values("--model a/b")[:2] == ["a/b", "a/small"]
    assert values("")[:2] == [None, None]  # the demo has its own


def test_the_file_is_read_only_for_flags_that_are_not_given(write: Write) -> None:
    write("torn = ")
    given = argparse.Namespace(model="x", draft=None)
    fill_in(given)
    assert vars(given) == {"model": "x", "draft": None}
    assert cli.main(["config", "path"]) == 0
    with pytest.raises(UsageError, match="not valid TOML"):
        fill_in(argparse.Namespace(limit=SettingDefault("cache_limit_gib", 3)))
    write("")
    fill_in(asking := argparse.Namespace(limit=SettingDefault("cache_limit_gib", 3)))
    assert asking.limit == 3


def test_the_command_shows_where_each_comes_from(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write('draft = "auto"\nfolders = ["/one", "/two"]')
    assert cli.main(["config", "show"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: [part.strip() for part in row[1:] if part] for row in rows}
    assert shown == {
        "file": [str(path), "environment, OFFLOAD_RT_CONFIG"],
        "model": ["demo", "default"],
        "draft": ["auto", "file"],
        "device": ["auto", "default"],
        "dtype": ["auto", "default"],
        "quantize": ["none", "default"],
        "folders": ["/one, /two", "file"],
        "cache": ["off", "default"],
        "cache_limit_gib": ["a tenth of the free disk", "default"],
    }
    path.unlink()
    assert cli.main(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert cli.main(["config", "show"]) == 0
    assert "environment, OFFLOAD_RT_CONFIG; there is no such file\n" in capsys.readouterr().out


def test_the_file_is_in_the_users_config_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OFFLOAD_RT_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert cli.main(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/offload_rt/settings.toml\n"
