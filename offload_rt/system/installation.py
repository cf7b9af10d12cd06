"""How this package was installed, and the commands that install more beside it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

PACKAGE = "offload-rt"


def install_extra(extra: str) -> str:
    """Returns the command that installs an extra of this package from where the package was installed.

    Where that was a file or a folder that has gone since, the command needs a checkout.
    """
    editable, requirement = _requirement(extra)
    if requirement is None:
        return f"in a checkout of {PACKAGE}, run {pip_install()} '.[{extra}]'"
    return f"{pip_install()} {'-e ' * editable}'{requirement}'"


def pip_install() -> str:
    """Returns the beginning of a command that installs into the running environment, with pip or uv."""
    python = shlex.quote(sys.executable)
    if find_spec("pip") is None:
        return f"uv pip install --python {python}"
    on_path = shutil.which("pip")
    if on_path is not None and os.path.dirname(on_path) == os.path.dirname(sys.executable):
        return "pip install"
    return f"{python} -m pip install"


def _requirement(extra: str) -> tuple[bool, str | None]:
    """Returns whether the package is editable, and what pip installs it from again; None: that has gone."""
    named = f"{PACKAGE}[{extra}]"
    try:
        text = Distribution.from_name(PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:  # run from a checkout
        return True, f"{Path(__file__).resolve().parents[2]}[{extra}]"
    if text is None:  # from an index
        return False, named
    origin: dict[str, Any] = json.loads(text)  # PEP 610
    url, within = origin["url"], origin.get("subdirectory")
    subdirectory = f"#subdirectory={within}" if within else ""
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        revision = vcs.get("requested_revision") or vcs["commit_id"]
        return False, f"{named} @ {vcs['vcs']}+{url}@{revision}{subdirectory}"
    path = Path(url2pathname(urlsplit(url).path))
    if url.startswith("file:") and not path.exists():
        return False, None
    if "dir_info" in origin:
        return bool(origin["dir_info"].get("editable")), f"{path}[{extra}]"
    return False, f"{named} @ {url}{subdirectory}"
