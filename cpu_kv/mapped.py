"""Page-locked host memory that kernels access directly, so that small data needs no copy engine.

A copy engine runs one copy at a time, so a few bytes may wait behind a bulk copy. Kernels that read or write
page-locked memory need not wait: their accesses cross the link between the packets of the copy.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import dlpack


class _DLTensor(ctypes.Structure):
    """DLPack's `DLManagedTensor` with the fields of its first member, a `DLTensor`, inlined."""

    _fields_: ClassVar[Any] = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_CUDA, _UNSIGNED = 2, 1  # DLPack's codes for the device type and the element type
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def device_view(memory: Tensor, device: torch.device) -> Tensor:
    """Returns page-locked host memory as a tensor of a CUDA device, of the same shape and dtype.

    Kernels of that device read and write it over the link. `memory` must be contiguous and must outlive the
    view and all kernels that use it: the view does not keep it alive. Use elementwise kernels, gathers and
    reductions: `copy_` between the view and the device's memory would use a copy engine.
    """
    # DLPack names the device of the tensor. With the CUDA array interface torch would ask the driver, which
    # names the device that was current when the memory was locked: the wrong one for a second GPU.
    index = torch.cuda.current_device() if device.index is None else device.index
    key = memory.data_ptr(), memory.nbytes, index
    if key not in _described:
        _described[key] = _DLTensor(
            data=memory.data_ptr(),
            device_type=_CUDA,
            device=index,
            dimensions=1,
            code=_UNSIGNED,
            bits=8,
            lanes=1,
            shape=(ctypes.c_int64 * 1)(memory.nbytes),
            strides=(ctypes.c_int64 * 1)(1),
        )
    capsule = _new_capsule(ctypes.addressof(_described[key]), b"dltensor", None)
    view: Tensor = dlpack.from_dlpack(capsule)
    return view.view(memory.dtype).view(memory.shape)


_described: dict[tuple[int, int, int], _DLTensor] = {}
"""Descriptions by address, size and device. Never freed: torch's tensors refer to them."""


@cache
def kernels_use_host_pointers(device: torch.device) -> bool:
    """Returns whether kernels may use the host address of memory that was locked by `cudaHostRegister`.

    That holds on Linux. For page-locked memory that CUDA has allocated it holds everywhere.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True  # without a driver there is no device to ask
    number, answer = ctypes.c_int(), ctypes.c_int()
    index = torch.cuda.current_device() if device.index is None else device.index
    refused = driver.cuDeviceGet(ctypes.byref(number), index)
    refused = refused or driver.cuDeviceGetAttribute(ctypes.byref(answer), _CAN_USE_HOST_POINTER, number)
    return not refused and bool(answer.value)


_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


class MappedBuffer:
    """A page-locked buffer shared by the host and the kernels of one device.

    Attributes:
        host: the bytes, as a host tensor.
        device: the same bytes, as a tensor of the device.
        last_use: event at the end of the kernels that use the content. The host may overwrite it afterwards.
    """

    def __init__(self, host: Tensor, device: Tensor):
        self.host = host
        self.device = device
        self.last_use = torch.cuda.Event(blocking=True)

    @classmethod
    def allocate(cls, byte_count: int, device: torch.device, count: int = 1) -> list[MappedBuffer]:
        """Returns `count` buffers that share one allocation."""
        with torch.inference_mode(False):  # tensors made in inference mode are read-only outside of it
            host = torch.empty(count, byte_count, dtype=torch.uint8, pin_memory=True)
            return [cls(*views) for views in zip(host, device_view(host, device), strict=True)]

    def mark_used(self) -> None:
        """Records `last_use` at the end of all work enqueued so far in the device's current stream."""
        self.last_use.record(torch.cuda.current_stream(self.device.device))


