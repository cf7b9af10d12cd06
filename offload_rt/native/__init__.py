"""The native attention kernel: built with the machine's own compiler on first use, and cached.

Where there is no compiler, or the build fails, `load_kernel` says None and attention falls back to
torch's kernel. `OFFLOAD_RT_NATIVE=0` in the environment does the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from offload_rt.devices import cache_folder

SOURCE = Path(__file__).with_name("attention.cpp")
SOURCES = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
SWITCH = "OFFLOAD_RT_NATIVE"
BUILD_TIMEOUT_S = 120
_DIGEST_BYTES = hashlib.sha256().digest_size
_FLAGS = ("-O3", "-fopenmp", "-std=c++17", "-shared", "-fPIC")

_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p
_SIGNATURE = (
    *(_POINTER, _INTEGER, _INTEGER) * 3,  # queries, keys, values: data, head stride, row stride
    _POINTER,  # out
    _POINTER,  # lse
    *(_INTEGER,) * 4,  # heads, queries, tokens, head_dim
    ctypes.c_float,  # scale
    _POINTER,  # mask
    _INTEGER,  # threads
)


class Kernel:
    """The compiled library; see `attention.cpp`.

    Attributes:
        lanes: floats in one of its vectors.
        bfloat16_dots: whether it multiplies bfloat16 by dot products of the processor; it widens to float32
            otherwise.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.lanes = int(library.offload_rt_lanes())
        self.bfloat16_dots = bool(library.offload_rt_bfloat16_dots())
        self._entry: dict[torch.dtype, Callable[..., None]] = {}
        for dtype in (torch.float32, torch.bfloat16):
            name = f"offload_rt_attend_{str(dtype).removeprefix('torch.')}"
            function = getattr(library, name)
            function.argtypes, function.restype = _SIGNATURE, None
            self._entry[dtype] = function

    def fits(self, queries: Tensor, keys: Tensor, values: Tensor) -> bool:
        """Whether the kernel takes these: float32 or bfloat16, head_dim a multiple of its vector width."""
        return (
            queries.dtype in self._entry
            and queries.shape[-1] % self.lanes == 0
            and queries.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
        )

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        mask: Tensor | None,
        threads: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Queries `[heads, query, dim]` over keys `[heads, tokens, dim]` under a mask `[query, tokens]`.

        A query that sees no key has an output of zero and the log-sum-exp -inf. Threads of a program may
        call at the same time, each with its own team.

        Args:
            threads: the size of the team (default: torch's for the calling thread).
        """
        heads, count, dim = queries.shape
        out = queries.new_empty(heads, count, dim)
        lse = torch.empty(heads, count, dtype=torch.float32)
        if out.numel() == 0:
            return out, lse
        if mask is not None:
            mask = mask.to(torch.float32).contiguous()
        self._entry[queries.dtype](
            queries.data_ptr(),
            queries.stride(0),
            queries.stride(1),
            keys.data_ptr(),
            keys.stride(0),
            keys.stride(1),
            values.data_ptr(),
            values.stride(0),
            values.stride(1),
            out.data_ptr(),
            lse.data_ptr(),
            heads,
            count,
            keys.shape[1],
            dim,
            scale,
            None if mask is None else mask.data_ptr(),
            torch.get_num_threads() if threads is None else threads,
        )
        return out, lse


@functools.cache
def load_kernel() -> Kernel | None:
    """The kernel for this machine, built if need be; None where it cannot be had."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if os.environ.get(SWITCH) == "0" or compiler is None:
        return None
    try:
        path = cache_folder() / f"attention-{_fingerprint(compiler)}.so"
        if not _whole(path):
            _build(compiler, path)
        return Kernel(path)
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError):
        return None


def _fingerprint(compiler: str) -> str:
    """Changes with the source, the compiler and the processor: a home folder may be shared by machines."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=30).stdout
    try:
        flags = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
        )
    except (OSError, StopIteration):
        flags = platform.processor()
    parts = (*(source.read_bytes() for source in SOURCES), version, flags.encode(), " ".join(_FLAGS).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _whole(path: Path) -> bool:
    """Whether the library is there as it was built: to load a part of one kills the process."""
    data = path.read_bytes() if path.exists() else b""
    return data.endswith(_digest(data[:-_DIGEST_BYTES]))


def _digest(library: bytes) -> bytes:
    """What follows a library in its file, where the loader does not look."""
    return hashlib.sha256(library).digest()


def _build(compiler: str, path: Path, processor: str = "native") -> None:
    """Compiles the sources for a processor by the compiler's name for it."""
    # Built aside and moved into place: another process may be building the same.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        subprocess.run(
            [compiler, f"-march={processor}", *_FLAGS, "-o", str(built), str(SOURCE)],
            check=True,
            capture_output=True,
            timeout=BUILD_TIMEOUT_S,
        )
        library = built.read_bytes()
        built.write_bytes(library + _digest(library))
        built.replace(path)
