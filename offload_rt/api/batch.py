"""Continues a list of prompts, or of contexts, as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextlib import closing as closed_at_end
from dataclasses import replace
from itertools import pairwise
from typing import Any

from offload_rt.api.context import Context, TokenStream
from offload_rt.api.frontend import Frontend, Prompt
from offload_rt.caches.selection import LAST_QUERIES
from offload_rt.engine.engine import Engine
from offload_rt.engine.output import OutputProcessor, finish
from offload_rt.engine.prefix import KVPrefix
from offload_rt.engine.results import GenerationResult
from offload_rt.errors import UsageError
from offload_rt.model.runner import CausalModel
from offload_rt.planning.request import check_positions
from offload_rt.sampling.params import SamplingParams
from offload_rt.text.tokenize import common_beginning


def generate_batch(
    llm: Frontend,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    changes: Mapping[str, Any],
) -> list[GenerationResult]:
    """Continues prompts together; returns a result for each, in their order.

    Args:
        params: for all prompts, or one for each.
        changes: fields of `SamplingParams` with other values than in `params`.

    Raises:
        UsageError: a prompt or its parameters are not valid, or there is no room for all; names the prompt.
    """
    params_of = _one_each(params, len(prompts))
    engine = llm.engine
    token_lists, checked_params, sizes = list[list[int]](), list[SamplingParams](), list[tuple[int, int]]()
    for at, prompt in enumerate(prompts):
        with _named(at):
            checked_params.append(llm.checked_params(params_of[at], changes).seeded())
            token_lists.append(llm.prompt_ids(prompt, tools=checked_params[at].tools))
            sizes.append((len(token_lists[at]), checked_params[at].max_tokens))
            check_positions(engine.target, *sizes[at])
    with engine.lock, ExitStack() as closing:
        engine.check_room(sizes, 0 if engine.target.kinds.local else _shared_tokens(token_lists, engine))
        outputs_by_number: dict[int, OutputProcessor] = {}
        prefixes: list[KVPrefix] = []  # of the prompts that were opened, whose beginnings the others share
        # The shortest first, so that the rest of its share of a GPU's memory is left to the longer ones.
        for at in sorted(range(len(sizes)), key=lambda at: sum(sizes[at])):
            remaining = len(sizes) - len(outputs_by_number)
            runner = engine.target.for_length(*sizes[at])
            best = _longest(prefixes, token_lists[at], runner)
            with _named(at):
                sequence = engine.open(
                    token_lists[at], checked_params[at].max_tokens, sequences=remaining, prefix=best
                )
            closing.callback(engine.close_sequence, sequence)
            if remaining > 1:
                prefixes.append(closing.enter_context(engine.snapshot(sequence)))
            engine.begin(sequence, sequence.plan, llm.continuation(checked_params[at], token_lists[at]))
            outputs_by_number[at] = llm.output(sequence, checked_params[at], 0)
        outputs = [outputs_by_number[at] for at in range(len(sizes))]
        finish(engine, outputs)
        return [output.result() for output in outputs]


def continue_batch(
    llm: Frontend,
    contexts: Sequence[Context],
    prompts: Sequence[Prompt] | None,
    params: SamplingParams | Sequence[SamplingParams],
    changes: Mapping[str, Any],
) -> list[GenerationResult]:
    """Continues contexts together; returns a result for each, in their order. See `LLM.generate_from`."""
    params_of = _one_each(params, len(contexts))
    if prompts is not None and len(prompts) != len(contexts):
        raise UsageError(f"{len(contexts)} contexts but {len(prompts)} prompts: give one for each")
    if len({id(context) for context in contexts}) < len(contexts):
        raise UsageError("a context is in the batch twice: give a fork of it")
    if any(context.llm is not llm for context in contexts):
        raise UsageError("a context of the batch belongs to another LLM: pass contexts of this LLM")
    with llm.engine.lock, ExitStack() as closing:
        streams = list[TokenStream]()
        for at, context in enumerate(contexts):
            with _named(at):
                stream = context.stream(() if prompts is None else prompts[at], params_of[at], **changes)
            streams.append(closing.enter_context(closed_at_end(stream)))
        finish(llm.engine, [stream.output for stream in streams])
    return [stream.result for stream in streams if stream.result is not None]


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Returns the parameters of each member of a batch."""
    params_of = list(params) if isinstance(params, Sequence) else [params] * count
    if len(params_of) != count:
        raise UsageError(f"{count} prompts but {len(params_of)} parameters: give one for each")
    return params_of


def _longest(prefixes: Sequence[KVPrefix], tokens: list[int], target: CausalModel) -> KVPrefix | None:
    """Returns the one of several prefixes that has the most of a prompt; None: there is none.

    The last tokens are left to the prompt, as their queries choose what is retrieved for drafts, on which
    depends what a seed samples.
    """
    limit = max(0, len(tokens) - LAST_QUERIES)
    usable = [
        prefix if prefix.tokens == tokens else replace(prefix, tokens=prefix.tokens[:limit])
        for prefix in prefixes
    ]
    return max(usable, key=lambda prefix: prefix.begins(tokens, target), default=None)


def _shared_tokens(prompts: Sequence[list[int]], engine: Engine) -> int:
    """Returns for how many tokens of prompts others have the KV, in whole pages."""
    page, ordered = engine.store.layout.page_size, sorted(prompts)  # neighbours begin alike the longest
    common = (common_beginning(first, second) for first, second in pairwise(ordered))
    return sum(max(0, tokens - 1) // page * page for tokens in common)


@contextmanager
def _named(at: int) -> Iterator[None]:
    """Begins the message of a UsageError with the number of the prompt that it is about."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"prompt {at} of the batch: {error}") from error
