"""The embedded pair of demo models: names and folders, known without torch."""

from __future__ import annotations

from pathlib import Path

from offload_rt.errors import UsageError

DEMO = "demo"
DEMO_DRAFT = "demo-draft"
DEMO_PARTS = {DEMO: "target", DEMO_DRAFT: "draft"}
"""The embedded pair by name."""
DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo" / "pair"


def demo_model(part: str) -> Path:
    """Returns the folder of the embedded `target` or `draft`."""
    folder = DEMO_FOLDER / part
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"the embedded demo {part} is not installed at {folder}; reinstall the package or name a --model"
        )
    return folder


def model_source(name: str | Path | None) -> str | Path:
    """Returns where a model is loaded from: the folder of an embedded one, any other name as it is given.

    None is the embedded target.
    """
    part = DEMO_PARTS.get(DEMO if name is None else str(name))
    if part is not None:
        return demo_model(part)
    assert name is not None
    return name


def model_name(source: str | Path | None) -> str:
    """Returns what a model is called: an embedded one by its name, whether that or its folder is given."""
    named = {str(DEMO_FOLDER / part): name for name, part in DEMO_PARTS.items()}
    return named.get(str(source), DEMO if source is None else str(source))
