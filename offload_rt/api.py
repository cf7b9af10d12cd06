"""The Python API: `LLM` turns prompts into text (see `results.py` for parameters and results)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpu_kv import CudaLink, Link
from offload_rt.batch import generate_batch
from offload_rt.config import AUTO, Config
from offload_rt.context import GREEDY, Context, Prompt, TokenStream
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine.engine import Engine, ProgressReport
from offload_rt.engine.sequence import Continuation, TokenSequence
from offload_rt.errors import UsageError
from offload_rt.levels.base import needs_draft_model, possible, used_levels
from offload_rt.machine.inspection import usable_hardware
from offload_rt.model.cuda_graphs import GraphedModel
from offload_rt.model.loading import (
    DEMO,
    DEVICES,
    check_same_tokens,
    choose_devices,
    choose_dtype,
    demo_model,
    load_model,
    load_tokenizer,
)
from offload_rt.model.rope import Yarn
from offload_rt.model.shape import find_shape, ignored_parts
from offload_rt.output import OutputProcessor
from offload_rt.planning.placement import PlanRequest
from offload_rt.planning.planner import Plan, ranked
from offload_rt.results import (
    GenerationResult,
    SamplingParams,
    integer,
    is_batch,
    token_ids,
    with_changes,
)
from offload_rt.sampling import GeneratorDraws
from offload_rt.text import encode
from offload_rt.toml import load_config, load_configs

NO_DRAFT = "none"
ROOM = 2048
"""New tokens that a context is planned for where nothing else is said."""
SHORTEST_CONTEXT = 1024  # tokens: weights are spread over GPUs for no shorter one


class LLM:
    """A target model, perhaps a draft model, and a composition of them. Threads may share it.

    Args:
        model: folder or hub ID of the target; None: the embedded demo pair.
        draft: folder or hub ID of the small model; None: the demo draft for the demo target, else none;
            "none": none. Levels of the config that need one are left out, and a notice says so.
        config: name of a shipped config, or a TOML file; `auto`: for each prompt the config that is predicted
            to be fastest, of those that the models allow.
        device: auto, cpu or cuda; further GPUs behind commas, cuda:0,cuda:1: they keep and attend KV, and the
            second one has what weights the first one has no room for.
        dtype: auto, float32, bfloat16 or float16.
        overrides: config values by full key, e.g. `{"retrieval.budget": 4096}`.
        on_progress: called with the progress of loading and prefill, and of measuring a machine for its first
            plan.
        on_notice: called with a line for the user.
        rope: `yarn:FACTOR` stretches the target's positions by YaRN; None: as its config.json says.
        size_hint: prompt tokens and new ones for which there must be room: what cannot fit is refused before
            weights are read. With a second GPU, weights are spread for this size; None: for the longest.

    Attributes:
        predicted_ms: ms per token that the plan for `size_hint` predicts; None without one.

    Raises:
        UsageError: the models, the config or the devices do not exist, do not go together or do not fit.
    """

    predicted_ms: float | None = None

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | None = None,
        config: str = AUTO,
        device: str = "auto",
        dtype: str = "auto",
        overrides: Mapping[str, object] = {},
        on_progress: ProgressReport | None = None,
        on_notice: Callable[[str], None] | None = None,
        size_hint: tuple[int, int] | None = None,
        rope: str | Yarn | None = None,
    ) -> None:
        rope = Yarn.parse(rope) if isinstance(rope, str) else rope
        configs = load_configs(config, overrides)  # what is cheap to check comes first
        place, *others = choose_devices(device)
        wanted = choose_dtype(dtype, place)
        source, name = (demo_model("target"), DEMO) if model is None else (model, str(model))
        if model is None and draft is None:
            draft = demo_model("draft")
        if str(draft) == NO_DRAFT or not needs_draft_model(configs):
            draft = None
        tokenizer = load_tokenizer(source)
        _check_files(configs, tokenizer)
        if draft is not None:
            check_same_tokens(tokenizer, name, load_tokenizer(draft), str(draft))
        remote_mlps = None
        if size_hint is not None or others:
            shape = find_shape(name, wanted, rope)
            small_shape = None if draft is None else find_shape(str(draft), shape.dtype)
            hardware = usable_hardware(
                place, on_progress=on_progress, other_gpus=[(one, 0) for one in others]
            )
            candidates = possible(configs, draft is not None)
            sizes = size_hint or (shape.max_positions - 1, 1)  # the longest sequence that may come, and fits

            def planned_for(sizes: tuple[int, int]) -> Plan:
                return ranked(PlanRequest(shape, small_shape, one, *sizes, hardware) for one in candidates)[0]

            planned = planned_for(sizes)
            while size_hint is None and not planned.fits and sizes[0] > SHORTEST_CONTEXT:
                planned = planned_for(sizes := (sizes[0] // 2, 1))
            if size_hint is not None:
                self.predicted_ms = planned.check().ms_per_token
            if planned.request.remote_mlps:
                remote_mlps = others[0], planned.request.remote_mlps
        target = load_model(source, place, wanted, on_progress, remote_mlps=remote_mlps, rope=rope)
        small = None
        if draft is not None:
            loaded = load_model(draft, place, target.dtype, on_progress, "load draft")
            embedded = model is None and Path(draft) == demo_model("draft")
            small = (loaded, DEMO if embedded else str(draft))
        links = [CudaLink(other) for other in others]
        self._start((target, name), small, tokenizer, configs, on_progress, on_notice, other_links=links)
        if place.type == "cuda" and device in DEVICES and torch.cuda.device_count() > 1:
            self._notice("another GPU is idle: device cuda:0,cuda:1 lets it keep and attend KV, too")

    @classmethod
    def from_models(
        cls,
        target: PreTrainedModel,
        draft: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: str = AUTO,
        overrides: Mapping[str, object] = {},
        on_progress: ProgressReport | None = None,
        on_notice: Callable[[str], None] | None = None,
        link: Link | None = None,
        other_links: Sequence[Link] = (),
    ) -> LLM:
        """Returns an LLM of loaded transformers models; `close` leaves them as they were found.

        Args:
            link: moves KV to the device; None: the link that the target's device needs.
            other_links: to other GPUs, which keep and attend a share of the KV; closed with the LLM.
        """
        llm = cls.__new__(cls)
        configs = load_configs(config, overrides)
        if not needs_draft_model(configs):
            draft = None
        llm._start(
            (target, _name_of(target)),
            None if draft is None else (draft, _name_of(draft)),
            tokenizer,
            configs,
            on_progress,
            on_notice,
            link,
            other_links,
        )
        return llm

    def _start(
        self,
        target: tuple[PreTrainedModel, str],
        draft: tuple[PreTrainedModel, str] | None,
        tokenizer: PreTrainedTokenizerBase | None,
        configs: Sequence[Config],
        on_progress: ProgressReport | None,
        on_notice: Callable[[str], None] | None,
        link: Link | None = None,
        other_links: Sequence[Link] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._notices: list[str] = []
        self._on_notice = on_notice
        _check_files(configs, tokenizer, getattr(target[0].config.get_text_config(), "vocab_size", None))
        with ExitStack() as refused:
            models = []
            for given in (target, draft) if draft is not None else (target,):
                models.append(GraphedModel(*given, self._notice))
                refused.callback(models[-1].restore)
            small = models[1] if draft is not None else None
            self.engine = Engine(models[0], small, configs, link, on_progress, self._notice, other_links)
            refused.pop_all()
        self._streams: list[tuple[weakref.ref[TokenStream], TokenSequence]] = []
        if ignored := ignored_parts(target[0].config):
            self._notice(ignored)

    def _notice(self, text: str) -> None:
        self._notices.append(text)
        if self._on_notice is not None:
            self._on_notice(text)

    @property
    def model_sampling(self) -> SamplingParams | None:
        """Sampling that the model's generation_config.json suggests; None: greedy decoding, or nothing."""
        if (config := self.engine.target.module.generation_config) is None or not config.do_sample:
            return None
        names = ("temperature", "top_p", "top_k")
        found = {name: value for name in names if (value := getattr(config, name, None)) is not None}
        try:
            return SamplingParams(**{"temperature": 1.0} | found)
        except UsageError:
            return None  # a bad suggestion is no reason to refuse a run

    @property
    def end_tokens(self) -> frozenset[int]:
        """The model's end-of-text tokens."""
        module = self.engine.target.module
        for source in (module.generation_config, module.config):
            ends = getattr(source, "eos_token_id", None)
            if ends is not None:
                return frozenset([ends] if isinstance(ends, int) else ends)
        return frozenset()

    def encode(self, text: str, last: int | None = None, *, special: bool = True) -> list[int]:
        """Returns the token IDs of a text.

        Args:
            last: keep this many of the last tokens, and a beginning-of-text token in front of them.
            special: add the special tokens that the tokenizer puts around a text.
        """
        if self._tokenizer is None:
            name = self.engine.target.name
            raise UsageError(f"model {name} has no tokenizer: give the prompt as token ids")
        return encode(self._tokenizer, text, last, special=special)

    def read(self, prompt: Prompt, room: int = ROOM) -> Context:
        """Reads a text or token IDs, once; the context that is returned owns their KV.

        Args:
            room: new tokens that the context is planned for. It may grow beyond, where memory allows.

        Raises:
            UsageError: there is no room for it, beside the contexts that are open.
        """
        tokens, room = self.prompt_ids(prompt), integer("room", room)
        with self.engine.lock:
            self._close_dropped()
            left = self.engine.target.max_length(len(tokens)) - len(tokens)
            return Context(self, self.engine.open(tokens, max(1, min(room, left))))

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams = GREEDY, **changes: Any
    ) -> GenerationResult: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        **changes: Any,
    ) -> list[GenerationResult]: ...
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        **changes: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Continues a prompt, a text or token IDs (a tensor too), or a list of prompts as one batch.

        Short for `read`, `Context.generate` and `Context.close`. The sequences of a batch share their passes.
        Each has its own length, acceptance, stop and seed; one that fails while they are continued ends
        alone, with `finish_reason` "error". An interrupt ends all of them.

        Args:
            params: for all prompts, or one for each.
            changes: fields of `SamplingParams` with other values than in `params`, e.g. `max_tokens=64`.
        """
        if is_batch(prompt):
            with self.engine.lock:
                self._close_dropped()
            return generate_batch(self, cast(Sequence[Prompt], prompt), params, changes)
        stream = self.stream(cast(Prompt, prompt), cast(SamplingParams, params), **changes)
        deque(stream, maxlen=0)
        assert stream.result is not None
        return stream.result

    def stream(self, prompt: Prompt, params: SamplingParams = GREEDY, **changes: Any) -> TokenStream:
        """Continues `prompt` token by token. Closing the stream stops it; its `result` has what was made.

        Several streams may be open: each has its own sequence.

        Args:
            changes: fields of `SamplingParams` with other values than in `params`, e.g. `max_tokens=64`.
        """
        params = self.checked_params(params, changes).seeded()
        tokens, engine = self.prompt_ids(prompt), self.engine
        with engine.lock:
            self._close_dropped()
            sequence = engine.open(tokens, params.max_tokens)
            with ExitStack() as failed:
                failed.callback(engine.close_sequence, sequence)
                engine.begin(sequence, None, self.continuation(params))
                end = partial(engine.close_sequence, sequence)
                # Nothing that the LLM holds may hold the stream: see `_close_dropped`.
                stream = TokenStream(engine, self.output(sequence, params), end)
                self._streams.append((weakref.ref(stream), sequence))
                failed.pop_all()
            return stream

    def _close_dropped(self) -> None:
        """Closes the sequences of streams that nobody holds any more."""
        held = []
        for one, sequence in self._streams:
            stream = one()
            if stream is None:
                self.engine.close_sequence(sequence)
            elif stream.result is None:
                held.append((one, sequence))
        self._streams = held

    # The interface that a context uses (`context.Host`).

    def prompt_ids(self, prompt: Prompt, *, behind: bool = False) -> list[int]:
        """Returns the token IDs of a prompt, checked.

        Args:
            behind: the prompt is appended to others, so that no beginning-of-text token goes before it.
        """
        target = self.engine.target
        tokens = self.encode(prompt, special=not behind) if isinstance(prompt, str) else token_ids(prompt)
        if not tokens or (isinstance(prompt, str) and not prompt):
            raise UsageError("the prompt is empty: give it at least one token")
        outside = next((t for t in tokens if not 0 <= t < target.vocabulary), None)
        if outside is not None:
            raise UsageError(f"prompt token {outside} is outside the vocabulary of {target.vocabulary}")
        return tokens

    def checked_params(self, params: SamplingParams, changes: Mapping[str, Any] = {}) -> SamplingParams:
        """Returns `params` with other values of some fields, checked for this model."""
        params = with_changes(params, changes)
        if params.stop and self._tokenizer is None:
            name = self.engine.target.name
            raise UsageError(f"model {name} has no tokenizer: stop strings cannot be used")
        return params

    def output(self, sequence: TokenSequence, params: SamplingParams, start: int = 0) -> OutputProcessor:
        """Returns the output processor of a sequence, which turns rounds into events."""
        return OutputProcessor(self.engine, sequence, params, self._tokenizer, self._notices, start)

    def continuation(self, params: SamplingParams) -> Continuation:
        """Returns the settings of a continuation; `params` must have a seed."""
        self.checked_params(params)
        assert params.seed is not None
        draws = GeneratorDraws(params.seed, self.engine.target.device)
        sampling = Sampling(params, draws, frozenset() if params.ignore_eos else self.end_tokens)
        return Continuation(sampling, params.max_tokens)

    def composition(self, config: str | None, overrides: Mapping[str, object] = {}) -> Config | None:
        """Returns the config of that name or file; None, the LLM's own, where no name is given."""
        if config is None:
            if overrides:
                raise UsageError(f"overrides {', '.join(overrides)}: name the config that they are for")
            return None
        given = load_config(config, overrides)
        _check_files([given], self._tokenizer, self.engine.target.vocabulary)
        return self.engine.available(given)

    def close(self) -> None:
        """Gives memory back and leaves models as they were given. Idempotent."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_files(
    configs: Iterable[Config], tokenizer: PreTrainedTokenizerBase | None, vocabulary: int | None = None
) -> None:
    for config in configs:
        for level in used_levels(config):
            level.check_files(tokenizer, vocabulary)


def _name_of(model: PreTrainedModel) -> str:
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"model {model!r} is no transformers model; LLM(…) takes folders and hub ids")
    return str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
