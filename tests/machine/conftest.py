"""Fixtures of the tests of machines."""

from __future__ import annotations

import pytest

from offload_rt.machine import measuring


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that show only that they work."""
    for name in ("MEMORY_BYTES", "ATTENTION_BYTES", "COPY_BYTES"):
        monkeypatch.setattr(measuring, name, 2**20)
    for name in ("PRODUCT", "GPU_PRODUCT"):
        monkeypatch.setattr(measuring, name, (8, 64))
    for name in ("QUANTIZED", "GPU_QUANTIZED"):
        monkeypatch.setattr(measuring, name, (64, 1))
    monkeypatch.setattr(measuring, "LAYERS", 1)
    monkeypatch.setattr(measuring, "REPEATS", 1)
