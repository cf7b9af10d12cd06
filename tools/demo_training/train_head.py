"""Train a draft head for a target: what a target's hidden states say of the tokens to come.

    python -m tools.demo_training.train_head --corpus FOLDER --out head.safetensors --minutes 15

Any folder of UTF-8 `.txt` files is a corpus, and any model that the runtime runs is a target; without a name,
the demo's. The head is unrolled along the text: from the second step on its own states take the place of the
target's, as in a draft. At each step its law is drawn towards the target's (distillation).
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
from offload_rt.files import check_writable
from offload_rt.model.draft_head import Head, save_head
from offload_rt.model.loading import DEMO, choose_device, choose_dtype, demo_model, load_model, load_tokenizer
from offload_rt.model.runner import CausalModel
from tools.demo_training.train import autocast, encoded, minutes, optimize, read_corpus, steps_within
from tools.demo_training.windows import WindowSampler, batch

STEPS = 5
"""Steps that a head is unrolled for."""
LATER = 0.8
"""Weight of a step in the loss, as a share of that of the step before."""
SHARE = 0.25
"""Of the positions, those that the loss is taken at: the target's output head costs more than all of ours."""
WINDOWS, LENGTH = 4, 512
"""Of a step of training, and tokens of each."""
EVALUATED = 16
"""Windows, twice as long, on which acceptance is told."""


def new_head(hidden: int) -> Head:
    """A head that leaves the target's state almost as it is, to begin with."""
    head = Head(hidden, 4 * hidden)
    with torch.no_grad():
        head.join.weight[:, hidden:] += torch.eye(hidden)
        head.down.weight.zero_()
    return head


def target_states(target: CausalModel, tokens: Tensor) -> Tensor:
    """The target's hidden states after its last layer, `[windows, tokens, hidden]`."""
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
    """Step by step, the head's states after `tokens` `[windows, tokens]`; `states` are the target's.

    Those of the first step follow the target's own, those of each further step the head's of the step before,
    so that step n has none for the first n tokens.
    """
    embedded = target.embed(tokens.flatten())[0].unflatten(0, tokens.shape)
    for step in range(1, STEPS + 1):
        states = head(embedded[:, step:], states[:, :-1])
        yield states


def log_law(target: CausalModel, states: Tensor) -> Tensor:
    """Log-probabilities of the tokens that follow `states` `[windows, tokens, hidden]`, one row each."""
    return F.log_softmax(target.logits(states.flatten(0, 1)[None]).float(), -1)


def losses(head: Head, target: CausalModel, tokens: Tensor) -> list[Tensor]:
    """KL divergence from the target's law to the head's at each step, in nats, at some of the positions."""
    states = target_states(target, tokens)
    chosen = torch.randperm(tokens.shape[1] - STEPS, device=tokens.device)
    chosen = STEPS + chosen[: max(1, int(SHARE * len(chosen)))]
    with torch.no_grad():
        wanted = log_law(target, states[:, chosen])
    return [
        F.kl_div(log_law(target, guess[:, chosen - step]), wanted, log_target=True, reduction="batchmean")
        for step, guess in enumerate(unrolled(head, target, tokens, states), 1)
    ]


@torch.no_grad()
def acceptance(head: Head, target: CausalModel, windows: Sequence[Tensor]) -> list[float]:
    """Chance that a token drawn by the head is accepted at each step, where those before are the text's."""
    accepted = torch.zeros(STEPS)
    for window in windows:
        states = target_states(target, window[None])
        wanted = log_law(target, states).exp()
        for step, guess in enumerate(unrolled(head, target, window[None], states), 1):
            shared = torch.minimum(log_law(target, guess).exp(), wanted[step:])
            accepted[step - 1] += shared.sum(-1).mean().cpu()
    return (accepted / len(windows)).tolist()


def train(
    head: Head, target: CausalModel, sampler: WindowSampler, steps: Iterable[tuple[int, float]]
) -> None:
    """Trains in place; see `train.optimize` for `steps`."""

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
    add("--eval", type=Path, help="folder of .txt files on which acceptance is told")
    add("--minutes", type=minutes, default=15.0, help="to train for (default: 15)")
    add("--seed", type=int, default=0, help="repeats it (default: 0)")
    add("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args(arguments)
    try:
        check_writable("--out", options.out)
        source = options.model or demo_model("target")
        device = choose_device(options.device)
        loaded = load_model(source, device, choose_dtype("auto", device))
        target = CausalModel(loaded, options.model or DEMO)
        tokenizer = load_tokenizer(source)
        if tokenizer is None:
            raise UsageError(f"--model {source}: has no tokenizer, and a text needs one")
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
