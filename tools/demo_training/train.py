"""Trains the demo pair: a small long-context Llama target and a smaller draft model for it.

    python -m tools.demo_training.train --corpus FOLDER --out FOLDER --minutes 120

Any folder of UTF-8 `.txt` files is a corpus. The tokenizer is trained first. The target is trained on
short windows with simulated distances (see `windows.py`), then on long ones. The draft model is distilled
from the target's distributions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from offload_rt.errors import UsageError
from tools.demo_training.windows import WindowSampler, attention_bias, batch

BOS, EOS = "<s>", "</s>"
VOCABULARY = 4096
MAX_POSITIONS = 262_144
TRAINED_POSITIONS = 140_000
ROPE_THETA = 1e7


def target_config() -> LlamaConfig:
    """Four layers of width 256 with four heads of 64: 4.5 M parameters, 4 KiB of bf16 KV per token."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        rms_norm_eps=1e-5,
    )


def draft_config() -> LlamaConfig:
    """Two layers of width 128 with two heads of 64: 0.9 M parameters."""
    config = target_config()
    config.hidden_size, config.intermediate_size = 128, 384
    config.num_hidden_layers = 2
    config.num_attention_heads = config.num_key_value_heads = 2
    return config


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE of `VOCABULARY` entries that prepends the beginning-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def minutes(text: str) -> float:
    """Argument type of a finite number of minutes above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of minutes above 0, got {text}")
    return number


def read_corpus(folder: Path) -> list[str]:
    """Returns the text of every `.txt` file of a folder.

    Raises:
        UsageError: there are none, or one cannot be read.
    """
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise UsageError(f"no .txt files in {folder}: name a folder of UTF-8 text files")
    try:
        return [file.read_text(encoding="utf-8") for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder}: a text file cannot be read as UTF-8 ({error}); convert it") from None


def encoded(texts: Iterable[str], tokenizer: Any) -> list[Tensor]:
    """Returns the token IDs of each text, without special tokens."""
    return [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def rate_scale(step: int, progress: float) -> float:
    """Factor of the learning rate: 60 steps of warm-up, constant until half time, then linear to 3 %."""
    warm = min(1.0, (step + 1) / 60)
    return warm * (1.0 if progress < 0.5 else 1.0 - 0.97 * (progress - 0.5) / 0.5)


@dataclass(frozen=True)
class Step:
    """Training data of one step.

    Attributes:
        batch: number of windows.
        length: tokens per window.
        gaps: share of windows with a position gap.
        copies: share of windows with copied passages.
        repeats: share of windows that repeat one segment.
    """

    batch: int
    length: int
    gaps: float = 0.0
    copies: float = 0.0
    repeats: float = 0.0


def target_plan(progress: float, step: int) -> Step:
    """Returns the data of a step: first for language, then for copying, then for long distances.

    Short windows come first because the model learns the language from them many times faster. Windows with
    a dilution bias stay short because their mask rules out causal attention kernels. Long windows come last.
    """
    diluted = Step(4, 1024, gaps=0.6, copies=0.8, repeats=0.1)
    if progress < 0.40:
        return Step(4, 1024, gaps=0.6, copies=0.5)
    if progress < 0.60:
        return Step(16, 256, repeats=0.7)
    if progress < 0.70:
        return diluted
    if progress < 0.85:
        return Step(1, 8192, copies=0.9) if step % 3 == 0 else diluted
    length = 16_384 if progress < 0.92 else 32_768
    return Step(1, length, copies=0.9) if step % 4 == 0 else diluted


def hidden_states(model: LlamaForCausalLM, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the hidden states after the last layer, `[windows, tokens, hidden]`."""
    body: Any = model.model
    output = body(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


def next_token_loss(
    model: LlamaForCausalLM, tokens: Tensor, positions: Tensor, mask: Tensor | None
) -> Tensor:
    """Returns the mean cross-entropy in nats; the output head runs in slices to save memory."""
    hidden = hidden_states(model, tokens, positions, mask)[:, :-1].flatten(0, 1)
    goal = tokens[:, 1:].flatten()
    total = hidden.new_zeros((), dtype=torch.float32)
    for h, g in zip(hidden.split(4096), goal.split(4096), strict=True):
        logits = torch.utils.checkpoint.checkpoint(model.lm_head, h, use_reentrant=False)
        total = total + F.cross_entropy(logits.float(), g, reduction="sum")
    return total / len(goal)


def steps_within(seconds: float) -> Iterator[tuple[int, float]]:
    """Yields (step, progress from 0 to 1) until the time is over."""
    start = time.monotonic()
    for step in itertools.count():
        progress = (time.monotonic() - start) / seconds
        if progress >= 1.0:
            return
        yield step, progress


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16)


