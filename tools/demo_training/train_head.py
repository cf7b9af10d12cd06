"""Trains a draft head, which predicts tokens from the hidden states of a target.

    python -m tools.demo_training.train_head --corpus FOLDER --out head.safetensors --minutes 15

Any folder of UTF-8 `.txt` files is a corpus, and any model that offload-rt runs is a target; the demo's is
the default. The head is unrolled along the text: from the second step on it continues from its own states, as
in a draft. The loss of each step is the distance of its distribution from the target's (distillation).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_rt.errors import UsageError
from offload_rt.machine.devices import choose_device
from offload_rt.model.draft_head import Head, save_head
from offload_rt.model.embedded import DEMO, demo_model
from offload_rt.model.loading import load_model, load_tokenizer
from offload_rt.model.runner import CausalModel
from offload_rt.system.files import check_writable
from tools.demo_training.train import autocast, encoded, minutes, optimize, read_corpus, steps_within
from tools.demo_training.windows import WindowSampler, batch

STEPS = 5
"""Number of steps that a head is unrolled for."""
LATER = 0.8
"""Weight of the loss of each step relative to the step before it."""
SHARE = 0.25
"""Share of the positions at which the loss is computed: the target's output head costs most of a step."""
WINDOWS, LENGTH = 4, 512
"""Windows per training step, and tokens per window."""
EVALUATED = 16
"""Number of windows, twice as long, on which acceptance is measured."""


def new_head(hidden: int) -> Head:
    """Returns a head that is initialized to pass the target's state through almost unchanged."""
    head = Head(hidden, 4 * hidden)
    with torch.no_grad():
        head.join.weight[:, hidden:] += torch.eye(hidden)
        head.down.weight.zero_()
    return head


def target_states(target: CausalModel, tokens: Tensor) -> Tensor:
    """Returns the target's hidden states after its last layer, `[windows, tokens, hidden]`."""
    found: list[Tensor] = []
    body = target.module.model
    hook = body.norm.register_forward_pre_hook(lambda norm, given: found.append(given[0]))
    try:
        with torch.no_grad():
            body(input_ids=tokens, use_cache=False)
    finally:
        hook.remove()
    return found[0]


def unrolled(head: Head, target: CausalModel, tokens: Tensor, states: Tensor) -> Iterator[Tensor]:
    """Yields the head's states of each step, `[windows, tokens - step, hidden]`.

    The first step continues from the target's states, each further one from the head's states of the step
    before. Step n has no state for the first n tokens.

    Args:
        tokens: `[windows, tokens]`.
        states: of the target, `[windows, tokens, hidden]`.
    """
    embedded = target.embed(tokens.flatten())[0].unflatten(0, tokens.shape)
    for step in range(1, STEPS + 1):
        states = head(embedded[:, step:], states[:, :-1])
        yield states


def log_probs(target: CausalModel, states: Tensor) -> Tensor:
    """Returns the log-probabilities of the next token, a row per state of `[windows, tokens, hidden]`."""
    return F.log_softmax(target.logits(states.flatten(0, 1)[None]).float(), -1)


def losses(head: Head, target: CausalModel, tokens: Tensor) -> list[Tensor]:
    """Returns the KL divergence of the head from the target at each step, in nats, at sampled positions."""
    states = target_states(target, tokens)
    chosen = torch.randperm(tokens.shape[1] - STEPS, device=tokens.device)
    chosen = STEPS + chosen[: max(1, int(SHARE * len(chosen)))]
    with torch.no_grad():
        wanted = log_probs(target, states[:, chosen])
    return [
        F.kl_div(log_probs(target, guess[:, chosen - step]), wanted, log_target=True, reduction="batchmean")
        for step, guess in enumerate(unrolled(head, target, tokens, states), 1)
    ]


@torch.no_grad()
def acceptance(head: Head, target: CausalModel, windows: Sequence[Tensor]) -> list[float]:
    """Returns the acceptance rate of tokens drawn by the head at each step, after tokens of the text."""
    accepted = torch.zeros(STEPS)
    for window in windows:
        states = target_states(target, window[None])
        wanted = log_probs(target, states).exp()
        for step, guess in enumerate(unrolled(head, target, window[None], states), 1):
            shared = torch.minimum(log_probs(target, guess).exp(), wanted[step:])
            accepted[step - 1] += shared.sum(-1).mean().cpu()
    return (accepted / len(windows)).tolist()


def train(
    head: Head, target: CausalModel, sampler: WindowSampler, steps: Iterable[tuple[int, float]]
) -> None:
    """Trains the head in place; for `steps` see `train.optimize`."""

    def by_depth(step: int, progress: float) -> dict[str, Tensor]:
        tokens, _ = batch([sampler.draw(LENGTH, 0.0, 0.1) for _ in range(WINDOWS)], target.device)
        with autocast(target.device):
            return {str(depth): loss for depth, loss in enumerate(losses(head, target, tokens), 1)}

    optimize("head", head, head, 4e-3, steps, by_depth, LATER)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_training.train_head",
        description="Train a draft head on a folder of text files.",
    )
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="folder of .txt files")
    add("--out", type=Path, required=True, help="file for the head (.safetensors)")
    add("--model", help="folder or hub id of the target (default: the demo's)")
    add("--eval", type=Path, help="folder of .txt files to measure acceptance on")
    add("--minutes", type=minutes, default=15.0, help="training time (default: 15)")
    add("--seed", type=int, default=0, help="random seed (default: 0)")
    add("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args(arguments)
    try:
        check_writable("--out", options.out)
        source = options.model or demo_model("target")
        device = choose_device(options.device)
        loaded = load_model(source, device, torch.float32 if device.type == "cpu" else None)
        target = CausalModel(loaded, options.model or DEMO)
        tokenizer = load_tokenizer(source)
        if tokenizer is None:
            raise UsageError(f"--model {source}: has no tokenizer; name a model that has one")
        texts = read_corpus(options.corpus)
        others = read_corpus(options.eval) if options.eval else []
    except UsageError as error:
        parser.error(str(error))
    target.module.requires_grad_(False)
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    begin, vocabulary = tokenizer.bos_token_id or 0, len(tokenizer)

    def windows_of(texts: list[str]) -> WindowSampler:
        return WindowSampler(encoded(texts, tokenizer), begin, vocabulary, target.max_positions, generator)

    head = new_head(target.hidden_size).to(target.device)
    train(head, target, windows_of(texts), steps_within(60 * options.minutes))
    save_head(head, target, options.out)
    if others:
        unseen = windows_of(others)
        windows = [unseen.draw(2 * LENGTH, 0.0, 0.0).tokens.to(target.device) for _ in range(EVALUATED)]
        with autocast(target.device):
            shares = (f"{share:.3f}" for share in acceptance(head, target, windows))
            print("acceptance by depth", *shares)
    return 0


if __name__ == "__main__":
    sys.exit(main())
