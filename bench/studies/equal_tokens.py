"""`python -m bench tokens`: greedy tokens beside those of transformers' own `generate`, on real text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from bench import arguments as args
from bench.results import Row
from bench.studies.continued import Continued
from bench.studies.study import Part, Study
from offload_rt.api.llm import LLM
from offload_rt.sampling.params import SamplingParams
from offload_rt.text.tokenize import common_beginning


@dataclass(frozen=True)
class Sizes:
    """Sizes of `tokens`.

    Attributes:
        context: tokens of a passage, which is the prompt.
        passages: number of passages of each text, evenly spaced.
        new_tokens: tokens that follow a passage.
    """

    context: int = 2000
    passages: int = 5
    new_tokens: int = 200
    positions: int = 0  # behind the context, see `Texts`


def greedy(study: Continued) -> Iterator[Row]:
    """Greedy tokens beside those of transformers.

    `equal`: how many tokens come before the first one that differs. `gap`: there, how far transformers' two
    largest logits are apart; sums in another order move logits by about `rounding`, the largest difference
    of transformers' own logits when it computes the passage at once instead of token by token.
    """
    sizes, config = study.sizes, "retrieval" if study.draft is None else "triforce"
    params = SamplingParams(max_tokens=sizes.new_tokens, ignore_eos=True)
    with LLM.from_models(study.target, study.draft, study.tokenizer, config, study.keys()) as llm:
        for name, tokens in study.books.items():
            room = len(tokens) - sizes.context
            for number in range(sizes.passages):
                start = room * number // max(1, sizes.passages - 1)
                prompt = tokens[start : start + sizes.context]
                args.say(f"{name}: passage {number + 1} of {sizes.passages}")
                reference, rounding = own_tokens(study, prompt)
                row: Row = {"text": name, "start": start, "tokens": len(reference), "rounding": rounding}
                with llm.read(prompt, sizes.new_tokens) as context:
                    for system in ("plain", config):
                        continuation = context.generate((), params, config=system).tokens
                        context.rewind(len(prompt))
                        equal = common_beginning(reference, continuation)
                        row[f"{system} equal"] = equal
                        differ = equal < len(reference)
                        row[f"{system} gap"] = gap(study, [*prompt, *reference[:equal]]) if differ else ""
                yield row


def own_tokens(study: Continued, prompt: Sequence[int]) -> tuple[list[int], float]:
    """What transformers writes behind a prompt, and how far its own logits differ by the order of sums."""
    ids, target = torch.tensor([prompt], device=study.device), cast(Any, study.target)
    with torch.inference_mode():
        generated = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=study.sizes.new_tokens,
            min_new_tokens=study.sizes.new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens: list[int] = generated.sequences[0, len(prompt) :].tolist()
        steps = torch.stack([step[0] for step in generated.logits])
        at_once = target(generated.sequences[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    return tokens, float((steps - at_once).abs().max())


def gap(study: Continued, tokens: Sequence[int]) -> float:
    """How far transformers' two largest logits behind these tokens are apart."""
    with torch.inference_mode():
        logits = study.target(torch.tensor([tokens], device=study.device), use_cache=False).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the study's own."""
    args.add_models(parser)
    args.add_numbers(
        parser,
        Sizes,
        ("context", int, 16, "tokens of a passage"),
        ("passages", int, 1, "passages of each text"),
    )
    about = f"tokens that follow a passage (default: {Sizes.new_tokens})"
    parser.add_argument("--new-tokens", type=args.number(int, 1), metavar="N", help=about)


STUDY = Study(
    note="""Greedy decoding in the model's precision. transformers runs the same weights, with its own
    attention and cache.""",
    sizes=Sizes(),
    quick={"passages": 2, "new_tokens": 40},
    minutes=(10, 1),
    opened=Continued.opened,
    parts={"greedy": Part(greedy)},
    options=options,
)
