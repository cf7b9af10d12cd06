"""Train the demo pair: a small Llama target, long-context by training, and a smaller draft of it.

    python -m offload_rt.demo.train --corpus FOLDER --out FOLDER --minutes 120

Any folder of UTF-8 `.txt` files is a corpus. The tokenizer is trained first, then the target on windows
that grow from short ones with simulated distance to real long ones (see `windows.py`), then the draft
on the target's own laws (distillation), since what a draft is for is to guess the target.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from offload_rt.demo.windows import WindowSampler, attention_bias

BOS, EOS = "<s>", "</s>"
VOCABULARY = 4096
MAX_POSITIONS = 262_144
TRAINED_POSITIONS = 140_000
ROPE_THETA = 1e7


def target_config() -> LlamaConfig:
    """Four layers of width 256 with four heads of 64: 4.5 M parameters, 4 KiB of bf16 KV a token."""
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
    """Byte-level BPE of `VOCABULARY` entries that puts the beginning-of-text token in front."""
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
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def read_corpus(folder: Path) -> list[str]:
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise SystemExit(f"no .txt files in {folder}: name a folder of UTF-8 text files")
    return [file.read_text(encoding="utf-8") for file in files]


class Optimizers:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms; one schedule for both."""

    def __init__(self, model: LlamaForCausalLM, rate: float) -> None:
        inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
        matrices = {id(p) for p in inner}
        others = [p for p in model.parameters() if id(p) not in matrices]
        self._all = [
            torch.optim.Muon(inner, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.97), weight_decay=0.0),
        ]
        self._rate = rate
        self._parameters = list(model.parameters())

    def step(self, scale: float) -> None:
        """One update at `scale` times the peak rate, with gradients clipped to norm 1."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def rate_scale(step: int, progress: float) -> float:
    """Linear warm-up over 60 steps, level to 45 % of the time, then linear to 3 %."""
    warm = min(1.0, (step + 1) / 60)
    return warm * (1.0 if progress < 0.45 else 1.0 - 0.97 * (progress - 0.45) / 0.55)


def target_plan(progress: float, step: int, longest: int) -> tuple[int, int, float, float]:
    """Batch, window length, gap share and copy share of a training step.

    Short windows first, because the model learns the language there six times faster; then every few
    steps a real long window, longer towards the end.
    """
    if progress < 0.30:
        return 8, 1024, 0.5, 0.4
    if progress < 0.55:
        return 4, 2048, 0.6, 0.5
    if progress < 0.72:
        return (1, 8192, 0.0, 0.6) if step % 2 else (4, 2048, 0.6, 0.5)
    length = min(longest, 16_384 if progress < 0.86 else 32_768)
    return (1, length, 0.0, 0.7) if step % 3 == 0 else (4, 2048, 0.7, 0.5)


def hidden_states(
    model: LlamaForCausalLM, tokens: Tensor, positions: Tensor, mask: Tensor | None
) -> Tensor:
    output: Tensor = model.model(
        input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return output


def next_token_loss(
    model: LlamaForCausalLM, tokens: Tensor, positions: Tensor, mask: Tensor | None
) -> Tensor:
    """Mean cross-entropy in nats; the head runs in slices, so that long windows fit."""
    hidden = hidden_states(model, tokens, positions, mask)[:, :-1].flatten(0, 1)
    goal = tokens[:, 1:].flatten()
    total = hidden.new_zeros((), dtype=torch.float32)
    for h, g in zip(hidden.split(4096), goal.split(4096), strict=True):
        logits = torch.utils.checkpoint.checkpoint(model.lm_head, h, use_reentrant=False)
        total = total + F.cross_entropy(logits.float(), g, reduction="sum")
    return total / len(goal)


def steps_within(seconds: float) -> Iterator[tuple[int, float]]:
    """(step, progress from 0 to 1) until the time is over."""
    start = time.monotonic()
    step = 0
    while (elapsed := time.monotonic() - start) < seconds:
        yield step, elapsed / seconds
        step += 1


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16)


def train_target(
    model: LlamaForCausalLM,
    sampler: WindowSampler,
    seconds: float,
    longest: int,
    save: Path,
    device: torch.device,
) -> None:
    """Trains in place; writes a checkpoint to `save` every ten minutes."""
    optimizers = Optimizers(model, rate=3e-3)
    running: dict[int, float] = {}
    seen, last_save, started = 0, time.monotonic(), time.monotonic()
    for step, progress in steps_within(seconds):
        batch, length, gaps, copies = target_plan(progress, step, longest)
        windows = [sampler.draw(length, gaps, copies) for _ in range(batch)]
        tokens = torch.stack([w.tokens for w in windows]).to(device)
        positions = torch.stack([w.positions for w in windows]).to(device)
        mask = attention_bias(windows, torch.bfloat16)
        with autocast(device):
            loss = next_token_loss(
                model, tokens, positions, None if mask is None else mask.to(device)
            )
        loss.backward()
        optimizers.step(rate_scale(step, progress))
        seen += batch * length
        value = float(loss.detach())
        running[length] = 0.95 * running.get(length, value) + 0.05 * value
        if step % 25 == 0:
            losses = " ".join(f"{n}:{v:.3f}" for n, v in running.items())
            rate = seen / (time.monotonic() - started)
            print(f"step {step} {progress:.1%} loss {losses} tok/s {rate:.0f} M {seen / 1e6:.2f}", flush=True)
        if time.monotonic() - last_save > 600:
            save_model(model, save)
            last_save = time.monotonic()


def train_draft(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    sampler: WindowSampler,
    seconds: float,
    device: torch.device,
) -> None:
    """Distils the target's laws (KL of target to draft) on windows of the draft cache's size."""
    optimizers = Optimizers(draft, rate=4e-3)
    target.eval()
    running = 0.0
    for step, progress in steps_within(seconds):
        windows = [sampler.draw(512, 0.0, 0.1) for _ in range(16)]
        tokens = torch.stack([w.tokens for w in windows]).to(device)
        positions = torch.stack([w.positions for w in windows]).to(device)
        with autocast(device):
            with torch.no_grad():
                wanted = target.lm_head(hidden_states(target, tokens, positions, None))
            logits = draft.lm_head(hidden_states(draft, tokens, positions, None))
        log_law = F.log_softmax(logits.float(), -1).flatten(0, 1)
        loss = F.kl_div(
            log_law,
            F.log_softmax(wanted.float(), -1).flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
        loss.backward()
        optimizers.step(rate_scale(step, progress))
        running = 0.95 * running + 0.05 * float(loss.detach()) if step else float(loss.detach())
        if step % 25 == 0:
            print(f"draft step {step} {progress:.1%} kl {running:.3f}", flush=True)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Weights as bfloat16 safetensors with their config, written beside and moved into place."""
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict({k: v.detach().to("cpu", torch.bfloat16) for k, v in model.state_dict().items()})
    copy.tie_weights()
    copy.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m offload_rt.demo.train", description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder of .txt files")
    parser.add_argument("--out", type=Path, required=True, help="folder for target/ and draft/")
    parser.add_argument("--minutes", type=float, default=120.0, help="for the target")
    parser.add_argument("--draft-minutes", type=float, default=12.0)
    parser.add_argument("--longest-window", type=int, default=32_768)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init", type=Path, help="continue from this target instead of random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    target_folder, draft_folder = options.out / "target", options.out / "draft"
    texts = read_corpus(options.corpus)
    if options.init:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.init)
    else:
        tokenizer = train_tokenizer(texts)
    for folder in (target_folder, draft_folder):
        tokenizer.save_pretrained(folder)
    books = [torch.tensor(tokenizer.encode(t, add_special_tokens=False)) for t in texts]
    print(json.dumps({"books": len(books), "tokens": sum(map(len, books))}), flush=True)
    sampler = WindowSampler(
        books, 0, VOCABULARY, 2, TRAINED_POSITIONS, torch.Generator().manual_seed(options.seed)
    )
    if options.init:
        target = LlamaForCausalLM.from_pretrained(options.init, dtype=torch.float32)
    else:
        target = LlamaForCausalLM(target_config())
    target.config._attn_implementation = "sdpa"
    target.to(device)
    train_target(target, sampler, options.minutes * 60, options.longest_window, target_folder, device)
    save_model(target, target_folder)
    draft = LlamaForCausalLM(draft_config()).to(device)
    draft.config._attn_implementation = "sdpa"
    train_draft(draft, target, sampler, options.draft_minutes * 60, device)
    save_model(draft, draft_folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