class SmallCopies:
    """Copies small tensors between the host and one device by kernels. Thread-safe.

    Tensors of more than `MOST_BYTES` use a copy engine.
    """

    MOST_BYTES = 2**16
    BUFFERS = 32

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers = deque(MappedBuffer.allocate(self.MOST_BYTES, device, self.BUFFERS))

    def to_device(self, source: Tensor) -> Tensor:
        """Returns a copy on the device. The host does not wait, and `source` may be changed at once."""
        if source.nbytes > self.MOST_BYTES:
            return source.pin_memory().to(self._device, non_blocking=True)
        buffer = self._take()
        try:
            buffer.host[: source.nbytes].copy_(_bytes(source))
            copied = computed_copy(buffer.device[: source.nbytes].view(source.dtype))
            buffer.mark_used()
        finally:
            self._buffers.append(buffer)
        return copied.view(source.shape)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies in host memory. The host waits once, for the device's current stream."""
        if sum(_padded(tensor.nbytes) for tensor in tensors) > self.MOST_BYTES:
            copies = [
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            torch.cuda.current_stream(self._device).synchronize()
            return copies
        buffer = self._take()
        try:
            start = 0
            for tensor in tensors:
                place = buffer.device[start : start + tensor.nbytes].view(tensor.dtype)
                computed_copy(tensor, out=place.view(tensor.shape))
                start += _padded(tensor.nbytes)
            buffer.mark_used()
            buffer.last_use.synchronize()
            copied = buffer.host[:start].clone()
        finally:
            self._buffers.append(buffer)
        copies, start = [], 0
        for tensor in tensors:
            copies.append(copied[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += _padded(tensor.nbytes)
        return copies

    def _take(self) -> MappedBuffer:
        """Takes the least recently used buffer. There are many more buffers than threads."""
        buffer = self._buffers.popleft()
        buffer.last_use.synchronize()
        return buffer


def computed_copy(source: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns a copy made by an elementwise kernel; `copy_` and `clone` may use a copy engine."""
    kind = _integers(source.dtype)
    copied = torch.bitwise_or(source.view(kind), 0, out=None if out is None else out.view(kind))
    return copied.view(source.dtype)


def _integers(dtype: torch.dtype) -> torch.dtype:
    """Returns the integer type of that size, of which a bitwise OR with 0 changes no bit."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _padded(byte_count: int) -> int:
    """Rounds up, so that the next tensor is aligned for every dtype."""
    return -(-byte_count // 16) * 16


class PeerCopies:
    """Copies tensors from one device to another. Thread-safe.

    Small tensors go through page-locked memory that both devices map: a kernel of the source writes it, and a
    kernel of the destination reads it. Without peer access (GeForce) the driver would copy through the host
    too, but with the copy engines, behind bulk copies. Tensors of more than `MOST_BYTES` are left to the
    driver.
    """

    MOST_BYTES = 2**22  # attention and its mass for 64 queries and 64K tokens of Llama-2-7B
    BUFFERS = 4

    def __init__(self, source: torch.device, destination: torch.device):
        self._lock = threading.Lock()
        self._source, self._destination = source, destination
        with torch.inference_mode(False):
            self._host = torch.empty(self.BUFFERS, self.MOST_BYTES, dtype=torch.uint8, pin_memory=True)
            views = [device_view(self._host, device) for device in (source, destination)]
        self._buffers = deque((*pair, torch.cuda.Event()) for pair in zip(*views, strict=True))

    def copy(self, tensor: Tensor, sending: torch.cuda.Stream, receiving: torch.cuda.Stream) -> Tensor:
        """Returns a copy of `tensor` on the destination. The host does not wait.

        The streams are named because current ones do not tell them apart where both are on one device.

        Args:
            sending: the stream of the source that writes `tensor`, and sends it.
            receiving: the stream of the destination that waits for the copy and reads it.
        """
        if tensor.nbytes > self.MOST_BYTES:
            return self._copy_by_driver(tensor, sending, receiving)
        with self._lock:
            written, readable, emptied = self._buffers.popleft()
            size = tensor.nbytes
            sending.wait_event(emptied)
            with torch.cuda.stream(sending):
                computed_copy(tensor, out=written[:size].view(tensor.dtype).view(tensor.shape))
            receiving.wait_event(sending.record_event())
            with torch.cuda.stream(receiving):
                copied = computed_copy(readable[:size].view(tensor.dtype))
            emptied.record(receiving)
            self._buffers.append((written, readable, emptied))
        return copied.view(tensor.shape)

    def _copy_by_driver(
        self, tensor: Tensor, sending: torch.cuda.Stream, receiving: torch.cuda.Stream
    ) -> Tensor:
        receiving.wait_event(sending.record_event())
        with torch.cuda.stream(receiving):
            copied = torch.empty_like(tensor, device=self._destination).copy_(tensor, non_blocking=True)
        sending.wait_event(receiving.record_event())  # the memory of `tensor` may be reused afterwards
        return copied


def joined_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of tensors of one device, concatenated, so that one copy moves them all."""
    padding = [
        tensor.new_zeros(_padded(tensor.nbytes) - tensor.nbytes, dtype=torch.uint8) for tensor in tensors
    ]
    pieces = [piece for tensor, gap in zip(tensors, padding, strict=True) for piece in (_bytes(tensor), gap)]
    return torch.cat(pieces)


def split_bytes(data: Tensor, like: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Returns views of the tensors in the result of `joined_bytes`, given their shapes and dtypes."""
    tensors, start = [], 0
    for shape, dtype in like:
        size = math.prod(shape) * dtype.itemsize
        tensors.append(data[start : start + size].view(dtype).view(tuple(shape)))
        start += _padded(size)
    return tensors
