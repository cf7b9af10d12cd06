"""Continues a list of prompts as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from offload_rt.context import Host, Prompt
from offload_rt.errors import UsageError
from offload_rt.output import OutputProcessor, finish
from offload_rt.planning.placement import check_positions
from offload_rt.results import GenerationResult, SamplingParams


def generate_batch(
    llm: Host,
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
    given = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    if len(given) != len(prompts):
        raise UsageError(f"{len(prompts)} prompts but {len(given)} parameters: give one for each")
    engine = llm.engine
    checked, wanted, sizes = list[list[int]](), list[SamplingParams](), list[tuple[int, int]]()
    for at, prompt in enumerate(prompts):
        with _named(at):
            wanted.append(llm.checked_params(given[at], changes).seeded())
            checked.append(llm.prompt_ids(prompt))
            sizes.append((len(checked[at]), wanted[at].max_tokens))
            check_positions(engine.target, *sizes[at])
    with engine.lock, ExitStack() as closing:
        engine.check_room(sizes)
        opened: dict[int, OutputProcessor] = {}
        # The shortest first, so that the rest of its share of a GPU's memory is left to the longer ones.
        for at in sorted(range(len(sizes)), key=lambda at: sum(sizes[at])):
            left = len(sizes) - len(opened)
            with _named(at):
                sequence = engine.open(checked[at], wanted[at].max_tokens, sequences=left)
            closing.callback(engine.close_sequence, sequence)
            engine.begin(sequence, None, llm.continuation(wanted[at], checked[at]))
            opened[at] = llm.output(sequence, wanted[at], 0)
        outputs = [opened[at] for at in range(len(sizes))]
        finish(engine, outputs)
        return [output.result() for output in outputs]


@contextmanager
def _named(at: int) -> Iterator[None]:
    """Begins the message of a UsageError with the number of the prompt that it is about."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"prompt {at} of the batch: {error}") from error
