"""Commands that install an extra, by where the package came from."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import pathname2url
from zipfile import ZipFile

import pytest

from offload_rt.commands import cli
from offload_rt.errors import UsageError
from offload_rt.sampling.params import SamplingParams
from offload_rt.system import installation
from offload_rt.system.installation import install_extra, pip_install

ROOT = Path(__file__).parents[2]
COMMIT = "4d7ae0d8d0c3ae3b5b3b3fc9b3ed0a2a34f3ac53"


@pytest.fixture(autouse=True)
def _activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is the active one."""
    monkeypatch.setattr(installation, "find_spec", lambda name: object())
    monkeypatch.setattr("shutil.which", lambda name: str(Path(sys.executable).with_name(name)))


def installed_from(monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None) -> None:
    text = None if origin is None else json.dumps(origin)
    found = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", lambda name: found)


def test_an_extra_is_installed_from_where_the_package_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    wheel = tmp_path / "offload_rt-0.1.0-py3-none-any.whl"
    wheel.touch()
    folder_url, wheel_url = (f"file://{pathname2url(str(path))}" for path in (folder, wheel))
    git, web = "https://example.org/offload-rt.git", "https://example.org/offload-rt.zip"
    pinned = {"vcs": "git", "commit_id": COMMIT}
    for origin, expected in (
        ({"url": folder_url, "dir_info": {"editable": True}}, f"-e '{folder}[server]'"),
        ({"url": folder_url, "dir_info": {}}, f"'{folder}[server]'"),
        ({"url": wheel_url, "archive_info": {}}, f"'offload-rt[server] @ {wheel_url}'"),
        ({"url": git, "vcs_info": pinned}, f"'offload-rt[server] @ git+{git}@{COMMIT}'"),
        (
            {"url": git, "vcs_info": pinned | {"requested_revision": "main"}, "subdirectory": "runtime"},
            f"'offload-rt[server] @ git+{git}@main#subdirectory=runtime'",
        ),
        ({"url": web, "archive_info": {}}, f"'offload-rt[server] @ {web}'"),
        (None, "'offload-rt[server]'"),
    ):
        installed_from(monkeypatch, origin)
        assert install_extra("server") == f"pip install {expected}"


def test_where_the_origin_has_gone_a_checkout_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[dict[str, Any]] = [{"dir_info": {"editable": True}}, {"dir_info": {}}, {"archive_info": {}}]
    for kind in kinds:
        installed_from(monkeypatch, {"url": f"file://{tmp_path}/gone", **kind})
        assert install_extra("json") == "in a checkout of offload-rt, run pip install '.[json]'"


def test_a_checkout_that_was_never_installed_installs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", missing)
    root = Path(installation.__file__).resolve().parents[2]
    assert install_extra("bench") == f"pip install -e '{root}[bench]'"


def test_the_running_environment_is_installed_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/some env/bin/python")
    for elsewhere in ("/usr/bin/pip", None):
        monkeypatch.setattr("shutil.which", lambda name, found=elsewhere: found)
        assert pip_install() == "'/some env/bin/python' -m pip install"
    monkeypatch.setattr(installation, "find_spec", lambda name: None)  # as uv leaves an environment
    assert pip_install() == "uv pip install --python '/some env/bin/python'"


def test_hints_at_missing_packages_say_what_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    installed_from(monkeypatch, {"url": f"file://{tmp_path}", "dir_info": {"editable": True}})
    for package in ("uvicorn", "llguidance"):
        monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["serve"]) == 2
    assert capsys.readouterr().err.endswith(f" needs uvicorn: pip install -e '{tmp_path}[server]'\n")
    with pytest.raises(UsageError, match="llguidance: pip install -e '.*\\[json\\]'$"):
        SamplingParams(json_schema={"enum": ["seen by nobody"]})


def test_type_checkers_find_an_editable_install(tmp_path: Path) -> None:
    """It is the checkout's path in a .pth file, which they read; they do not run an import hook."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for package in ("cpu_kv", "offload_rt", "bench", "docs"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    build = "import setuptools.build_meta as build; build.build_editable('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as files:
        outside = [name for name in files.namelist() if ".dist-info/" not in name]
        assert len(outside) == 1 and outside[0].endswith(".pth")
        assert files.read(outside[0]).decode().split() == [str(tmp_path)]


def test_ci_runs_the_versions_of_python_that_are_promised() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "3.13" in promised and f"python: {json.dumps(promised)}" in workflow
    assert project["requires-python"] == f">={promised[0]}"