def optimize(
    name: str,
    model: torch.nn.Module,
    layers: torch.nn.Module,
    rate: float,
    steps: Iterable[tuple[int, float]],
    losses: Callable[[int, float], Mapping[str, Tensor]],
    later: float = 1.0,
) -> None:
    """Trains in place: Muon for the matrices of `layers`, AdamW for all other parameters of `model`.

    Args:
        name: printed with the progress.
        rate: peak learning rate of both optimizers.
        steps: (step, progress from 0 to 1); see `steps_within`.
        losses: returns the losses of a step by name.
        later: weight of each loss relative to the one before it.
    """
    matrices = [p for p in layers.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    optimizers = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.97), weight_decay=0.0),
    ]
    running: dict[str, float] = {}
    for step, progress in steps:
        found = losses(step, progress)
        torch.stack([later**at * loss for at, loss in enumerate(found.values())]).sum().backward()
        torch.nn.utils.clip_grad_norm_([*matrices, *others], 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_scale(step, progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for each, loss in found.items():
            value = float(loss.detach())
            running[each] = 0.95 * running.get(each, value) + 0.05 * value
        if step % 25 == 0:
            report = " ".join(f"{each}:{value:.3f}" for each, value in running.items())
            print(f"{name} step {step} {progress:.1%} loss {report}", flush=True)


def train_target(
    model: LlamaForCausalLM, sampler: WindowSampler, seconds: float, device: torch.device
) -> None:
    """Trains the target in place."""

    def losses(step: int, progress: float) -> dict[str, Tensor]:
        plan = target_plan(progress, step)
        windows = [
            sampler.draw_repeats(plan.length)
            if torch.rand((), generator=sampler.generator) < plan.repeats
            else sampler.draw(plan.length, plan.gaps, plan.copies)
            for _ in range(plan.batch)
        ]
        tokens, positions = batch(windows, device)
        mask = attention_bias(windows, torch.bfloat16)
        with autocast(device):
            loss = next_token_loss(model, tokens, positions, None if mask is None else mask.to(device))
        return {str(plan.length): loss}

    optimize("target", model, model.model.layers, 3e-3, steps_within(seconds), losses)


def train_draft(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    sampler: WindowSampler,
    seconds: float,
    device: torch.device,
) -> None:
    """Distils the target into the draft model in place, on windows of about the draft cache's size."""
    target.eval()

    def losses(step: int, progress: float) -> dict[str, Tensor]:
        tokens, positions = batch([sampler.draw(512, 0.0, 0.1) for _ in range(8)], device)
        with autocast(device):
            with torch.no_grad():
                wanted = target.lm_head(hidden_states(target, tokens, positions, None))
            logits = draft.lm_head(hidden_states(draft, tokens, positions, None))
        found, wanted = (F.log_softmax(each.float(), -1).flatten(0, 1) for each in (logits, wanted))
        return {"kl": F.kl_div(found, wanted, log_target=True, reduction="batchmean")}

    optimize("draft", draft, draft.model.layers, 4e-3, steps_within(seconds), losses)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_training.train",
        description="Train the demo pair on a folder of text files.",
    )
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="folder of .txt files")
    add("--out", type=Path, required=True, help="folder for target/ and draft/")
    add("--minutes", type=minutes, default=120.0, help="training time of the target (default: 120)")
    add("--draft-minutes", type=minutes, default=12.0, help="training time of the draft (default: 12)")
    add("--seed", type=int, default=0, help="random seed (default: 0)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    options = parser.parse_args(arguments)
    try:
        texts = read_corpus(options.corpus)
    except UsageError as error:
        parser.error(str(error))

    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    tokenizer = train_tokenizer(texts)
    for part in ("target", "draft"):
        tokenizer.save_pretrained(options.out / part)
    books = encoded(texts, tokenizer)
    print(json.dumps({"books": len(books), "tokens": sum(map(len, books))}), flush=True)
    generator = torch.Generator().manual_seed(options.seed)
    sampler = WindowSampler(books, 0, VOCABULARY, TRAINED_POSITIONS, generator)
    # transformers annotates `to` in a way that mypy rejects.
    target: Any = LlamaForCausalLM(target_config())
    draft: Any = LlamaForCausalLM(draft_config())
    train_target(target.to(device), sampler, options.minutes * 60, device)
    target.to(torch.bfloat16).save_pretrained(options.out / "target")
    # The draft model learns from the target as it was saved, in bfloat16.
    train_draft(draft.to(device), target.float(), sampler, options.draft_minutes * 60, device)
    draft.to(torch.bfloat16).save_pretrained(options.out / "draft")
    return 0


if __name__ == "__main__":
    sys.exit(main())
