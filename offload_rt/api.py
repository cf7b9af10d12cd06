"""The Python API: `LLM` (its parameters and results are in `results.py`)."""

from __future__ import annotations

import resource
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpu_kv import CpuLink, CudaLink, Link, PagedKVStore
from offload_rt.attention import choose_backend
from offload_rt.caches.places import EVERYTHING_STREAMED, Shares
from offload_rt.config import DRAFT_STREAMING, TARGET_RETRIEVED, Config, load_config
from offload_rt.decoding import decode
from offload_rt.devices import available_memory
from offload_rt.drafting.base import LevelStats
from offload_rt.drafting.verifier import Sampling, Verifier
from offload_rt.errors import UsageError
from offload_rt.governor import Governor
from offload_rt.graphs import GraphedModel
from offload_rt.loading import (
    DEMO,
    check_same_tokens,
    choose_device,
    choose_dtype,
    demo_model,
    load_model,
    load_tokenizer,
)
from offload_rt.model import CausalModel
from offload_rt.planning.fitting import fitting_plan
from offload_rt.planning.shapes import find_shape, from_config
from offload_rt.results import (
    FinishReason,
    GenerationResult,
    Level,
    Memory,
    SamplingParams,
    Timings,
    TokenEvent,
    Transfer,
)
from offload_rt.sampling import GeneratorDraws, SamplingLaw
from offload_rt.session import Session, kv_layout
from offload_rt.text import TextStream
from offload_rt.timeline import NO_TIMELINE

ProgressReport = Callable[[str, int, int], None]
"""(phase, done, all) while a machine is measured for the first time, and while a prompt is read."""

NO_DRAFT = "none"
PLAIN = "plain"
GREEDY = SamplingParams()


