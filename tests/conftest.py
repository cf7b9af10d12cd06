"""What every test runs under."""

from __future__ import annotations

import os
from typing import Any

# Before anything imports transformers: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before anything imports torch: threads wait for each other longer than tiny models compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

EMULATED_CUDA = os.environ.get("EMULATED_CUDA")
"""Runs the tests of a GPU on an emulated one, which computes `late`, `soon` or at `random` times."""
EVERY = int(os.environ.get("EMULATED_CUDA_EVERY", "6"))
"""Of the cases of slow tests only every so many'th is run there."""

if EMULATED_CUDA:
    import emulated_cuda

    emulated_cuda.install(EMULATED_CUDA)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    slow = [item for item in items if item.path.stem in ("test_graphs", "test_streaming_engine")]
    if EMULATED_CUDA:
        left_out = {*slow} - {*slow[::EVERY]}
        items[:] = [item for item in items if item not in left_out]
