"""Models and texts for studies, and a text in a full cache outside of any decoding."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench import arguments as args
from bench.arguments import say
from cpu_kv import CpuLink, CudaLink, ElementType, Link, PagedKVStore
from cpu_kv.sizes import dtype_name
from offload_rt.attention.selector import choose_backend
from offload_rt.caches.sizes import EVERYTHING_STREAMED
from offload_rt.config.schema import Config
from offload_rt.drafting.base import TokenView
from offload_rt.drafting.levels.configs import load_config
from offload_rt.drafting.resources import SharedResources
from offload_rt.drafting.verifier import Sampling, Verifier
from offload_rt.engine.sequence import Continuation, TokenSequence
from offload_rt.errors import UsageError
from offload_rt.machine.devices import choose_device, choose_dtype
from offload_rt.model.checkpoint_config import model_config
from offload_rt.model.config_shapes import shape_of
from offload_rt.model.loading import load_model, load_tokenizer
from offload_rt.model.passes import PassOutput
from offload_rt.model.runner import CausalModel
from offload_rt.planning.request import PlanRequest
from offload_rt.planning.sequence_planner import SequencePlan
from offload_rt.sampling.sampler import GeneratorDraws, Sampler
from offload_rt.system.hardware import NO_GPU, named_hardware
from offload_rt.text.tokenize import encode

READ_ON = ("acceptance", "policies", "layers")
"""Parts of studies that read text behind the context too."""


@contextmanager
def sequence_over(target: CausalModel, config: Config, tokens: int, room: int = 0) -> Iterator[TokenSequence]:
    """Opens an empty sequence for `tokens` tokens, with room for `room` more.

    Where `config` retrieves, the sequence keeps whatever any small cache may choose chunks by.
    """
    device, on_gpu = target.device, target.device.type == "cuda"
    config = config.having("retrieval.select", "mean_keys").having("retrieval.rest", True)
    link: Link = CudaLink(device) if on_gpu else CpuLink()
    with closing(link), closing(PagedKVStore(target.kv_layout(config.store.page), pin=on_gpu)) as store:
        resources = SharedResources(target, None, store, link, choose_backend(device))
        runner = target.for_length(tokens, room)
        shape = shape_of(target.module, ElementType.of(target.dtype), target.name)
        request = PlanRequest(shape, None, config, max(1, tokens), room, named_hardware(NO_GPU))
        plan = SequencePlan.of(request, EVERYTHING_STREAMED)
        with closing(TokenSequence(resources, plan, runner, tokens + room + 1)) as sequence:
            yield sequence


def take(sequence: TokenSequence, tokens: Sequence[int]) -> None:
    """Reads all `tokens` into the full cache, and fills the small caches of the sequence's config."""
    sequence.prefill([*tokens, 0])  # a sequence's last token opens the first round and is not in the cache
    recompose(sequence, sequence.plan.config)


def recompose(sequence: TokenSequence, config: Config) -> None:
    """Fills the small caches of `config` from the full cache as it is."""
    room = sequence.full.sequence.reserved_tokens - len(sequence.tokens)
    sampling = Sampling(Sampler(), GeneratorDraws(0, sequence.full.device))
    sequence.begin(sequence.plan.adapted(config), Continuation(sampling, max(1, room)))


def passed(verifier: Verifier, tokens: Sequence[int], rows: int, *, states: bool = False) -> PassOutput:
    """Passes `tokens` behind all that the verifier's cache holds; returns the output after the last `rows`.

    The new KV is pending in the cache: commit or drop it.
    """
    parents = range(-1, len(tokens) - 1)
    forward = verifier.forward(TokenView([]), parents, tokens, rows=rows, states=states)
    return forward.model.forward([forward.input], forward.order)[0]


@dataclass(frozen=True)
class Texts:
    """Models and tokenized texts that the parts of a study read.

    Attributes:
        name: of the target.
        books: tokens of each text, by name.
        sizes: of the study; each text has `context` tokens, and `positions` more where a part needs them.
    """

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    name: str
    books: dict[str, list[int]]
    sizes: Any
    arguments: argparse.Namespace

    @classmethod
    def opened(cls, arguments: argparse.Namespace, sizes: Any) -> Self:
        """Loads the models and texts that the arguments name.

        Raises:
            UsageError: there is no such model or text, the model has no tokenizer, or a text is too short.
        """
        texts, device = args.read_texts(arguments.text), choose_device(arguments.device)
        source, draft_source = args.sources(arguments)
        target = load_model(
            source, device, choose_dtype(arguments.dtype or "float32", device, model_config(source).dtype)
        )
        draft = None if draft_source is None else load_model(draft_source, device, target.dtype)
        tokenizer = load_tokenizer(source)
        if tokenizer is None:
            raise UsageError(f"model {source} has no tokenizer, and a text needs one")
        books = {name: encode(tokenizer, text) for name, text in texts.items()}
        least = sizes.context + sizes.positions * any(part in READ_ON for part in arguments.parts)
        for name, tokens in books.items():
            if len(tokens) < least:
                message = f"has {len(tokens)} tokens, and {least} are needed"
                raise UsageError(f"text {name}: {message}; leave it out, or use a shorter --context")
        return cls(target, draft, tokenizer, args.recorded_name(source), books, sizes, arguments)

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def settings(self) -> dict[str, Any]:
        dtype = dtype_name(self.target.dtype)
        overrides = {key: str(value) for key, value in self.arguments.overrides}
        return {"model": self.name, "dtype": dtype, "texts": list(self.books), "overrides": overrides}

    @property
    def alphabet(self) -> list[int]:
        """Token IDs that random passages are drawn from."""
        special = set(self.tokenizer.all_special_ids)
        vocabulary = self.target.config.get_text_config().vocab_size
        return [token for token in range(vocabulary) if token not in special]

    def config(self, name: str) -> Config:
        """A configuration with the keys of the command line."""
        return load_config(name, dict(self.arguments.overrides))

    @contextmanager
    def sequence(
        self, purpose: str, tokens: Sequence[int], room: int = 0, config: str = "plain"
    ) -> Iterator[TokenSequence]:
        """Opens a sequence for `tokens`; see `sequence_over`."""
        say(purpose)
        target = CausalModel(self.target, self.name, planes=self.target.dtype == torch.bfloat16)
        with sequence_over(target, self.config(config), len(tokens), room) as sequence:
            yield sequence
        gc.collect()  # what transformers holds in cycles
        torch.cuda.empty_cache()
