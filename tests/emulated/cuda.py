"""torch on emulated CUDA devices (`emulated.gpu`), so that tests marked `gpu` run without one.

Every operation on a tensor of a device is put into the queue of that device's current stream, as on a GPU,
and computed there by torch's CPU kernels. So a missing event, a buffer that is reused too early, a result
that the host reads before it arrived, or a tensor that is let go while another stream still uses it show as
wrong tokens or errors. What mixes devices is refused, and so is what waits for the device where
`torch.cuda.set_sync_debug_mode` or a capture forbids it.

What it cannot show: speed, the arithmetic of CUDA's kernels, limits of the driver.
"""

from __future__ import annotations

import ctypes
import functools
import math
import random
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.utils._device
import torch.utils.dlpack
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emulated.gpu import (
    CUDA,
    DEVICES,
    GPUS,
    MEMORY,
    PINNED,
    SCHEDULES,
    Event,
    Graph,
    Memory,
    Stream,
    await_stream,
    captured,
    capturing,
    check_owned,
    current_device,
    current_stream,
    default_stream,
    end_allocate_to_pool,
    enqueue,
    enqueue_copy,
    enqueue_peer_copy,
    in_stream,
    index_of,
    is_pinned,
    on_device,
    refuse_in_capture,
    set_device,
    set_stream,
    spoil,
)

_CPU = torch.device("cpu")
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static DeviceIndex count = 1;
static thread_local DeviceIndex current = 0;
struct Devices final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device other) const override {
    Device before = getDevice();
    setDevice(other);
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device other) const override { current = other.has_index() ? other.index() : current; }
  void uncheckedSetDevice(Device other) const noexcept override { current = other.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream) const override { return getStream(getDevice()); }
  DeviceIndex deviceCount() const noexcept override { return count; }
};
extern "C" void set_guard(int devices) {
  count = devices;
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(new Devices());
}
"""
"""torch's bindings ask for the current device wherever a tensor has one; without CUDA nobody answers."""

aten = torch.ops.aten


class CudaTensor(Tensor):
    """A tensor of an emulated device; `content` is what it holds once its stream got there."""

    content: Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, content: Tensor, memory: Memory) -> CudaTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            content.shape,
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=torch.device("cuda", memory.device.number),
        )
        made.content, made.memory = content, memory
        return made

    def __init__(self, *arguments: object) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_on_device(index, self.device))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_on_device(index, self.device), value)

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.content.data_ptr()

    def is_pinned(self, device: object = None) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        self.memory.used_by.add(stream)


def _on_device(index: Any, device: torch.device) -> Any:
    """An index whose lists are tensors."""
    if isinstance(index, tuple):
        return tuple(_on_device(one, device) for one in index)
    return torch.tensor(index, device=device) if isinstance(index, list) else index


class Emulation(TorchDispatchMode):
    """Active in every thread: what makes tensors is asked for the device by a name alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


MODE = Emulation()


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = kwargs.get("device")
    to_cuda = given is not None and torch.device(given).type == "cuda"
    leaves = _leaves((args, kwargs))
    devices = {one.device for one in leaves if isinstance(one, CudaTensor)}
    if (drawn_by := kwargs.get("generator")) is not None:
        _check_generator(drawn_by, to_cuda or bool(devices))
    if not to_cuda and not devices:
        return _on_host(func, args, kwargs)
    if _is_composite(func):
        with MODE:
            return func.decompose(*args, **kwargs)
    if func in _SPECIAL:
        return _SPECIAL[func](*args, **kwargs)
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"Expected all tensors to be on the same device, found {found}: {func}")
    if given is not None:
        return _make(func, args, kwargs)
    if any(_is_hosts(one) for one in leaves):
        args, kwargs = _own(func, args, kwargs)
    return _compute(func, args, kwargs, devices.pop())


def _check_generator(generator: Any, on_cuda: bool) -> None:
    if (generator._cdata in _Generator.on_cuda) != on_cuda:  # its Python object is another one by now
        raise RuntimeError("Expected a generator of the device that is drawn on")
    refuse_in_capture("a generator that is not registered draws the same at every replay")


@functools.cache
def _is_composite(func: Any) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(func.name(), "CompositeImplicitAutograd")) and func not in _SPECIAL


_NESTED = (list, tuple, dict)


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Arguments or results of an operation, each of them changed."""
    if isinstance(value, (list, tuple)):
        # Most are flat: half of the emulation's time would be calls of this function for their elements.
        changed = [_map(change, one) if isinstance(one, _NESTED) else change(one) for one in value]
        return changed if type(value) is list else type(value)(changed)
    if isinstance(value, dict):
        return {name: _map(change, one) for name, one in value.items()}
    return change(value)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return [value]
    leaves = []
    for one in value:
        if isinstance(one, _NESTED):
            leaves += _leaves(one)
        else:
            leaves.append(one)
    return leaves


