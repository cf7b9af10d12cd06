"""The Python API: `LLM` turns prompts into text (parameters and results are in `results.py`)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpu_kv import CudaLink, Link
from offload_rt.config import AUTO, DATASTORE, Config, possible, uses_small_model
from offload_rt.drafting.compose import open_datastore
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine import Engine, ProgressReport
from offload_rt.errors import UsageError
from offload_rt.graphs import GraphedModel
from offload_rt.loading import (
    DEMO,
    DEVICES,
    check_same_tokens,
    choose_devices,
    choose_dtype,
    demo_model,
    load_model,
    load_tokenizer,
)
from offload_rt.machine.doctor import usable_hardware
from offload_rt.planning.placement import PlanRequest
from offload_rt.planning.planner import Plan, ranked
from offload_rt.planning.shapes import find_shape
from offload_rt.results import GenerationResult, SamplingParams, check_params, is_batch, token_ids
from offload_rt.sampling import GeneratorDraws
from offload_rt.session import Continuation, Session
from offload_rt.streams import KeptText, TokenStream
from offload_rt.text import encode
from offload_rt.toml import load_config, load_configs
from offload_rt.writer import Writer, finish

NO_DRAFT = "none"
PLAIN = "plain"
GREEDY = SamplingParams()
SHORTEST_TEXT = 1024  # tokens: for no shorter one weights are spread over cards

Prompt = str | Sequence[int]


class LLM:
    """A target model, perhaps a draft model, and a composition of them. Threads that call it take turns.

    Args:
        model: folder or hub id of the target; None: the embedded demo pair.
        draft: folder or hub id of the small model; None: the demo draft for the demo target, else none;
            "none": none. Levels of the config that need one are left out, and a notice says so.
        config: name of a shipped config, or a TOML file; `auto`: whichever is predicted to be fastest for a
            text, among those that the models allow.
        device: auto, cpu or cuda; further GPUs behind commas, cuda:0,cuda:1: they keep and attend KV, and the
            second one has what weights the first one has no room for.
        dtype: auto, float32, bfloat16 or float16.
        overrides: config values by full key, e.g. `{"retrieval.budget": 4096}`.
        on_progress: told how far loading and prefill are, and what is measured for a machine's first plan.
        on_notice: told, in a line, what a user should know.
        size_hint: prompt tokens and new ones for which there must be room: what cannot fit is refused before
            weights are read. With a second GPU, weights are spread for such a text; without, for the longest.

    Raises:
        UsageError: for whatever cannot be done as asked.
    """

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
    ) -> None:
        configs = load_configs(config, overrides)  # what is cheap to check comes first
        place, *others = choose_devices(device)
        wanted = choose_dtype(dtype, place)
        source, name = (demo_model("target"), DEMO) if model is None else (model, str(model))
        if model is None and draft is None:
            draft = demo_model("draft")
        if str(draft) == NO_DRAFT or not uses_small_model(configs):
            draft = None
        tokenizer = load_tokenizer(source)
        _check_datastores(configs, tokenizer)
        if draft is not None:
            check_same_tokens(tokenizer, name, load_tokenizer(draft), str(draft))
        elsewhere = None
        if size_hint is not None or others:
            shape = find_shape(name, wanted)
            small_shape = None if draft is None else find_shape(str(draft), shape.dtype)
            hardware = usable_hardware(place, on_progress=on_progress, cards=[(one, 0) for one in others])
            candidates = possible(configs, draft is not None)
            sizes = size_hint or (shape.max_positions - 1, 1)  # the longest text that may come, and fits

            def planned_for(sizes: tuple[int, int]) -> Plan:
                return ranked(PlanRequest(shape, small_shape, one, *sizes, hardware) for one in candidates)[0]

            planned = planned_for(sizes)
            while size_hint is None and not planned.fits and sizes[0] > SHORTEST_TEXT:
                planned = planned_for(sizes := (sizes[0] // 2, 1))
            if size_hint is not None:
                planned.check()
            if planned.request.elsewhere:
                elsewhere = others[0], planned.request.elsewhere
        target = load_model(source, place, wanted, on_progress, elsewhere=elsewhere)
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
        """Works with loaded transformers models; `close` leaves them as they were found.

        Args:
            link: what moves KV to the device; None: what the target's device calls for.
            other_links: to other GPUs, which keep and attend a share of the KV; closed with this.
        """
        llm = cls.__new__(cls)
        configs = load_configs(config, overrides)
        if not uses_small_model(configs):
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
        # Of a thread that makes a text, from before its prompt is read; asked for before the engine's lock.
        self._turn = threading.RLock()
        _check_datastores(configs, tokenizer, getattr(target[0].config, "vocab_size", None))
        with ExitStack() as refused:
            models = []
            for given in (target, draft) if draft is not None else (target,):
                models.append(GraphedModel(*given, self._notice))
                refused.callback(models[-1].restore)
            small = models[1] if draft is not None else None
            self._engine = Engine(models[0], small, configs, link, on_progress, self._notice, other_links)
            refused.pop_all()
        self._kept = KeptText(self._engine)

    def _notice(self, text: str) -> None:
        self._notices.append(text)
        if self._on_notice is not None:
            self._on_notice(text)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The model's end-of-text tokens."""
        module = self._engine.target.module
        for source in (module.generation_config, module.config):
            ends = getattr(source, "eos_token_id", None)
            if ends is not None:
                return frozenset([ends] if isinstance(ends, int) else ends)
        return frozenset()

    @property
    def last_result(self) -> GenerationResult:
        """Of the newest text that has ended, also of one that was interrupted; a batch leaves none."""
        self._kept.end_dropped()
        if self._kept.result is None:
            raise UsageError("nothing has been generated yet, but perhaps a batch")
        return self._kept.result

    def encode(self, text: str, last: int | None = None) -> list[int]:
        """Token ids of a prompt.

        Args:
            last: keep the last so many tokens; a beginning-of-text token is kept in front of them.
        """
        if self._tokenizer is None:
            name = self._engine.target.name
            raise UsageError(f"model {name} has no tokenizer: give the prompt as token ids")
        return encode(self._tokenizer, text, last)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, params: SamplingParams = GREEDY
    ) -> GenerationResult: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = GREEDY
    ) -> list[GenerationResult]: ...
    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = GREEDY
    ) -> GenerationResult | list[GenerationResult]:
        """Continues a prompt, a text or token ids (a tensor too); or each of a list of prompts, all at once.

        The texts of a batch share every reading of the weights. Each has its own length, acceptance, stop and
        seed; one that fails while they are continued ends alone, with `finish_reason` "error". An interrupt
        ends all of them, and nothing is kept of a batch.

        Args:
            params: for all prompts, or one for each.
        """
        if is_batch(prompt):
            return self._generate_all(cast(Sequence[Prompt], prompt), params)
        with self._turn:
            stream = self.stream(cast(Prompt, prompt), cast(SamplingParams, params))
            deque(stream, maxlen=0)
            assert stream.result is not None
            return stream.result

    def _generate_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[GenerationResult]:
        wanted = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(wanted) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts but {len(wanted)} parameters: give one for each")
        checked = [self._check_prompt(*one) for one in zip(prompts, wanted, strict=True)]
        sizes = [(len(tokens), one.max_tokens) for tokens, one in zip(checked, wanted, strict=True)]
        with self._turn, ExitStack() as closing:
            self._make_room(sizes)
            opened: dict[int, Writer] = {}
            # The shortest first: what it leaves of its share of a GPU's memory is for the longer ones.
            for at in sorted(range(len(sizes)), key=lambda at: sum(sizes[at])):
                opened[at] = self._open(checked[at], wanted[at], texts=len(sizes) - len(opened))
                closing.callback(self._engine.close_session, opened[at].session)
            writers = [opened[at] for at in range(len(sizes))]
            finish(self._engine, writers)
            return [writer.result() for writer in writers]

    def _make_room(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Gives back the last text for others, each of so many tokens and new ones.

        Raises:
            UsageError: there is no room for them; then the last text stays.
        """
        self._kept.end_dropped()
        self._engine.check_room(sizes, instead_of=self._kept.session)
        self._kept.give_back()

    def stream(self, prompt: Prompt, params: SamplingParams = GREEDY) -> TokenStream:
        """Continues `prompt` token by token. Closing the iterator stops; `last_result` tells what stands.

        Several streams may be open: each is a text of its own. The newest one that has ended is kept.
        """
        tokens = self._check_prompt(prompt, params)
        with self._turn:
            self._make_room([(len(tokens), params.max_tokens)])
            return TokenStream(self._engine, self._open(tokens, params), self._kept)

    def _open(self, tokens: list[int], params: SamplingParams, texts: int = 1) -> Writer:
        params = params.seeded()
        session = self._engine.open(tokens, self._continuation(params), texts=texts)
        return self._writer(session, params)

    def _writer(self, session: Session, params: SamplingParams) -> Writer:
        return Writer(self._engine, session, params, self._tokenizer, self._notices)

    def rerun(
        self,
        params: SamplingParams = GREEDY,
        config: str | None = None,
        overrides: Mapping[str, object] = {},
    ) -> GenerationResult:
        """Decodes the last prompt again, over the KV that is still in the store; `last_result` stays.

        Args:
            config: another composition; None: this LLM's own. Its prefill and store are those of the first
                time, when the means that it retrieves by (`retrieval.rest`, `.select`) must have been kept.
            overrides: config values by full key, of a `config` that is named.

        Returns:
            A result whose `prompt_ms` is the time to fill the caches that the composition drafts with.
        """
        check_params(params)
        with self._turn:
            self._kept.end_dropped()
            session = self._kept.session
            if session is None:
                raise UsageError("there is no prompt to decode again: generate first")
            settings = session.planned
            if config is None and overrides:
                raise UsageError(f"overrides {', '.join(overrides)}: name the config that they are for")
            if config is not None:
                given = load_config(config, overrides)
                _check_datastores([given], self._tokenizer, self._engine.target.vocabulary)
                settings = self._engine.available(given)
            self._engine.check_room([(session.prompt_tokens, params.max_tokens)], instead_of=session)
            params = params.seeded()
            session.rerun(settings, self._continuation(params))
            writer = self._writer(session, params)
            try:
                finish(self._engine, [writer])
            finally:
                self._engine.stop(session)
            if writer.error is not None:
                raise writer.error
            return writer.result()

    def plain(self, params: SamplingParams = GREEDY) -> GenerationResult:
        """Decodes the last prompt again, plainly."""
        return self.rerun(params, PLAIN)

    def _continuation(self, params: SamplingParams) -> Continuation:
        assert params.seed is not None
        draws = GeneratorDraws(params.seed, self._engine.target.device)
        sampling = Sampling(params, draws, frozenset() if params.ignore_eos else self.end_tokens)
        return Continuation(sampling, params.max_tokens)

    def _check_prompt(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        target = self._engine.target
        check_params(params)
        if params.stop and self._tokenizer is None:
            raise UsageError(f"model {target.name} has no tokenizer: stop strings cannot be used")
        tokens = self.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
        if not tokens or (isinstance(prompt, str) and not prompt):
            raise UsageError("the prompt is empty: give it at least one token")
        outside = next((t for t in tokens if not 0 <= t < target.vocabulary), None)
        if outside is not None:
            raise UsageError(f"prompt token {outside} is outside the vocabulary of {target.vocabulary}")
        return tokens

    def close(self) -> None:
        """Gives memory back and leaves models as they were given. Idempotent."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_datastores(
    configs: Iterable[Config], tokenizer: PreTrainedTokenizerBase | None, vocabulary: int | None = None
) -> None:
    for config in configs:
        if DATASTORE in config.sources:
            open_datastore(config).check(tokenizer, vocabulary)


def _name_of(model: PreTrainedModel) -> str:
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"model {model!r} is no transformers model; LLM(…) takes folders and hub ids")
    return str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
