"""The native kernel, for every kind of processor that this machine can play."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.native_kernels import ATTENTION, PROCESSORS, runs

from offload_rt.kernels import building, dense, native


@pytest.fixture(scope="session")
def built() -> dict[str, Path]:
    """The kernel for every processor that this machine can play, where there is a compiler.

    Kept, as the user's own is: every process of a parallel run needs them.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        return {}
    own = native.library_path(compiler)
    paths = {
        processor: own if processor == "native" else own.with_name(f"test-{processor}-{own.name}")
        for processor in PROCESSORS
        if runs(processor)
    }
    missing = [processor for processor, path in paths.items() if not building.intact(path)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda processor: native._build(compiler, paths[processor], processor), missing))
    return paths


@pytest.fixture(scope="session", params=ATTENTION)
def kernel(request: pytest.FixtureRequest, built: dict[str, Path]) -> native.Kernel:
    if request.param not in built:
        pytest.skip(f"no C++ compiler here, or not a machine that runs {request.param}")
    return native.Kernel(built[request.param])


@pytest.fixture(params=["native", "cooperlake", "x86-64-v3", "x86-64"])
def processor(
    request: pytest.FixtureRequest, built: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Its library for dense layers: with tiles, dot products of pairs, and vectors of two widths."""
    if request.param not in built:
        pytest.skip(f"no C++ compiler here, or not a machine that runs {request.param}")
    kernel = native.Kernel(built[request.param])
    monkeypatch.setattr(dense, "load_kernel", lambda: kernel)
    monkeypatch.setattr(dense, "TILED_BYTES", 0)
    dense._entries.cache_clear()
    yield
    dense._entries.cache_clear()