def _plain(value: Any) -> Any:
    return _map(lambda one: one.content if isinstance(one, CudaTensor) else one, value)


def _on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func in (aten.is_pinned.default, aten._pin_memory.default, aten.pin_memory.default):
        (tensor, *_) = args
        if func is aten.is_pinned.default:
            return is_pinned(tensor)
        return PINNED.empty(tensor.shape, tensor.dtype).copy_(tensor)
    if kwargs.pop("pin_memory", False):
        like = func(*args, **kwargs)
        made = PINNED.empty(like.shape, like.dtype)
        return made if "empty" in func.name() else made.copy_(like)
    return func(*args, **kwargs)


def _make(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A new tensor, of sizes and values that depend on no tensor's content."""
    device = torch.device(kwargs["device"])
    given = _plain(kwargs) | {"device": _CPU if device.type == "cuda" else device}
    pinned = given.pop("pin_memory", False)
    if device.type != "cuda":
        made = func(*_plain(args), **given)
        return PINNED.empty(made.shape, made.dtype) if pinned else made
    with torch.inference_mode():
        made = func(*_plain(args), **given)
    out = _new(made, device)
    if "empty" not in func.name():
        content = out.content
        enqueue(lambda: _store(content, made), device)
    return out


def _store(into: Tensor, made: Tensor) -> None:
    check_owned(into)
    _copy(into, made)


def _copy(into: Tensor, made: Tensor) -> None:
    with torch.inference_mode():
        into.copy_(made)


def _new(like: Tensor, device: torch.device) -> CudaTensor:
    """Memory of a device, whose content is garbage."""
    with torch.inference_mode():
        content = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        spoil(content)
    return CudaTensor(content, Memory(content, device))


_WAITS = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.allclose.default,
    aten._local_scalar_dense.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
_TAKES_HOST_INDICES = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


def _compute(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    """An operation on tensors of one device."""
    waits = func in _WAITS or (func in _TAKES_HOST_INDICES and _waits_for_indices(*args[1:3]))
    if waits:
        await_stream(func, device)
        with torch.inference_mode():
            result = func(*_plain(args), **_plain(kwargs))
        return _map(lambda one: _ready(one, device) if isinstance(one, Tensor) else one, result)
    views, writes = _aliases(func)
    if views:
        viewed = next(one for one in _leaves(args) if isinstance(one, CudaTensor))
        with torch.inference_mode():
            result = func(*_plain(args), **_plain(kwargs))
        with torch.inference_mode(viewed.is_inference()):
            return _map(lambda content: CudaTensor(content, viewed.memory), result)
    given, named = _plain(args), _plain(kwargs)
    if writes:
        names = [argument.name for argument in func._schema.arguments]
        written = [
            kwargs[name] if name in kwargs else args[names.index(name)]
            for name in writes
            if name in kwargs or names.index(name) < len(args)
        ]
        if torch.Tag.nondeterministic_seeded in func.tags:  # drawn in the order of the host
            with torch.inference_mode():
                drawn = func(given[0].clone(), *given[1:], **named)
            enqueue(lambda: _store(given[0], drawn), device)
        else:
            contents = [one for one in _leaves(_plain(written)) if one is not None]
            if func.namespace == "offload_rt" and func._schema.returns:
                return _launch(func, given, named, device, contents)
            enqueue(lambda: _run(func, given, named, (), contents), device)
        returned = func._schema.returns
        return None if not returned else written[0] if len(returned) == 1 else tuple(written)
    return _launch(func, given, named, device)


def _launch(func: Any, args: Any, kwargs: Any, device: torch.device, written: Sequence[Tensor] = ()) -> Any:
    """An operation whose results are new."""
    results = _map(
        lambda one: _new(one, device) if isinstance(one, Tensor) else one, _results(func, args, kwargs)
    )
    outs = [one.content for one in _leaves(results) if isinstance(one, CudaTensor)]
    enqueue(lambda: _run(func, args, kwargs, outs, written), device)
    return results


def _is_hosts(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, CudaTensor)


def _waits_for_indices(indices: Sequence[Tensor | None], value: Tensor | None = None) -> bool:
    """How many entries a mask selects is read, unless a number is put there; what the host has is sent."""
    given = [one for one in indices if one is not None]
    masked = any(one.dtype in (torch.bool, torch.uint8) for one in given)
    number = _is_hosts(value)
    return any(_is_hosts(one) for one in given) or masked != number


def _own(func: Any, args: Any, kwargs: Any) -> Any:
    """Only the device's own tensors; indices go along with the call, and numbers that are not joined."""
    indices = args[1] if func in _TAKES_HOST_INDICES else ()
    joined = isinstance(args[0], (list, tuple))

    def own(value: Any) -> Any:
        if not _is_hosts(value):
            return value
        if (value.dim() == 0 and not joined) or any(value is one for one in indices):
            return value.clone()
        raise RuntimeError(f"Expected all tensors to be on the same device, cuda:0 and cpu: {func}")

    return _map(own, (args, kwargs))


@functools.cache
def _aliases(func: Any) -> tuple[bool, list[str]]:
    """Whether it returns views, and the names of the arguments that it writes."""
    views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    arguments = func._schema.arguments
    return views, [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]


_KNOWN: dict[Any, Any] = {}


def _results(func: Any, args: Any, kwargs: Any) -> Any:
    """What it returns, by torch's own rules for tensors without content; asked for once."""
    key = func, _key(args), tuple(kwargs), _key(tuple(kwargs.values()))
    if key not in _KNOWN:
        with torch.inference_mode():
            _KNOWN[key] = func(*_map(_meta, args), **_map(_meta, kwargs))
    return _KNOWN[key]


def _key(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_key(one) for one in value)
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else (type(value), value)


def _meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _run(func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor], written: Sequence[Tensor] = ()) -> None:
    for one in written:
        check_owned(one)
    result = func(*args, **kwargs)
    made = [one for one in _leaves(result) if isinstance(one, Tensor)] if outs else []
    for out, one in zip(outs, made, strict=True):
        out.copy_(one)


def _ready(content: Tensor, device: torch.device) -> CudaTensor:
    out = _new(content, device)
    out.content.copy_(content)
    return out


# Copies between host and devices, by copy engines where the memory is page-locked.


def _copy_(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(into, CudaTensor) and isinstance(source, CudaTensor):
        there, content = into.content, source.content
        if into.device != source.device:
            refuse_in_capture("a graph holds work of one device")
            enqueue_peer_copy(lambda: _store(there, content), into.nbytes, source.device, into.device)
        else:
            enqueue(lambda: _store(there, content), into.device)
        return into
    if isinstance(into, CudaTensor):
        refuse_in_capture("a graph would read the host's memory at every replay")
        there, content = into.content, source  # read when the copy runs
        awaited = not (non_blocking and is_pinned(source) and _in_one_piece(source, into))
        if awaited:
            content = source.clone()
        enqueue_copy(lambda: _store(there, content), into.nbytes, to_host=False, device=into.device)
        if awaited:
            await_stream("a copy from the host", into.device)
        return into
    assert isinstance(source, CudaTensor)
    content = source.content
    if non_blocking and is_pinned(into) and _in_one_piece(into, source):
        enqueue_copy(lambda: _copy(into, content), into.nbytes, to_host=True, device=source.device)
    else:
        await_stream("a copy to the host", source.device)
        _copy(into, content)
    return into


def _in_one_piece(hosts: Tensor, other: Tensor) -> bool:
    """Whether a copy is one transfer; else torch goes by pageable memory, which the host waits for."""
    return hosts.is_contiguous() or (hosts.dtype == other.dtype and _dense_alike(hosts, other))


def _dense_alike(one: Tensor, other: Tensor) -> bool:
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(one)
    return dense and one.shape == other.shape and one.stride() == other.stride()


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
    **_: object,
) -> Tensor:
    place = torch.device(device) if device is not None else source.device
    like = torch.empty_like(
        _plain(source), dtype=dtype, memory_format=memory_format or torch.preserve_format, device="meta"
    )
    if place.type == "cuda":
        return _copy_(_new(like, place), source, non_blocking)
    if non_blocking:  # torch makes what it copies to page-locked
        into = PINNED.empty(like.shape, like.dtype)
    else:
        into = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return _copy_(into, source, non_blocking)


# CUDA's own kernels of attention, which have no other place.


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    wide = torch.float32 if query.dtype.itemsize < 4 else query.dtype
    scores = query.to(wide) @ key.to(wide).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if causal:
        rows, columns = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(rows, columns, dtype=torch.bool).tril(), -math.inf)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ value.to(wide)).to(query.dtype), lse.float()


