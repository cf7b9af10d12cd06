"""Models and texts, as studies measure them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from bench import inputs
from bench.context import ContextReader
from bench.inputs import Models, say
from offload_rt.config import Config, load_config
from offload_rt.errors import UsageError
from offload_rt.model import CausalModel
from offload_rt.text import encode


def add_arguments(parser: argparse.ArgumentParser, *, draft: bool) -> None:
    """Adds the arguments that name models and texts."""
    inputs.add_arguments(parser, draft=draft)
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="UTF-8; may be repeated")


@dataclass(frozen=True)
class Texts:
    """What the parts of a study read.

    Attributes:
        books: tokens of each text, by name.
        sizes: of the study; each text has `context` tokens, and `positions` more to go on with.
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
        needed = sizes.context + sizes.positions
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
