"""Trains a draft head of EAGLE-3, which predicts tokens from the hidden states of a target.

    python -m tools.demo_training.train_head --corpus FOLDER --out FOLDER --minutes 15

Any folder of UTF-8 `.txt` files is a corpus, and any model that offload-rt runs is a target; the demo's is
the default. The head is unrolled along the text: from the second step on it continues from its own states, as
in a draft (training-time test, arXiv 2503.01840). The loss of each step is the distance of its distribution
from the target's (distillation). It is written in SpecForge's format, which other programs read too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from offload_rt.attention.sums import Softmax
from offload_rt.errors import UsageError
from offload_rt.machine.devices import choose_device
from offload_rt.model.draft_head import Eagle3Head, default_taps
from offload_rt.model.embedded import DEMO, demo_model
from offload_rt.model.head_config import ARCHITECTURE
from offload_rt.model.head_files import load_head
from offload_rt.model.loading import load_model, load_tokenizer
from offload_rt.model.runner import CausalModel
from offload_rt.system.files import check_new
from tools.demo_training.train import autocast, encoded, minutes, optimize, read_corpus, steps_within
from tools.demo_training.windows import WindowSampler, batch

STEPS = 5
"""Number of steps that a head is unrolled for."""
RATE = 4e-3
"""Peak learning rate of a new head; half of it for one that is trained on."""
LATER = 0.8
"""Weight of the loss of each step relative to the step before it."""
SHARE = 0.25
"""Share of the positions at which the loss is computed: output heads cost most of a step."""
WINDOWS, LENGTH = 4, 512
"""Windows per training step, and tokens per window."""
COPIES = 0.1
"""Share of windows that repeat passages."""
EVALUATED = 16
"""Number of windows, twice as long, on which acceptance is measured."""
FEWEST_LAYERS = 8
"""A target with fewer layers gives the states after its first, its middle and its last layer."""


def taps_of(target: CausalModel) -> tuple[int, ...]:
    """Returns the layers whose inputs a new head takes; see `StateTap.layers`."""
    layers = target.layers
    return (1, layers // 2, layers) if layers < FEWEST_LAYERS else default_taps(layers)


def new_head(target: CausalModel, drafted: Tensor) -> Eagle3Head:
    """Returns a head with one layer of the target's sizes.

    Args:
        drafted: IDs of the tokens that it can predict, rising.
    """
    shape = target.module.config.get_text_config()
    config: Any = LlamaConfig(
        vocab_size=target.vocabulary,
        hidden_size=target.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=target.heads,
        num_key_value_heads=target.kv_heads,
        head_dim=target.head_dim,
        max_position_embeddings=LENGTH,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters=shape.rope_parameters,
        tie_word_embeddings=False,
    )
    config.draft_vocab_size = len(drafted)
    taps = taps_of(target)
    head = Eagle3Head(config, taps, target.vocabulary, target.embed)
    hidden = target.hidden_size
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
        head.fc.weight[:, -hidden:] += torch.eye(hidden)  # passes the last state through
        head.lm_head.weight.copy_(target.module.lm_head.weight[drafted])
        head.d2t.copy_(drafted - torch.arange(len(drafted)))
    return head


def save_head(head: Eagle3Head, config: LlamaConfig, taps: Sequence[int], folder: Path) -> None:
    """Writes a head in bfloat16 in SpecForge's format."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, weight in head.state_dict().items():
        published = name.replace("layers.0.", "midlayer.")
        tensors[published] = weight.detach().cpu().contiguous()
        if weight.is_floating_point():
            tensors[published] = tensors[published].to(torch.bfloat16)
    drafted = torch.arange(len(head.d2t)) + tensors["d2t"]
    tensors["t2d"] = torch.zeros(head.vocabulary, dtype=torch.bool).index_fill_(0, drafted, True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written: dict[str, Any] = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in ("transformers_version", "architectures", "dtype")
    }
    # As SpecForge and SGLang count: the layers whose outputs are taken.
    written["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
    about = {"architectures": [ARCHITECTURE], "torch_dtype": "bfloat16", **written}
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def target_states(target: CausalModel, tokens: Tensor, taps: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Returns the target's hidden states at `taps` and behind its final norm, `[windows, tokens, hidden]`."""
    body, norm = target.module.model, target.module.model.norm
    found: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda module, given: found.append(given[0]))
    try:
        with torch.no_grad():
            output = body(input_ids=tokens, use_cache=False, output_hidden_states=True)
    finally:
        hook.remove()
    hidden = [*output.hidden_states[: target.layers], found[0]]
    return [hidden[tap] for tap in taps], output.last_hidden_state


def window_attention(windows: int) -> Callable[[int, Tensor, Tensor, Tensor, Softmax], Tensor]:
    """Returns the attention of a head that is unrolled along `windows`, from one step to the next.

    In step n a token sees what a draft's n-th token sees: entries of the first step up to n tokens ago, and
    one entry of each later step. Its arguments are those of `Cache.attend`, for all windows in turn.
    """
    steps: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        group = len(queries) // len(keys)
        keys, values = (part.repeat_interleave(group, dim=0) for part in (keys, values))
        queries, keys, values = (
            part.unflatten(1, (windows, -1)).transpose(0, 1) for part in (queries, keys, values)
        )
        steps.append((keys, values))
        back, length = len(steps) - 1, queries.shape[2]
        scores = queries @ steps[0][0].mT * softmax.scale
        seen = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril(-back)
        columns = [scores.masked_fill(~seen, -math.inf)]
        moved = [
            (shifted(key, back - at), shifted(value, back - at)) for at, (key, value) in enumerate(steps)
        ]
        columns += [(queries * key).sum(-1, keepdim=True) * softmax.scale for key, _ in moved[1:]]
        weights = torch.cat(columns, -1).softmax(-1).nan_to_num(0.0).to(values.dtype)
        out = weights[..., :length] @ steps[0][1]
        for at, (_, value) in enumerate(moved[1:]):
            out = out + weights[..., length + at, None] * value
        return out.transpose(0, 1).flatten(1, 2)

    return attend


def shifted(rows: Tensor, count: int) -> Tensor:
    """Returns the rows `[…, tokens, width]` of `count` tokens before; zeros where there are none."""
    if not count:
        return rows
    return torch.cat([torch.zeros_like(rows[..., :count, :]), rows[..., :-count, :]], -2)


def unrolled(head: Eagle3Head, tokens: Tensor, states: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields the head's states after tokens 1 and later of each window by step.

    They are `[windows, tokens - 1, hidden]`.

    The first step continues from the target's states, each further one from the head's states of the step
    before. Those of step n are valid from token n on.

    Args:
        tokens: `[windows, tokens]`.
        states: of the target at the head's taps, `[windows, tokens, hidden]`.
    """
    windows, length = tokens.shape[0], tokens.shape[1] - 1
    embedded = head.embed(tokens[:, 1:].flatten())
    positions = torch.arange(1, length + 1, device=tokens.device).repeat(windows)
    before = head.tap.join([state[:, :-1].flatten(0, 1) for state in states])
    attend = window_attention(windows)
    for _ in range(STEPS):
        after = head(embedded, before, positions, attend).unflatten(0, (windows, length))
        yield after
        before = shifted(after, 1).flatten(0, 1)


def losses(head: Eagle3Head, target: CausalModel, tokens: Tensor, drafted: Tensor) -> list[Tensor]:
    """Returns the cross-entropy of the head with the target at each step, in nats, at sampled positions.

    Less the target's own entropy; tokens that the head cannot predict are left out.
    """
    states, final = target_states(target, tokens, head.tap.layers)
    chosen = torch.randperm(tokens.shape[1] - STEPS, device=tokens.device)
    chosen = STEPS + chosen[: max(1, int(SHARE * len(chosen)))]
    with torch.no_grad():
        wanted = F.log_softmax(target.module.lm_head(final[:, chosen]).float(), -1)[..., drafted].flatten(
            0, 1
        )
    found = []
    for after in unrolled(head, tokens, states):
        logits = head.lm_head(head.norm(after[:, chosen - 1])).float().flatten(0, 1)
        distance = wanted.exp() * (wanted - F.log_softmax(logits, -1))
        found.append(distance.sum(-1).mean())
    return found


@torch.no_grad()
def acceptance(head: Eagle3Head, target: CausalModel, windows: Sequence[Tensor]) -> list[float]:
    """Returns the acceptance rate of tokens drawn by the head at each step, after tokens of the text."""
    accepted = torch.zeros(STEPS)
    for window in windows:
        states, final = target_states(target, window[None], head.tap.layers)
        wanted = target.module.lm_head(final[0]).float().softmax(-1)
        for step, after in enumerate(unrolled(head, window[None], states)):
            shared = torch.minimum(head.logits(after[0, step:]).float().softmax(-1), wanted[step + 1 :])
            accepted[step] += shared.sum(-1).mean().cpu()
    return (accepted / len(windows)).tolist()


def most_frequent(texts: Iterable[Tensor], vocabulary: int, count: int) -> Tensor:
    """Returns the IDs of the `count` most frequent tokens, rising."""
    frequencies = torch.zeros(vocabulary, dtype=torch.int64)
    for tokens in texts:
        frequencies += tokens.bincount(minlength=vocabulary)
    return frequencies.argsort(descending=True, stable=True)[:count].sort().values


def train(
    head: Eagle3Head,
    target: CausalModel,
    sampler: WindowSampler,
    steps: Iterable[tuple[int, float]],
    rate: float = RATE,
) -> None:
    """Trains the head in place; for `steps` and `rate` see `train.optimize`."""
    drafted = torch.arange(len(head.d2t), device=head.d2t.device) + head.d2t

    def by_depth(step: int, progress: float) -> dict[str, Tensor]:
        tokens, _ = batch([sampler.draw(LENGTH, 0.0, COPIES) for _ in range(WINDOWS)], target.device)
        with autocast(target.device):
            found = losses(head, target, tokens, drafted)
        return {str(depth): loss for depth, loss in enumerate(found, 1)}

    matrices = torch.nn.ModuleList([head.fc, head.layers])
    optimize("head", head, matrices, rate, steps, by_depth, LATER)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_training.train_head",
        description="Train an EAGLE-3 draft head on a folder of text files.",
    )
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="folder of .txt files")
    add("--out", type=Path, required=True, help="new folder for the head")
    add("--model", help="folder or hub id of the target (default: the demo's)")
    add("--eval", type=Path, help="folder of .txt files to measure acceptance on")
    add("--minutes", type=minutes, default=15.0, help="training time (default: 15)")
    add("--start", type=Path, help="folder of a head to go on with, of the same sizes (default: a new one)")
    add("--vocabulary", type=int, help="tokens that it can predict, the most frequent ones (default: all)")
    add("--seed", type=int, default=0, help="random seed (default: 0)")
    add("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args(arguments)
    try:
        check_new("--out", options.out)
        source = options.model or demo_model("target")
        device = choose_device(options.device)
        loaded = load_model(source, device, torch.float32 if device.type == "cpu" else None)
        target = CausalModel(loaded, options.model or DEMO)
        started = None if options.start is None else load_head(options.start, target)
        tokenizer = load_tokenizer(source)
        if tokenizer is None:
            raise UsageError(f"--model {source}: has no tokenizer; name a model that has one")
        texts = encoded(read_corpus(options.corpus), tokenizer)
        others = encoded(read_corpus(options.eval), tokenizer) if options.eval else []
    except UsageError as error:
        parser.error(str(error))
    target.module.requires_grad_(False)
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    begin, vocabulary = tokenizer.bos_token_id or 0, len(tokenizer)

    def windows_of(texts: list[Tensor]) -> WindowSampler:
        return WindowSampler(texts, begin, vocabulary, target.max_positions, generator)

    drafted = most_frequent(texts, target.vocabulary, options.vocabulary or target.vocabulary)
    head = new_head(target, drafted).to(target.device)
    head.ready()
    if started is not None:
        head.load_state_dict(started.state_dict())
    rate = RATE if started is None else RATE / 2
    train(head, target, windows_of(texts), steps_within(60 * options.minutes), rate)
    save_head(head, head.config, head.tap.layers, options.out)
    if others:
        unseen = windows_of(others)
        windows = [unseen.draw(2 * LENGTH, 0.0, 0.0).tokens.to(target.device) for _ in range(EVALUATED)]
        with autocast(target.device):
            shares = (f"{share:.3f}" for share in acceptance(head, target, windows))
            print("acceptance by depth", *shares)
    return 0


if __name__ == "__main__":
    sys.exit(main())
