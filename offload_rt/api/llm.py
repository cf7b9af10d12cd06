"""The Python API: `LLM` turns prompts into text (see `engine/results.py` for parameters and results)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast, overload

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpu_kv import Link
from offload_rt.api.batch import continue_batch, generate_batch
from offload_rt.api.context import ROOM, Context, TokenStream
from offload_rt.api.frontend import GREEDY, Frontend, Notices, Prompt
from offload_rt.api.opening import LLMOptions, Opened, chosen_head, name_of, open_models
from offload_rt.config.schema import AUTO
from offload_rt.drafting.levels.base import needs_draft_model
from offload_rt.drafting.levels.configs import load_configs, with_head
from offload_rt.engine.engine import ProgressReport
from offload_rt.engine.results import GenerationResult, PromptScore
from offload_rt.engine.saved_context import SavedContext
from offload_rt.engine.sequence import TokenSequence
from offload_rt.model.config_shapes import ignored_parts
from offload_rt.model.rope import Yarn
from offload_rt.planning.planner import Plan
from offload_rt.sampling.params import SamplingParams, integer, is_batch
from offload_rt.system import clock
from offload_rt.text.chat import Messages, checked_messages, is_messages
from offload_rt.text.tools import Tools


class LLM(Frontend):
    """A target model, perhaps a draft model, and a composition of them. Threads may share it.

    Args:
        model: folder or hub ID of the target; None: the embedded demo pair.
        draft: folder or hub ID of the small model; None: the demo draft for the demo target, else none;
            "none": none. Levels of the config that need one are left out, and a notice says so. "auto": of
            no draft and the models with the target's vocabulary in the hub's cache, beside the target and in
            the settings' folders, the one that is predicted to be fastest for `size_hint`.
        config: name of a shipped config, or a TOML file; `auto`: for each prompt the config that is predicted
            to be fastest, of those that the models allow.
        device: auto, cpu or cuda; further GPUs behind commas, cuda:0,cuda:1: they keep and attend KV, and the
            second one has what weights the first one has no room for.
        dtype: auto, float32, bfloat16 or float16; see `choose_dtype` for auto.
        overrides: config values by full key, e.g. `{"retrieval.budget": 4096}`.
        on_progress: called with the progress of loading and prefill, and of measuring a machine for its first
            plan.
        on_notice: called with a line for the user.
        on_plan: called with the plan for `size_hint`, before weights are read.
        rope: `yarn:FACTOR` stretches the target's positions by YaRN; None: as its config.json says.
        size_hint: prompt tokens and new ones for which there must be room: what cannot fit is refused before
            weights are read. With a second GPU, weights are spread for this size; None: for the longest.
        quantize: nf4 or int8: quantises the target's weights as they load (needs the extra `quantized`).

    Attributes:
        plan: placement and speed that the planner predicts for `size_hint`; None without one.

    Raises:
        UsageError: the models, the config or the devices do not exist, do not go together or do not fit.
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
        rope: str | Yarn | None = None,
        on_plan: Callable[[Plan], None] | None = None,
        quantize: str = "none",
    ) -> None:
        options = LLMOptions(
            model, draft, config, device, dtype, overrides, rope, size_hint, quantize=quantize
        )
        self._start(open_models(options, on_progress, on_plan), on_progress, on_notice)

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
        configs, name = load_configs(config, overrides), name_of(target)
        if config == AUTO:
            configs = with_head(configs, overrides, chosen_head(overrides, name, target.config))
        if not needs_draft_model(configs):
            draft = None
        small = None if draft is None else (draft, name_of(draft))
        opened = Opened((target, name), small, tokenizer, configs, other_links)
        llm._start(opened, on_progress, on_notice, link)
        return llm

    def _start(
        self,
        opened: Opened,
        on_progress: ProgressReport | None,
        on_notice: Callable[[str], None] | None,
        link: Link | None = None,
    ) -> None:
        self.plan = opened.plan
        notices = Notices(on_notice)
        engine = opened.engine(link, on_progress, notices.add)
        self._streams: list[tuple[weakref.ref[TokenStream], TokenSequence]] = []
        for notice in (ignored_parts(opened.target[0].config), *opened.notices):
            if notice:
                notices.add(notice)
        super().__init__(engine, opened.tokenizer, notices)

    def read(self, prompt: Prompt, room: int = ROOM) -> Context:
        """Reads a text, token IDs or chat messages, once; the context that is returned owns their KV.

        Of a context that was read from messages, the last of them a document, say, `Context.ask` asks.

        Args:
            room: new tokens that the context is planned for. It may grow beyond, where memory allows.

        Raises:
            UsageError: there is no room for it, beside the contexts that are open.
        """
        room, date = integer("room", room), clock.date()
        tokens = self.prompt_ids(prompt, date=date)
        with self.engine.lock:
            self._close_dropped()
            context = Context.open(self, tokens, room)
        context.messages = checked_messages(prompt) if is_messages(prompt) else None
        context.date = date
        return context

    def score(self, prompt: Prompt, *, top: int = 0, start: int = 0) -> PromptScore:
        """Returns the log probability of each token of a prompt, given those before it, by one prefill.

        Args:
            top: number of likeliest tokens that are reported in the place of each, 0 to 20.
            start: position of the first token to score; those before it are only read.

        Raises:
            UsageError: the prompt does not fit, or `top` or `start` is out of range.
        """
        tokens = self.prompt_ids(prompt)
        with self.engine.lock:
            self._close_dropped()
            return self.scored(tokens, top, start)

    def load(self, path: str | Path, room: int = ROOM) -> Context:
        """Loads a context that `Context.save` saved; it goes on as if it had never been saved.

        Args:
            room: new tokens that it is planned for. It may grow beyond, where memory allows.

        Raises:
            UsageError: there is no such file, it is corrupt, this model cannot go on from it, or there is no
                room for it beside the contexts that are open.
        """
        room = integer("room", room)
        with self.engine.lock, SavedContext(Path(path)) as saved:
            self._close_dropped()
            return Context.load(self, saved, room)[0]

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
        """Continues a prompt (a text, token IDs, also a tensor, or chat messages), or several as one batch.

        Short for `read`, `Context.generate` and `Context.close`. The sequences of a batch share their passes,
        and what several prompts begin with is read once.
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
        return self.stream(cast(Prompt, prompt), cast(SamplingParams, params), **changes).finish()

    def generate_from(
        self,
        contexts: Sequence[Context],
        prompts: Sequence[Prompt] | None = None,
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        **changes: Any,
    ) -> list[GenerationResult]:
        """Continues several contexts as one batch, forks of one context, say; see `Context.generate`.

        Each context then contains its prompt and what was generated. See `generate` for failures.

        Args:
            prompts: one for each context, which is appended to it; None: the contexts go on as they are.
            params: for all contexts, or one for each.
            changes: fields of `SamplingParams` with other values than in `params`, e.g. `max_tokens=64`.

        Raises:
            UsageError: a prompt does not fit, or a context is closed, of another LLM, or given twice.
        """
        return continue_batch(self, contexts, prompts, params, changes)

    def stream(self, prompt: Prompt, params: SamplingParams = GREEDY, **changes: Any) -> TokenStream:
        """Continues `prompt` token by token. Closing the stream stops it; its `result` has what was made.

        Several streams may be open: each has its own sequence.

        Args:
            changes: fields of `SamplingParams` with other values than in `params`, e.g. `max_tokens=64`.
        """
        params = self.checked_params(params, changes).seeded()
        tokens, engine = self.prompt_ids(prompt, tools=params.tools), self.engine
        with engine.lock:
            self._close_dropped()
            sequence = engine.open(tokens, params.max_tokens)
            with ExitStack() as failed:
                failed.callback(engine.close_sequence, sequence)
                engine.begin(sequence, sequence.plan, self.continuation(params, tokens))
                # Nothing that the LLM holds may hold the stream: see `_close_dropped`.
                stream = TokenStream(
                    engine, self.output(sequence, params), lambda result: engine.close_sequence(sequence)
                )
                self._streams.append((weakref.ref(stream), sequence))
                failed.pop_all()
            return stream

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        thinking: bool | None = None,
        tools: object = None,
        tool_choice: object = None,
        effort: str | None = None,
        continue_final: bool = False,
        **changes: Any,
    ) -> GenerationResult:
        """Answers chat messages, as the model's chat template writes them.

        Args:
            params: None: the sampling that the model suggests, else greedy decoding.
            thinking: whether the model shall think before it answers; None: as the template has it.
            tools: what the model may call, `Tools` or OpenAI's list; the result has `tool_calls`. Messages
                with these calls and with their results continue the chat; see `checked_messages`.
            tool_choice: for a list: auto, none, required, or the name of a tool; see `Tools`. None: auto.
            effort: how much the model shall think, where its template asks; see `ChatTemplate.encode`.
            continue_final: the last message is the beginning of an answer, and the result what follows it.
            changes: fields of `SamplingParams` with other values than in `params`, e.g. `max_tokens=64`.

        Raises:
            UsageError: messages or tools are not valid or do not fit, or the model has no chat template.
        """
        stream = self.stream_chat(
            messages,
            params,
            thinking=thinking,
            tools=tools,
            tool_choice=tool_choice,
            effort=effort,
            continue_final=continue_final,
            **changes,
        )
        return stream.finish()

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        thinking: bool | None = None,
        tools: object = None,
        tool_choice: object = None,
        effort: str | None = None,
        continue_final: bool = False,
        **changes: Any,
    ) -> TokenStream:
        """Like `chat`, token by token; closing the stream stops it. `TokenStream.answers` splits its text."""
        if tools is not None or tool_choice is not None:
            changes["tools"] = tools if isinstance(tools, Tools) else Tools.of(tools, tool_choice)
        params = self.chat_params(params, changes)
        thinking, params = self.with_thoughts(thinking, params)
        prompt = self.chat_template.encode(
            messages, thinking=thinking, tools=params.tools, effort=effort, continue_final=continue_final
        )
        return self.stream(prompt, params)

    def _close_dropped(self) -> None:
        """Closes the sequences of streams that nobody holds any more."""
        open_streams = []
        for reference, sequence in self._streams:
            stream = reference()
            if stream is None:
                self.engine.close_sequence(sequence)
            elif stream.result is None:
                open_streams.append((reference, sequence))
        self._streams = open_streams

    def close(self) -> None:
        """Gives memory back and leaves models as they were given. Idempotent."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
