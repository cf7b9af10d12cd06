"""Contexts on disk: token IDs with their KV, in one safetensors file that is written and read as a stream.

What is stored is what a `KVPrefix` is: the KV by layer in pages as they lie in the store, and the queries
that choose the retrieved cache. Draft models, attention mass and random numbers are not: also in a context
that was never saved, every continuation begins by filling the caches of its drafting levels from tokens and
KV (`TokenSequence.take_prompt`), sums attention mass anew from the last queries, and draws from its own seed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cpu_kv import KVLayout, PlainPages, SequenceKV
from offload_rt.caches.local_history import (
    LocalHistory,
    RecurrentState,
    described_state,
    restored_state,
    state_tensors,
)
from offload_rt.caches.rewind_points import RewindPoint
from offload_rt.caches.target_states import SavedStates
from offload_rt.engine.context_files import KIND, VERSION, ContextFile, Messages
from offload_rt.engine.engine import Engine
from offload_rt.engine.prefix import KVPrefix, usable_length, usable_tokens
from offload_rt.errors import UsageError
from offload_rt.model.fingerprint import Fingerprint
from offload_rt.model.runner import CausalModel
from offload_rt.system.checked_headers import CorruptFile
from offload_rt.system.checked_tensors import CheckedFile, Part, as_bytes, file_bytes, write_checked
from offload_rt.system.files import check_writable, synced
from offload_rt.system.hardware import GIB

PIECE_BYTES = 2**24
"""Bytes about which a checksum is taken."""

Progress = Callable[[str, int, int], object] | None


def save_prefix(
    path: Path,
    prefix: KVPrefix,
    fingerprint: Fingerprint,
    messages: Messages = None,
    on_progress: Progress = None,
    *,
    date: datetime | None = None,
) -> None:
    """Saves a prefix as a whole or not at all. Other threads may use the engine meanwhile.

    Args:
        messages: the chat messages that its tokens stand for.
        on_progress: called with "save", and bytes done and all.
        date: when the messages were rendered; see `Context.date`.

    Raises:
        UsageError: the file cannot be written, there is no room on the disk, or the LLM is closed meanwhile.
    """
    path = Path(os.path.realpath(path))  # what a link names is replaced, not the link
    check_writable("session", path)
    if path.exists() and not path.is_file():
        raise UsageError(f"session {path}: is a pipe or a device; name a file")
    kv, layout = prefix.kv, prefix.kv.layout
    whole = kv.length // layout.page_size * layout.page_size
    parts = [Part.of("tokens", torch.tensor(list(prefix.tokens), dtype=torch.int32))]
    for at, point in enumerate(prefix.points):
        parts += [Part.of(name, tensor) for name, tensor in _point_tensors(at, point).items()]
    states = prefix.states
    if states is not None:
        parts += [Part.of("states.sinks", states.sinks), Part.of("states.newest", states.newest)]
    parts.append(Part.of("tail", _tail(kv, whole)))
    unpacked = dict[int, list[int]]()  # by layer: pages that are not packed though others are
    for layer in range(layout.layers):
        shape, dtype = layout.slab_shape(whole // layout.page_size)
        parts.append(Part(f"pages.{layer}", dtype, shape, _Pages(kv, layer)))
        if unpacked_pages := [(at, pages) for at, _, pages in kv.forms(layer, 0, whole) if pages is not None]:
            unpacked[layer] = [at // layout.page_size for at, _ in unpacked_pages]
            parts.append(Part.of(f"unpacked.{layer}", torch.cat([pages for _, pages in unpacked_pages])))
    about = {
        "kind": KIND,
        "version": str(VERSION if layout.packed else 1),
        "code": "packed" if layout.packed else "raw",
        "unpacked": json.dumps(unpacked),
        "model": prefix.target.name,
        "fingerprint": fingerprint.to_json(),
        "page_size": str(layout.page_size),
        "reads": json.dumps([point.length for point in prefix.points]),
        "local": json.dumps([_described(point) for point in prefix.points]),
        "messages": json.dumps(messages),
        "date": "" if date is None else date.isoformat(),
        "states": "" if states is None else json.dumps({"head": states.head, "start": states.start}),
    }
    piece = max(1, PIECE_BYTES // layout.page_bytes) * layout.page_bytes
    try:
        needed, free = file_bytes(parts, about, piece), shutil.disk_usage(path.parent).free
        if needed > free:
            raise UsageError(
                f"session {path}: needs {needed / GIB:.2f} GiB, but {free / GIB:.2f} GiB are free there;"
                " free up space, or name another folder"
            )
        with synced(path) as file:
            write_checked(file, parts, about, piece, _report(on_progress, "save"))
    except OSError as error:
        raise UsageError(
            f"session {path}: cannot be saved ({error.strerror}); free up space, or name another folder"
        ) from None
    except RuntimeError as error:  # of the store
        raise UsageError(f"session {path}: was not saved, as {error}") from error


def _report(on_progress: Progress, phase: str) -> Callable[[int, int], object]:
    return lambda done, total: None if on_progress is None else on_progress(phase, done, total)


def _point_tensors(at: int, point: RewindPoint) -> dict[str, Tensor]:
    """Returns the tensors of a point that the sequence can return to, by their names in the file."""
    tensors = {} if point.queries is None else {f"queries.{at}": point.queries}
    if point.local is not None:
        tensors |= {
            f"window.{at}.{layer}": window.kv.contiguous() for layer, window in point.local.windows.items()
        }
        for layer, state in point.local.states.items():
            named = state_tensors(state.state).items()
            tensors |= {f"state.{at}.{layer}.{name}": tensor.contiguous() for name, tensor in named}
    return tensors


def _described(point: RewindPoint) -> dict[str, Any] | None:
    """Returns what a point is beside its tensors; None: queries alone."""
    if point.local is None:
        return None
    states = {
        layer: {"tensors": list(state_tensors(state.state)), "values": described_state(state.state)}
        for layer, state in point.local.states.items()
    }
    return {"queries": point.queries is not None, "states": states}


class _Pages:
    """The memory of whole pages of a layer, as `checked_tensors.Places`."""

    def __init__(self, kv: SequenceKV, layer: int) -> None:
        self._kv, self._layer = kv, layer

    def __call__(self, start: int, end: int) -> list[Tensor]:
        page = self._kv.layout.page_bytes
        first, last = (at // page * self._kv.layout.page_size for at in (start, end))
        return [as_bytes(piece) for piece in self._kv.memory(self._layer, first, last)]


def _tail(kv: SequenceKV, start: int) -> Tensor:
    """Returns the tokens from `start` on, less than a page, `[layers, 2, kv_heads, tokens, head_dim]`."""
    layout, count = kv.layout, kv.length - start
    tail = torch.empty(layout.layers, 2, layout.kv_heads, count, layout.head_dim, dtype=layout.dtype)
    for layer, places in enumerate(tail if count else ()):
        (pages,) = kv.views(layer, start, kv.length)
        pages.copy_to(*places)
    return tail


class SavedContext(ContextFile):
    """A file of `save_prefix`, open for loading its KV, too."""

    _file: CheckedFile
    _opens = CheckedFile

    def _read_header(self) -> None:
        super()._read_header()
        sizes = self._sizes
        dtype, _ = self._file.kind("tail")
        shape = sizes.layers, sizes.kv_heads, sizes.head_dim
        self._layout = KVLayout(*shape, dtype, sizes.page_size, sizes.packed)

    def begins(self, tokens: Sequence[int]) -> int:
        """Returns with how many tokens of the context a sequence of `tokens` may begin."""
        local = any(local_state is not None for local_state in self._described)
        return usable_tokens(self._lengths if local else None, self._length, self.tokens, tokens)

    def check(self, fingerprint: Fingerprint) -> None:
        """Raises UsageError where a model cannot go on from this context; names what differs."""
        if different := fingerprint.difference(self.fingerprint):
            raise UsageError(
                f"session {self.path}: was saved by {different}; the model was {self.model}: use it as it was"
                " then, or read the text again"
            )

    def load(
        self, engine: Engine, target: CausalModel, tokens: int, on_progress: Progress = None
    ) -> KVPrefix:
        """Loads the first tokens with their KV into the engine's store; the engine's lock is held.

        Args:
            target: the runner for the sequence that will begin with them, whose fingerprint was checked.
            tokens: how many.
            on_progress: called with "load", and bytes done and all.

        Raises:
            UsageError: the file is corrupt.
            MemoryError: memory is short.
        """
        prompt = self.tokens[:tokens]
        kv = engine.store.new_sequence()
        try:
            with self._errors_in_a_line():
                verified = min(self._length, max(0, len(prompt) - 1))
                points = self._points(target, verified)
                length = usable_length(
                    [point.length for point in points] if target.kinds.local else None, verified
                )
                kv.reserve(length)
                self._load_kv(kv, length, on_progress)
                states = self._states()
            return KVPrefix(prompt, kv, points, target, engine.lock, states)
        except BaseException:
            kv.close()
            raise

    def _states(self) -> SavedStates | None:
        """Returns the states that a draft head continues from; None: there are none in the file."""
        if not (stated := self._file.about.get("states")):
            return None
        try:
            about = json.loads(stated)
            sinks, newest = (self._file.tensor(f"states.{part}") for part in ("sinks", "newest"))
            if sinks.dim() != 2 or newest.dim() != 2 or sinks.shape[1] != newest.shape[1]:
                raise ValueError("of another shape")
            return SavedStates(str(about["head"]), sinks, int(about["start"]), newest)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CorruptFile("its states for a draft head cannot be read") from None

    def _points(self, target: CausalModel, length: int) -> list[RewindPoint]:
        """Returns the lengths up to `length` that the sequence can return to."""
        points = []
        try:
            for at, (end, described) in enumerate(zip(self._lengths, self._described, strict=True)):
                if not 0 < end <= length:  # to no token it can return without a point
                    continue
                queries, local = None, None
                if described is None or described["queries"]:
                    queries = self._file.tensor(f"queries.{at}")
                if target.kinds.local:
                    local = replace(self._local(target, at, described["states"]), length=end)
                points.append(RewindPoint(end, queries, local))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise CorruptFile("its recurrent states cannot be read") from None
        return points

    def _local(self, target: CausalModel, at: int, described: Mapping[str, Any]) -> LocalHistory:
        """Returns what the local layers of `target` kept at a point."""
        windows, states = {}, {}
        for layer, empty in target.local_layers.start().windows.items():
            kv = self._file.tensor(f"window.{at}.{layer}")
            if (
                kv.dtype != target.dtype
                or kv.shape[:2] + kv.shape[3:] != empty.kv.shape[:2] + empty.kv.shape[3:]
            ):
                raise CorruptFile("its sliding windows have another layout than its model")
            windows[layer] = empty.holding(kv)
        if sorted(map(int, described)) != list(target.kinds.recurrent):
            raise CorruptFile("its recurrent states are of other layers than its model's")
        carrier = target.local_layers.carrier() if described else None
        for name, state in described.items():
            tensors = {key: self._file.tensor(f"state.{at}.{name}.{key}") for key in state["tensors"]}
            assert carrier is not None
            restored = restored_state(carrier.layers[int(name)], state["values"], tensors)
            states[int(name)] = RecurrentState(restored)
        return LocalHistory(windows=windows, states=states)

    def _load_kv(self, kv: SequenceKV, length: int, on_progress: Progress) -> None:
        layout, file_layout = kv.layout, self._layout
        in_pages = min(length, self._in_pages)
        size = file_layout.pages(in_pages) * file_layout.page_bytes  # of a layer
        loaded, total, report = 0, layout.layers * size, _report(on_progress, "load")
        for layer in range(layout.layers):
            unpacked = self._unpacked_pages(layer)
            if file_layout == layout:
                for end, _ in self._file.fill(f"pages.{layer}", size, _Pages(kv, layer)):
                    report(loaded + end, total)
                for page, values in unpacked.items():
                    if page < layout.pages(in_pages):
                        kv.open_page(layer, page * layout.page_size).copy_(values)
                kv.advance(layer, in_pages)
            else:
                for end, (memory,) in self._file.fill(f"pages.{layer}", size, _new_memory):
                    first = (end - len(memory)) // file_layout.page_bytes
                    _append(kv, layer, _unpacked(kv, file_layout, memory, first, unpacked), in_pages)
                    report(loaded + end, total)
            loaded += size
        if length > in_pages:
            for layer, (keys, values) in enumerate(self._file.tensor("tail")[:, :, :, : length - in_pages]):
                kv.append(layer, keys, values)

    def _unpacked_pages(self, layer: int) -> dict[int, Tensor]:
        """Returns the pages of a layer that are not packed though others are, by their numbers."""
        if layer not in self._unpacked:
            return {}
        return dict(zip(self._unpacked[layer], self._file.tensor(f"unpacked.{layer}").split(1), strict=True))


def _new_memory(start: int, end: int) -> list[Tensor]:
    return [torch.empty(end - start, dtype=torch.uint8)]


def _unpacked(
    kv: SequenceKV, layout: KVLayout, memory: Tensor, first: int, unpacked: Mapping[int, Tensor]
) -> Tensor:
    """Returns pages that were read from a file, from page `first` of a layer on, as they are on a device."""
    if not layout.packed:
        return memory.view(layout.dtype).view(layout.pages_shape(-1))
    packed = memory.view(-1, layout.page_bytes)
    pages = torch.empty(layout.pages_shape(len(packed)), dtype=layout.dtype)
    kv.codec.decode(layout.packed_shape, packed, pages)
    for page in unpacked.keys() & range(first, first + len(pages)):
        pages[page - first] = unpacked[page][0]
    return pages


def _append(kv: SequenceKV, layer: int, pages: Tensor, end: int) -> None:
    """Appends pages of another size to a layer, up to a length of `end` tokens."""
    missing = end - kv.layer_length(layer)
    view = PlainPages.of(pages)
    kv.append(layer, *view.head_major(0, min(missing, view.tokens)))
