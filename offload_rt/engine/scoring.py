"""Log probabilities of tokens by the target's own logits: of a pass, and of a prompt during its prefill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload_rt.engine.results import Alternatives, PromptScore
from offload_rt.errors import UsageError
from offload_rt.model.decoder import NotANumber
from offload_rt.model.runner import CausalModel
from offload_rt.sampling.params import MOST_ALTERNATIVES, integer
from offload_rt.sampling.sampler import choices
from offload_rt.system.device_copies import joined, to_device, to_host

LOGITS_BYTES = 2**26
"""Bytes of float32 logits at a time while a prompt is scored; their log probabilities take as many again."""


def log_probabilities(logits: Tensor, tokens: Sequence[int], top: int) -> list[Tensor]:
    """Returns log probabilities of tokens, and of the likeliest ones in their places; the host does not wait.

    Args:
        logits: `[tokens, vocabulary]`, which may be 16-bit; the log probabilities are float32.
        top: number of likeliest tokens.

    Returns:
        Log probabilities `[tokens]`; unless `top` is 0, also token IDs and log probabilities of the likeliest
        tokens, the likeliest first, `[tokens, top]`.
    """
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = logprobs.gather(1, to_device(tokens, logits.device)[:, None])[:, 0]
    if not top:
        return [own]
    best = logprobs.topk(min(top, logits.shape[1]), dim=-1)
    return [own, best.indices, best.values]


def alternatives(best: Sequence[Tensor], tokens: int) -> list[Alternatives]:
    """Returns the token IDs and log probabilities of `log_probabilities`, copied to the host, as pairs.

    Args:
        best: both tensors; empty: none are reported.
        tokens: number of tokens.
    """
    if not best:
        return [()] * tokens
    ids, logprobs = (tensor.tolist() for tensor in best)
    return [tuple(zip(*pair, strict=True)) for pair in zip(ids, logprobs, strict=True)]


class PromptScorer:
    """Scores the tokens of a prompt while it is read: `Engine.open` and `Engine.start` take it.

    Logits exist for some tokens at a time. The results stay on the device until `score` copies them.

    Args:
        tokens: token IDs of the whole prompt.
        top: number of likeliest tokens that are reported in the place of each, 0 to 20.
        start: position of the first token to score. Tokens before it may come from a prefix.

    Attributes:
        start: the same, but at least 1: nothing precedes the first token.

    Raises:
        UsageError: `top` or `start` is out of range.
    """

    def __init__(self, model: CausalModel, tokens: Sequence[int], top: int = 0, start: int = 0) -> None:
        self._top, start = integer("top", top), integer("start", start)
        if not 0 <= self._top <= MOST_ALTERNATIVES:
            raise UsageError(f"top {self._top} is out of range: use 0 to {MOST_ALTERNATIVES}")
        if not 0 <= start < len(tokens):
            raise UsageError(
                f"start {start} is out of range: the prompt has {len(tokens)} tokens; use 0 to"
                f" {len(tokens) - 1}"
            )
        self.start = max(1, start)
        self._model = model
        self._tokens = list(tokens)
        self._rows = max(1, LOGITS_BYTES // (torch.float32.itemsize * model.vocabulary))
        self._end = self.start  # of the scored tokens
        self._parts: list[tuple[Tensor, ...]] = []

    @property
    def unscored(self) -> list[int]:
        """The tokens before the first one that is scored, whose KV may come from elsewhere."""
        return self._tokens[: self.start]

    @torch.inference_mode()
    def take(self, position: int, hidden: Tensor) -> None:
        """Takes what the last layer puts out for tokens from `position` on (an `Outputs` of a prefill)."""
        for rows in hidden[:, max(0, self._end - 1 - position) :].split(self._rows, dim=1):
            if not rows.shape[1]:
                return
            start, self._end = self._end, self._end + rows.shape[1]
            logits = self._model.logits(rows)
            own, *best = log_probabilities(logits, self._tokens[start : self._end], self._top)
            self._parts.append((own, choices(logits), *best))

    def score(self) -> PromptScore:
        """Returns the scores of the prompt, once it is prefilled. The host waits once.

        Raises:
            NotANumber: a log probability is NaN.
        """
        tokens = self._tokens
        unscored = [None] * min(self.start, len(tokens))
        if not self._parts:
            return PromptScore(tokens, [*unscored], [*unscored], [()] * len(unscored))
        own, greedy, *best = to_host(*map(joined, zip(*self._parts, strict=True)))
        if bool(own.isnan().any()):
            self._model.check_weights()
            at = self.start + int(own.isnan().nonzero()[0])
            raise NotANumber(
                f"{self._model.name}: the log probability of prompt token {at} is NaN; compute in a wider"
                " dtype (bfloat16 or float32), and check the model's files"
            )
        scored = tokens[self.start :]
        return PromptScore(
            tokens,
            [*unscored, *own.tolist()],
            [*unscored, *(token == choice for token, choice in zip(scored, greedy.tolist(), strict=True))],
            [*[()] * len(unscored), *alternatives(best, len(scored))],
        )