class LLM:
    """A target model, perhaps a draft model, and a composition of them; generates one text at a time.

    `timeline` may be set to a `Timeline` before a text is begun, to record what ran when.

    Args:
        model: folder or hub id of the target; None: the embedded demo pair.
        draft: folder or hub id of the small model; None: the demo draft for the demo target, else none;
            "none": none. Levels of the config that need one are left out, and a notice says so.
        config: name of a shipped config, or a TOML file.
        device: auto, cpu or cuda.
        dtype: auto, float32, bfloat16 or float16.
        overrides: config values by full key, e.g. `{"retrieval.budget": 4096}`.
        on_progress: told how far the prefill is, and what is measured of a machine for its first plan.
        on_notice: told, in a line, what a user should know.
        longest: asked, once prompts can be encoded and before weights are read, for how many prompt tokens
            and new ones there must be room; what cannot fit is refused then.

    Raises:
        UsageError: for whatever cannot be done as asked.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | None = None,
        config: str = "triforce",
        device: str = "auto",
        dtype: str = "auto",
        overrides: Mapping[str, object] = {},
        on_progress: ProgressReport | None = None,
        on_notice: Callable[[str], None] | None = None,
        longest: Callable[[LLM], tuple[int, int]] | None = None,
    ) -> None:
        settings = load_config(config, overrides)  # what is cheap to check comes first
        place = choose_device(device)
        wanted = choose_dtype(dtype, place)
        model_name = DEMO if model is None else str(model)
        model_source = demo_model("target") if model is None else model
        if model is None and draft is None:
            draft = demo_model("draft")
        draft_name = None if draft is None or str(draft) == NO_DRAFT else str(draft)
        if DRAFT_STREAMING not in settings.speculation.levels:
            draft_name = None
        tokenizer = load_tokenizer(model_source)
        if draft_name is not None:
            check_same_tokens(tokenizer, model_name, load_tokenizer(draft_name), draft_name)
        if longest is not None:
            self._tokenizer = tokenizer
            shape = find_shape(model_name, wanted)
            small_shape = find_shape(draft_name, shape.dtype) if draft_name is not None else None
            fitting_plan(shape, small_shape, settings, *longest(self), place, on_progress=on_progress)
        target = load_model(model_source, place, wanted)
        small = load_model(draft_name, place, target.dtype) if draft_name is not None else None
        if draft_name is not None and model is None:
            draft_name = DEMO if Path(draft_name) == demo_model("draft") else draft_name
        self._start(
            GraphedModel(target, model_name, self._notice),
            None if small is None else GraphedModel(small, draft_name or "", self._notice),
            tokenizer,
            settings,
            on_progress,
            on_notice,
        )

    @classmethod
    def from_models(
        cls,
        target: PreTrainedModel,
        draft: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: str = "triforce",
        overrides: Mapping[str, object] = {},
        on_progress: ProgressReport | None = None,
        on_notice: Callable[[str], None] | None = None,
        link: Link | None = None,
    ) -> LLM:
        """Works with loaded transformers models; `close` leaves them as they were found.

        Args:
            link: what moves KV to the device; None: what the target's device calls for.
        """
        llm = cls.__new__(cls)
        settings = load_config(config, overrides)
        if DRAFT_STREAMING not in settings.speculation.levels:
            draft = None
        with ExitStack() as refused:
            model, small = GraphedModel(target, _name_of(target), llm._notice), None
            refused.callback(model.restore)
            if draft is not None:
                small = GraphedModel(draft, _name_of(draft), llm._notice)
                refused.callback(small.restore)
            llm._start(model, small, tokenizer, settings, on_progress, on_notice, link)
            refused.pop_all()
        return llm

    def _start(
        self,
        target: CausalModel,
        draft: CausalModel | None,
        tokenizer: PreTrainedTokenizerBase | None,
        config: Config,
        on_progress: ProgressReport | None,
        on_notice: Callable[[str], None] | None,
        link: Link | None = None,
    ) -> None:
        self._target = target
        self._draft = draft
        self._tokenizer = tokenizer
        self._on_progress = on_progress
        self._on_notice = on_notice
        self._notices: list[str] = []
        self._session: Session | None = None
        self._result: GenerationResult | None = None
        self._closed = False
        self.timeline = NO_TIMELINE
        if draft is not None and draft.vocabulary != target.vocabulary:
            raise UsageError(
                f"draft {draft.name} has {draft.vocabulary} tokens in its vocabulary, the target "
                f"{target.name} has {target.vocabulary}: a draft must share the target's tokenizer"
            )
        if draft is not None and draft.device != target.device:
            raise UsageError(
                f"draft {draft.name} is on {draft.device}, the target {target.name} on {target.device}: "
                "put both on one device"
            )
        self.config = self._without_missing_draft(config)
        self._backend = choose_backend(target.device)
        self._link = link or _link_for(target.device)
        self._store = PagedKVStore(
            kv_layout(target, config.store.page),
            pin=target.device.type == "cuda",
            slab_tokens=config.store.slab_tokens,
            on_warning=self._notice,
        )

    def _without_missing_draft(self, config: Config) -> Config:
        levels = config.speculation.levels
        if self._draft is not None or DRAFT_STREAMING not in levels:
            return config
        left = tuple(level for level in levels if level != DRAFT_STREAMING)
        if not left:
            raise UsageError(
                f"config {config.name} drafts with a small model, and there is none: name one with --draft, "
                "or use config retrieval or lookup"
            )
        self._notice(f"no draft model: {' → '.join(left)} drafts alone")
        return replace(config, speculation=replace(config.speculation, levels=left))

    def _notice(self, text: str) -> None:
        self._notices.append(text)
        if self._on_notice is not None:
            self._on_notice(text)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The model's end-of-text tokens."""
        for source in (self._target.module.generation_config, self._target.module.config):
            ends = getattr(source, "eos_token_id", None)
            if ends is not None:
                return frozenset([ends] if isinstance(ends, int) else ends)
        return frozenset()

    @property
    def last_result(self) -> GenerationResult:
        """Of the newest text, also of one that was interrupted."""
        if self._result is None:
            raise UsageError("nothing has been generated yet")
        return self._result

    def encode(self, text: str, last: int | None = None) -> list[int]:
        """Token ids of a prompt.

        Args:
            last: keep the last so many tokens; a beginning-of-text token is kept in front of them.
        """
        if self._tokenizer is None:
            raise UsageError(f"model {self._target.name} has no tokenizer: give the prompt as token ids")
        verbose = self._tokenizer.model_max_length
        self._tokenizer.model_max_length = 10**12  # its warning about long prompts does not apply
        tokens: list[int] = self._tokenizer(text)["input_ids"]
        self._tokenizer.model_max_length = verbose
        if last is None or len(tokens) <= last:
            return tokens
        if last > 1 and tokens[0] == self._tokenizer.bos_token_id:
            return [tokens[0], *tokens[len(tokens) - last + 1 :]]
        return tokens[len(tokens) - last :]

    def generate(self, prompt: str | Sequence[int], params: SamplingParams = GREEDY) -> GenerationResult:
        """Continues `prompt`, a string or token ids."""
        for _ in self.stream(prompt, params):
            pass
        return self.last_result

    def stream(self, prompt: str | Sequence[int], params: SamplingParams = GREEDY) -> Generator[TokenEvent]:
        """Continues `prompt` token by token. Closing the iterator stops; `last_result` tells what stands."""
        tokens = self._check_prompt(prompt, params)
        sampling = self._sampling(params)
        self._drop_session()
        self._result = None
        config, shares = self._plan(len(tokens), params.max_tokens)
        session = Session(
            config,
            self._target,
            self._draft,
            self._store,
            self._link,
            self._backend,
            sampling,
            tokens,
            params.max_tokens,
            self._stop_tokens(params),
            shares,
            self.timeline,
        )
        self._session = session
        report = self._on_progress
        try:
            session.prefill(None if report is None else lambda done, of: report("prefill", done, of))
        except BaseException:
            self._drop_session()
            raise
        return self._run(session, params)

    def again(
        self,
        params: SamplingParams = GREEDY,
        config: str | None = None,
        overrides: Mapping[str, object] = {},
    ) -> GenerationResult:
        """Decodes the last prompt again, over the KV that is still in the store; `last_result` stays.

        Args:
            config: another composition; None: this LLM's own. Its prefill and store are those of the first
                time, and a composition that retrieves needs a first one that did, in chunks of the same size.
            overrides: config values by full key, where a `config` is named.

        Returns:
            A result whose `prompt_ms` is the time to fill the caches that the composition drafts with.
        """
        session = self._session
        if session is None:
            raise UsageError("there is no prompt to decode again: generate first")
        settings = session.planned
        if config is not None:
            settings = self._without_missing_draft(load_config(config, overrides))
        self._check_room(session.prompt_tokens, params)
        session.recompose(settings, self._sampling(params), self._stop_tokens(params))
        first = self._result
        try:
            for _ in self._run(session, params):
                pass
            return self.last_result
        finally:
            self._result = first

    def plain(self, params: SamplingParams = GREEDY) -> GenerationResult:
        """Decodes the last prompt again, plainly."""
        return self.again(params, PLAIN)

    def _plan(self, prompt_tokens: int, new_tokens: int) -> tuple[Config, Shares]:
        """Sizes and shares for such a text; the planner keeps what the config gives."""
        config, offload = self.config, self.config.offload
        resident, cpu = max(0, offload.resident_tokens), max(0, offload.cpu_tokens)
        if self._link.in_place:
            return config, EVERYTHING_STREAMED
        if self._target.device.type == "cuda":
            models = [model for model in (self._target, self._draft) if model is not None]
            shapes = [from_config(model.module.config, model.dtype, model.name) for model in models]
            plan = fitting_plan(
                shapes[0],
                shapes[1] if len(shapes) > 1 else None,
                config,
                prompt_tokens,
                new_tokens,
                self._target.device,
                sum(model.weight_bytes for model in models),
                self._on_progress,
            )
            config = replace(config, store=plan.config.store, retrieval=plan.config.retrieval)
            page = config.store.page
            resident = -(-plan.placement.resident_tokens // page) * page
            if offload.cpu_tokens < 0:  # one that is given may be more than the prompt: all that follows too
                cpu = plan.placement.cpu_tokens // page * page
        return config, Shares(resident, cpu)

    def _sampling(self, params: SamplingParams) -> Sampling:
        law = SamplingLaw(params.temperature, params.top_p, params.top_k)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        return Sampling(law, GeneratorDraws(seed, self._target.device))

    def _stop_tokens(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self.end_tokens

    def _run(self, session: Session, params: SamplingParams) -> Generator[TokenEvent]:
        verifier = session.verifier
        clock = params.temperature == 0 or params.seed is None
        length = session.draft_length(clock)
        governor, schedule = session.governor(clock, length), session.schedule(clock, length)
        stream = TextStream(self._tokenizer, params.stop)
        tokens: list[int] = []
        finish: FinishReason = "interrupted"
        started = perf_counter()
        source = decode(schedule, session.text, params.max_tokens, session.stop_tokens, governor)
        try:
            for token in source:
                tokens.append(token.id)
                text = "" if token.ends else stream.push(token.id)
                if token.ends:
                    finish = "eos"
                elif stream.stopped:
                    finish = "stop"
                elif len(tokens) == params.max_tokens:
                    finish = "length"
                if finish != "interrupted" and not stream.stopped:
                    text += stream.finish()
                yield TokenEvent(token.id, text, token.from_draft)
                if stream.stopped:
                    break
        finally:
            ms = 1e3 * (perf_counter() - started)
            source.close()
            session.stop()  # the link would go on into a pass that nobody asks for
            if finish == "interrupted":
                stream.finish()
            if self._session in (session, None):  # a stream that was abandoned for another tells nothing
                self._result = self._summary(session, verifier, governor, params, tokens, stream, finish, ms)

    def _summary(
        self,
        session: Session,
        verifier: Verifier,
        governor: Governor,
        params: SamplingParams,
        tokens: list[int],
        stream: TextStream,
        finish: FinishReason,
        ms: float,
    ) -> GenerationResult:
        stats = verifier.levels
        levels = [
            Level(level.name, level.rounds, above.proposed, above.accepted, level.ms)
            for level, above in zip(stats, [*stats[1:], LevelStats("")], strict=True)
        ]
        top, counters = stats[-1], session.engine.counters
        notices = list(self._notices)
        if governor.steps_down:
            notices.append(
                f"speculation did not pay {governor.steps_down} time(s): {governor.plain_tokens} of "
                f"{len(tokens)} tokens were decoded plainly"
            )
        return GenerationResult(
            model=self._target.name,
            draft=self._draft.name if self._draft is not None else None,
            config=session.config.name,
            device=str(self._target.device),
            dtype=str(self._target.dtype).removeprefix("torch."),
            seed=params.seed,
            prompt_tokens=session.prompt_tokens,
            tokens=tokens,
            text=stream.text,
            finish_reason=finish,
            timings=Timings(
                prompt_n=session.prompt_tokens,
                prompt_ms=session.prefill_ms,
                predicted_n=len(tokens),
                predicted_ms=ms,
                predicted_per_second=1e3 * len(tokens) / ms if ms > 0 else 0.0,
                draft_n=top.proposed,
                draft_n_accepted=top.accepted,
            ),
            rounds=top.rounds,
            levels=levels,
            transfer=Transfer(
                counters.bytes_to_device,
                counters.bytes_to_host,
                counters.bytes_abandoned,
                counters.wait_ms,
            ),
            memory=Memory(
                kv_bytes=self._store.used_bytes,
                kv_reserved_bytes=self._store.reserved_bytes,
                host_peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                device_peak_bytes=(
                    torch.cuda.max_memory_allocated(self._target.device)
                    if self._target.device.type == "cuda"
                    else 0
                ),
            ),
            plain_tokens=governor.plain_tokens,
            notices=notices,
        )

    def _check_prompt(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        if self._closed:
            raise UsageError("this LLM is closed: make a new one")
        if params.stop and self._tokenizer is None:
            raise UsageError(f"model {self._target.name} has no tokenizer: stop strings cannot be used")
        tokens = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not tokens or (isinstance(prompt, str) and not prompt):
            raise UsageError("the prompt is empty: give it at least one token")
        outside = next((t for t in tokens if not 0 <= t < self._target.vocabulary), None)
        if outside is not None:
            raise UsageError(f"prompt token {outside} is outside the vocabulary of {self._target.vocabulary}")
        self._check_room(len(tokens), params)
        return tokens

    def _check_room(self, prompt_tokens: int, params: SamplingParams) -> None:
        total, limit = prompt_tokens + params.max_tokens, self._target.max_positions
        if total > limit:
            raise UsageError(
                f"{prompt_tokens} prompt tokens and {params.max_tokens} new ones are more than the {limit} "
                f"positions of {self._target.name}: use --max-prompt-tokens "
                f"{max(1, limit - params.max_tokens)} or fewer new tokens"
            )
        self._check_memory(total)

    def _check_memory(self, tokens: int) -> None:
        layout = self._store.layout
        token_bytes = layout.token_bytes
        if TARGET_RETRIEVED in self.config.speculation.levels:
            token_bytes += layout.token_bytes // (2 * self.config.retrieval.chunk)  # a mean key a chunk
        if self._target.device.type == "cpu":
            token_bytes += (
                self._target.hidden_size * self._target.dtype.itemsize
            )  # the prompt's hidden states
        # What the store holds is given back, or used again, before more is asked for.
        available = available_memory() + self._store.reserved_bytes
        needed = tokens * token_bytes
        if needed > available:
            raise UsageError(
                f"the KV of {tokens} tokens needs {needed / 2**30:.1f} GiB of memory and "
                f"{available / 2**30:.1f} GiB are available: the longest context that fits is "
                f"{available // token_bytes} tokens"
            )

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _restore_models(self) -> None:
        if self._draft is not None:
            self._draft.restore()
        self._target.restore()  # last: it may be its own draft

    def close(self) -> None:
        """Gives memory back and leaves models as they were given. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._drop_session()
        finally:
            self._store.close()
            self._link.close()
            self._restore_models()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _link_for(device: torch.device) -> Link:
    return CudaLink(device) if device.type == "cuda" else CpuLink()


def _name_of(model: PreTrainedModel) -> str:
    return str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