def _attend(
    query: Any, key: Any, value: Any, bias: Any, causal: bool, scale: float | None, rows: int
) -> tuple[Tensor, Tensor]:
    for one in (query, key, value):
        assert isinstance(one, CudaTensor) and one.dim() == 4 and one.stride(-1) == 1, "as CUDA's kernel asks"
    with torch.inference_mode():
        out = torch.empty(*query.shape[:3], value.shape[3], dtype=query.dtype, device="meta")
        lse = torch.empty(*query.shape[:2], rows, dtype=torch.float32, device="meta")
    made = _new(out, query.device), _new(lse, query.device)
    there, (queries, keys, values, biases) = [one.content for one in made], _plain((query, key, value, bias))

    def run() -> None:
        if key.shape[2] == 0:  # their result is undefined, as an H200 showed
            for into in there:
                into.fill_(math.nan)
            return
        for into, one in zip(there, _attention(queries, keys, values, biases, causal, scale), strict=True):
            _store(into[..., : one.shape[2]] if one.dim() == 3 else into, one)

    enqueue(run, query.device)
    return made


def _flash(
    query: Any,
    key: Any,
    value: Any,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only supports fp16 and bf16")
    return (
        *_attend(query, key, value, None, causal, scale, query.shape[2]),
        None,
        None,
        0,
        0,
        None,
        None,
        None,
    )


def _efficient(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    with_lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if bias is not None:
        assert bias.shape == (*query.shape[:3], key.shape[2]), "the bias has every head"
        aligned = 16 // bias.itemsize if bias.dtype != torch.float32 else 4
        assert all(stride % aligned == 0 for stride in bias.stride()[:-1]), "rows of the bias are aligned"
        assert bias.dtype == query.dtype
    padded = -(-query.shape[2] // 32) * 32
    return *_attend(query, key, value, bias, causal, scale, padded), None, None


def _unsafe_view(tensor: CudaTensor, size: Sequence[int]) -> CudaTensor:
    """A view, though it does not say so."""
    with torch.inference_mode():
        return CudaTensor(tensor.content.view(size), tensor.memory)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten._unsafe_view.default: _unsafe_view,
    aten.copy_.default: _copy_,
    aten._to_copy.default: _to_copy,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._fused_sdp_choice.default: lambda *_, **__: 0,
    aten.is_pinned.default: lambda *_: False,
}


class _Generator(torch.Generator):
    """The CPU's, which says that it is of the device that was asked for."""

    device: torch.device = torch.device("cpu")
    on_cuda: ClassVar[set[int]] = set()
    _cdata: int

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made.device = CUDA if torch.device(device).type == "cuda" else _CPU
        (cls.on_cuda.discard if made.device == _CPU else cls.on_cuda.add)(made._cdata)
        return made


def _tensor(
    data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False
) -> Tensor:
    made = _TENSOR(data, dtype=dtype, requires_grad=requires_grad)
    if device is not None and torch.device(device).type != "cpu":
        return made.to(device)
    return made.pin_memory() if pin_memory else made


_TENSOR = torch.tensor
_RUN = threading.Thread.run


def _thread_run(thread: threading.Thread) -> None:
    with MODE:
        _RUN(thread)


class _Capsule(ctypes.Structure):
    """DLPack's `DLTensor`, as far as `_from_dlpack` reads it."""

    _fields_: ClassVar[Any] = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    ]


def _from_dlpack(capsule: Any) -> Tensor:
    """Page-locked bytes of the host as a tensor of a device, whose kernels read them when they run."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    described = _Capsule.from_address(pointer(capsule, b"dltensor"))
    assert (described.device_type, described.dimensions, described.bits) == (2, 1, 8), "bytes of CUDA"
    size = described.shape[0]
    if not PINNED.covers(described.data, size):
        raise RuntimeError("CUDA error: an illegal memory access: host memory that is not page-locked")
    content = torch.frombuffer((ctypes.c_uint8 * size).from_address(described.data), dtype=torch.uint8)
    return CudaTensor(content, _HostMemory(content, torch.device("cuda", described.device)))


class _HostMemory(Memory):
    """Memory of the host, seen from a device: not its own, and never given back to it."""

    def __init__(self, content: Tensor, device: torch.device) -> None:
        self.content = content
        self.device = GPUS.devices[index_of(device)]
        self.used_by = set()
        GPUS.reused.discard(content.data_ptr())

    def __del__(self) -> None:
        pass


def _reset_peak(device: object = None) -> None:
    one = GPUS.devices[index_of(device)]
    one.peak, one.allocator.peak = one.allocated, one.allocator.reserved


def _of_device(name: str) -> Callable[[object], Any]:
    def read(device: object = None) -> Any:
        return attrgetter(name)(GPUS.devices[index_of(device)])

    return read


def _set_fraction(fraction: float, device: object = None) -> None:
    GPUS.devices[index_of(device)].fraction = fraction


def _set_sync_debug(mode: str) -> None:
    GPUS.sync_debug = mode


def _free_memory(device: object = None) -> tuple[int, int]:
    return MEMORY - GPUS.devices[index_of(device)].allocator.reserved, MEMORY


def _empty_cache() -> None:
    for device in GPUS.devices:
        GPUS.refuse_beside_captures(device.number, "cached memory is freed")
        device.allocator.empty_cache()


def _sleep(cycles: int) -> None:
    enqueue(lambda: None, None)


def install(schedule: str = "late", seed: int = 0) -> None:
    """From now on this process sees CUDA devices, if there is a compiler to make them known to torch."""
    if schedule not in SCHEDULES:
        raise ValueError(f"EMULATED_CUDA={schedule} is not known: use one of {', '.join(SCHEDULES)}")
    if shutil.which("g++") is None:
        warnings.warn("no g++: no CUDA device is emulated", stacklevel=2)
        return
    GPUS.schedule, GPUS.random = schedule, random.Random(seed)
    _set_guard()
    properties = [
        SimpleNamespace(
            name="emulated",
            total_memory=MEMORY,
            uuid=str(number),
            major=8,
            minor=9,
            multi_processor_count=128,
        )
        for number in range(DEVICES)
    ]
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: DEVICES,
        "current_device": current_device,
        "set_device": set_device,
        "get_device_name": lambda device=None: properties[index_of(device)].name,
        "get_device_properties": lambda device=None: properties[index_of(device)],
        "get_device_capability": lambda _=None: (8, 9),
        "mem_get_info": _free_memory,
        "memory_allocated": _of_device("allocated"),
        "memory_reserved": _of_device("allocator.reserved"),
        "max_memory_allocated": _of_device("peak"),
        "max_memory_reserved": _of_device("allocator.peak"),
        "reset_peak_memory_stats": _reset_peak,
        "empty_cache": _empty_cache,
        "get_per_process_memory_fraction": _of_device("fraction"),
        "set_per_process_memory_fraction": _set_fraction,
        "set_sync_debug_mode": _set_sync_debug,
        "get_sync_debug_mode": lambda: GPUS.sync_debug,
        "synchronize": GPUS.synchronize,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "stream": in_stream,
        "device": on_device,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": captured,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": capturing,
        "default_generators": (torch.Generator(),) * DEVICES,
        "_sleep": _sleep,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=PINNED.register, cudaHostUnregister=PINNED.unregister
        ),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.utils._device._device_constructors()  # knows `torch.tensor` as it was
    torch.tensor, torch.Generator = _tensor, _Generator  # type: ignore[assignment, misc]
    torch.utils.dlpack.from_dlpack = _from_dlpack  # type: ignore[assignment]
    torch._C._cuda_endAllocateToPool = end_allocate_to_pool
    torch._C._cuda_releasePool = lambda device, mempool_id: None
    threading.Thread.run = _thread_run  # type: ignore[assignment, method-assign]
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `Module.to` makes new parameters
    MODE.__enter__()


def _set_guard() -> None:
    packages = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_GUARD)
        given = [f"-I{packages / 'include'}", str(source), f"-L{packages / 'lib'}", "-lc10"]
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", "-o", str(library), *given], check=True)
        ctypes.CDLL(str(library)).set_guard(DEVICES)
