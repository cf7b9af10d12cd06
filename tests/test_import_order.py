"""Packages stand on floors: modules import from their own floor and below, also where they import lazily."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "offload_rt"
FLOORS = """
errors
system config
text sampling
kernels
attention
caches
model
drafting
machine
planning
engine
api
server.jobs
server.protocols
server
commands
__main__
"""


def imported(source: str) -> set[str]:
    """Returns what a module imports of `offload_rt`, also for type checkers, by names within it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.removeprefix("offload_rt.") for name in names if name.startswith("offload_rt.")}
    return found


def test_the_store_imports_nothing_of_the_runtime() -> None:
    importing = {
        path.name for path in (ROOT.parent / "cpu_kv").glob("*.py") if imported(path.read_text("utf-8"))
    }
    assert not importing


def test_nothing_is_imported_from_a_floor_above() -> None:
    floors = {name: number for number, line in enumerate(FLOORS.split("\n")) for name in line.split()}

    def floor(name: str) -> int:
        """Returns the floor of a module: that of the innermost package which has one."""
        while name and name not in floors:
            name = name.rpartition(".")[0]
        return floors.get(name, 0)

    upward = set()
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT)
        home = ".".join(place.with_suffix("").parts)
        if home != "__init__":  # hands on the names of the API, when they are asked for
            others = imported(path.read_text("utf-8"))
            assert floor(home) or not others, f"{place} is on no floor"
            upward |= {(place.as_posix(), other) for other in others if floor(other) > floor(home)}
    assert not upward
