"""The native CPU kernel against float64, and what happens where it cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload_rt import native
from offload_rt.attention import NativeCpuBackend, TorchCpuBackend, choose_backend
from offload_rt.devices import CACHE_FOLDER


@pytest.fixture(scope="module")
def kernel() -> native.Kernel:
    built = native.load_kernel()
    if built is None:
        pytest.skip("no C++ compiler here: the kernel cannot be built")
    return built


def expected(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = queries.double() @ keys.double().transpose(1, 2) * scale
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ values.double(), scores.logsumexp(-1)


SHAPES = [
    # heads, queries, tokens, head_dim: every remainder of the kernel's tiles and blocks occurs
    (4, 1, 1, 64),
    (4, 1, 77, 64),
    (2, 5, 1000, 128),
    (3, 17, 4100, 64),
    (1, 64, 2049, 32),
    (1, 130, 300, 80),
    (2, 3, 9, 16),
    (1, 7, 3333, 112),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_error_is_at_most_twice_torchs(
    kernel: native.Kernel, dtype: torch.dtype, shape: tuple[int, int, int, int], masked: bool
) -> None:
    heads, count, tokens, dim = shape
    generator = torch.Generator().manual_seed(hash(shape) % 2**31)
    queries, keys, values = (
        torch.randn(heads, n, dim, generator=generator).to(dtype) for n in (count, tokens, tokens)
    )
    mask = None
    if masked:
        hidden = torch.rand(count, tokens, generator=generator) < 0.4
        hidden[:, -1] = False
        mask = torch.zeros(count, tokens).masked_fill(hidden, -torch.inf)
    scale = dim**-0.5
    want, want_lse = expected(queries, keys, values, scale, mask)
    out, lse = kernel.attend(queries, keys, values, scale, mask)
    peer, peer_lse = TorchCpuBackend()(queries, keys, values, scale, mask)
    rounding = torch.finfo(dtype).eps * float(want.abs().max())
    assert float((out - want).abs().max()) <= 2 * float((peer - want).abs().max()) + rounding
    slack = 2e-6 * max(1.0, float(want_lse.abs().max()))
    assert float((lse - want_lse).abs().max()) <= 2 * float((peer_lse - want_lse).abs().max()) + slack


def test_reads_strided_heads_in_place(kernel: native.Kernel) -> None:
    slab = torch.randn(2, 3, 500, 32)  # keys and values of a slab, of which a run in the middle is attended
    keys, values = slab[0, :, 100:300], slab[1, :, 100:300]
    queries = torch.randn(4, 3, 32).transpose(0, 1)
    out, _ = kernel.attend(queries, keys, values, 0.2, None)
    want, _ = expected(queries, keys, values, 0.2, None)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


def test_extreme_scores_neither_overflow_nor_vanish(kernel: native.Kernel) -> None:
    queries = torch.full((1, 2, 16), 40.0)
    queries[0, 1] = -40.0
    keys = torch.linspace(-30, 30, 200)[None, :, None].expand(1, 200, 16).contiguous()
    values = torch.randn(1, 200, 16, generator=torch.Generator().manual_seed(0))
    out, lse = kernel.attend(queries, keys, values, 1.0, None)
    want, want_lse = expected(queries, keys, values, 1.0, None)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-2, rtol=1e-6)


def test_nan_in_nan_out(kernel: native.Kernel) -> None:
    keys = torch.randn(1, 50, 16)
    keys[0, 20, 3] = torch.nan
    out, _ = kernel.attend(torch.randn(1, 2, 16), keys, torch.randn(1, 50, 16), 1.0, None)
    assert bool(out.isnan().any())


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float64, 64), (torch.float16, 64), (torch.float32, 20)], ids=str
)
def test_what_it_does_not_cover_goes_to_torch(kernel: native.Kernel, dtype: torch.dtype, dim: int) -> None:
    queries, keys, values = (torch.randn(2, n, dim).to(dtype) for n in (3, 40, 40))
    assert not kernel.fits(queries, keys, values)
    out, lse = NativeCpuBackend(kernel)(queries, keys, values, 0.1, None)
    peer, peer_lse = TorchCpuBackend()(queries, keys, values, 0.1, None)
    assert torch.equal(out, peer) and torch.equal(lse, peer_lse)


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and no memory of an earlier build."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    native.load_kernel.cache_clear()
    yield tmp_path
    native.load_kernel.cache_clear()


def test_falls_back_without_a_compiler_that_works(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    assert native.load_kernel() is None
    assert type(choose_backend(torch.device("cpu"))) is TorchCpuBackend
    assert list(unbuilt.iterdir()) == []


def test_is_switched_off_by_the_environment(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.load_kernel() is None


def test_is_built_once(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.load_kernel() is None:
        pytest.skip("no C++ compiler here")
    built = [path.name for path in unbuilt.iterdir()]
    assert len(built) == 1
    native.load_kernel.cache_clear()

    def refuse(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(native, "_build", refuse)
    assert native.load_kernel() is not None
