"""Models and texts, as studies measure them; and a text in a full cache, read outside of any decoding."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from bench import inputs
from bench.inputs import Models, say
from cpu_kv import CpuLink, CudaLink, Link, PagedKVStore, TransferEngine
from offload_rt.attention import choose_backend
from offload_rt.caches.base import Cache, NewTokens
from offload_rt.caches.full import FullCache
from offload_rt.config import Config, load_config
from offload_rt.errors import UsageError
from offload_rt.model import CausalModel
from offload_rt.parts import Part
from offload_rt.prefill import prefill
from offload_rt.text import encode

READ_ON = ("acceptance", "policies")
"""Parts of studies that go on behind the context."""


class ContextReader(AbstractContextManager["ContextReader"]):
    """Holds the KV of one text.

    Args:
        config: its chunks are summarised, its store and prefill used.
        room: tokens to reserve memory for.

    Attributes:
        tokens: those that were read.
    """

    def __init__(self, model: CausalModel, config: Config, room: int) -> None:
        self.model, self.config, self.room = model, config, room
        self.tokens: Sequence[int] = ()
        self.backend = choose_backend(model.device)
        on_gpu = model.device.type == "cuda"
        self._link: Link = CudaLink(model.device) if on_gpu else CpuLink()
        self._store = PagedKVStore(model.kv_layout(config.store.page), pin=on_gpu)
        self._sequence = self._store.new_sequence(config.retrieval.chunk, page_means=True)
        self._sequence.reserve(room)
        self._engine = TransferEngine(
            self._sequence,
            self._link,
            segment_tokens=config.store.segment_tokens,
            ring_buffers=config.store.ring_buffers,
        )
        self.full = FullCache(self._engine, model.heads, self.backend)

    def read(self, tokens: Sequence[int], *, outputs: bool = False) -> Tensor | None:
        """Takes `tokens` into the empty cache; with `outputs`, returns the last layer's hidden states."""
        self.tokens = tokens
        return prefill(self.model, self.full, tokens, self.config.prefill.chunk, outputs=outputs)

    def logits(self, cache: Cache, tokens: Sequence[int], rows: int) -> Tensor:
        """Logits `[rows, vocabulary]` after the last `rows` of `tokens`, which follow what is in `cache`.

        The pass is pending in the cache: commit it or leave it.
        """
        new = NewTokens.below(cache.held, range(-1, len(tokens) - 1), tokens)
        return self.model.forward([Part(cache, new, rows)])[0].logits

    def __exit__(self, *_: object) -> None:
        """Gives the KV back."""
        self.full.abandon()
        self._engine.close()
        self._store.close()
        self._link.close()


def add_arguments(parser: argparse.ArgumentParser, *, draft: bool) -> None:
    """Adds the arguments that name models and texts."""
    inputs.add_arguments(parser, draft=draft)
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="UTF-8; may be repeated")


@dataclass(frozen=True)
class Texts:
    """What the parts of a study read.

    Attributes:
        books: tokens of each text, by name.
        sizes: of the study; each text has `context` tokens, and `positions` more where a part needs them.
    """

    models: Models
    books: dict[str, list[int]]
    sizes: Any
    arguments: argparse.Namespace

    @classmethod
    def opened(cls, arguments: argparse.Namespace, sizes: Any) -> Self:
        """
        Raises:
            UsageError: there is no such model or text, or a text is too short.
        """
        texts, models = inputs.read_texts(arguments.text), inputs.load(arguments)
        books = {name: encode(models.tokenizer, text) for name, text in texts}
        needed = sizes.context + sizes.positions * any(part in READ_ON for part in arguments.parts)
        for name, tokens in books.items():
            if len(tokens) < needed:
                said = f"has {len(tokens)} tokens, and {needed} are needed"
                raise UsageError(f"text {name}: {said}; leave it out, or use a shorter --context")
        return cls(models, books, sizes, arguments)

    @property
    def device(self) -> torch.device:
        return self.models.target.device

    @property
    def settings(self) -> dict[str, Any]:
        dtype = str(self.models.target.dtype).removeprefix("torch.")
        return {"model": self.models.names[0], "dtype": dtype, "texts": list(self.books)}

    @property
    def config(self) -> Config:
        """Of what is read outside of any decoding."""
        return load_config("retrieval", dict(self.arguments.overrides))

    @property
    def alphabet(self) -> list[int]:
        """Token ids that passages may be drawn from."""
        special = set(self.models.tokenizer.all_special_ids)
        vocabulary = self.models.target.config.get_text_config().vocab_size
        return [token for token in range(vocabulary) if token not in special]

    @contextmanager
    def reader(self, what: str, room: int) -> Iterator[ContextReader]:
        """A full cache of the target's with room for so many tokens."""
        say(what)
        model = CausalModel(self.models.target, self.models.names[0])
        with ContextReader(model, self.config, room) as reader:
            yield reader
        inputs.free(self.device)
