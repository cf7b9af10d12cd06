"""The server's routes: OpenAI's, Anthropic's, llama.cpp's tokenizer, health, metrics and a page to try it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from offload_rt.api.llm import LLM
from offload_rt.errors import UsageError, first_line
from offload_rt.planning.request import ContextTooLong, check_positions
from offload_rt.sampling.params import SamplingParams, token_ids
from offload_rt.server.answering import Answering, ClientGone, explained
from offload_rt.server.jobs.metrics import Metrics
from offload_rt.server.jobs.worker import Closing, Event, Job, Worker
from offload_rt.server.limits import Limits
from offload_rt.server.page_files import PageFiles
from offload_rt.server.protocols.answer import Answer
from offload_rt.server.protocols.completion_answers import (
    ChatReply,
    CompletionAnswer,
    CompletionReply,
    Reply,
    new_id,
)
from offload_rt.server.protocols.completions import (
    ChatRequest,
    CompletionRequest,
    DocumentRequest,
    GenerationRequest,
    StreamOptions,
    TokenizeRequest,
    supported,
    text_length,
)
from offload_rt.server.protocols.errors import ApiError, error_response
from offload_rt.server.protocols.message_answers import MessageAnswer
from offload_rt.server.protocols.messages import MessagesRequest, message_fields
from offload_rt.server.protocols.response_answers import ResponseAnswer
from offload_rt.server.protocols.responses import ResponseRequest, response_fields
from offload_rt.text.documents import check_encoding, document_text
from offload_rt.text.pieces import longest_token

Body = TypeVar("Body", bound=BaseModel)


class Service:
    """Answers requests by a worker.

    Args:
        name: of the model, as clients name it.
        max_tokens: most new tokens of a request that names no limit.
        aliases: further names by which clients may name the model.
    """

    def __init__(
        self,
        llm: LLM,
        worker: Worker,
        metrics: Metrics,
        name: str,
        max_tokens: int,
        aliases: Sequence[str] = (),
    ) -> None:
        self._llm = llm
        self._worker = worker
        self._metrics = metrics
        self._name = name
        self._names = tuple(dict.fromkeys([name, *aliases]))
        self._max_tokens = max_tokens
        self._began = int(time.time())
        # A tokenizer may not encode in two threads at a time. Requests take turns, piece by piece.
        self._tokenizing = asyncio.Lock()

    # Routes:

    async def chat(self, request: Request) -> Response:
        body = await _body(request, ChatRequest)

        def answer(tokens: Sequence[int], choices: int) -> Answer:
            request_id = new_id("chatcmpl")
            splitter = partial(self._llm.chat_template.answers, tokens, body.called)
            replies = [
                ChatReply(*self._base(request_id, body, choice), splitter=splitter())
                for choice in range(choices)
            ]
            return self._completions(body, replies)

        return await self._chat(request, body, answer)

    async def messages(self, request: Request) -> Response:
        body = await _body(request, MessagesRequest, message_fields)
        chat = body.chat()

        def answer(tokens: Sequence[int], choices: int) -> Answer:
            return MessageAnswer(
                self._name,
                len(tokens),
                body.max_tokens,
                self._llm.chat_template.answers(tokens, chat.called),
                shows_thoughts=body.shows_thoughts,
                request_id=request.state.request_id,
            )

        return await self._chat(request, chat, answer)

    async def count_tokens(self, request: Request) -> Response:
        body = await _body(request, MessagesRequest, message_fields)
        return JSONResponse({"input_tokens": len(await self._prompt(request, body.chat()))})

    async def complete(self, request: Request) -> Response:
        body = await _body(request, CompletionRequest)
        self._check_choices(len(body.prompts) * body.n)

        async def encode(prompt: object) -> list[int]:
            if isinstance(prompt, str) and prompt:
                self._check_characters(len(prompt))
                parts = self._llm.encoded(prompt, most=self._positions)
                prompt = await self._tokenized(request, parts, most=self._positions)
            return self._llm.prompt_ids(prompt if isinstance(prompt, str) else token_ids(prompt))

        def answer(choices: int) -> Answer:
            request_id = new_id("cmpl")
            replies = [
                CompletionReply(
                    *self._base(request_id, body, choice),
                    echo=echoes[choice // body.n],
                    continues=body.continues,
                )
                for choice in range(choices)
            ]
            return self._completions(body, replies, len(prompts))

        with _prompt_named("prompt"):
            prompts = [await encode(prompt) for prompt in body.prompts]
            echoes: list[str | None] = [None] * len(prompts)
            if body.echo:
                both = zip(body.prompts, prompts, strict=True)
                echoes = [text if isinstance(text, str) else self._text(tokens) for text, tokens in both]
            return await self._generate(request, body, prompts, answer)

    async def respond(self, request: Request) -> Response:
        body = await _body(request, ResponseRequest, response_fields)
        chat = body.chat()

        def answer(tokens: Sequence[int], choices: int) -> Answer:
            splitter = self._llm.chat_template.answers(tokens, chat.called)
            return ResponseAnswer(body, self._name, splitter, self._llm.tokenizer)

        with _prompt_named("input"):
            return await self._chat(request, chat, answer)

    async def models(self, request: Request) -> Response:
        ends = {"first_id": self._names[0], "last_id": self._names[-1], "has_more": False}
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._names]} | ends)

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._check_model(name)
        return JSONResponse(self._model(name))

    async def tokenize(self, request: Request) -> Response:
        body = await _body(request, TokenizeRequest)
        parts = self._llm.encoded(body.content, special=body.add_special)
        tokens = await self._tokenized(request, parts)
        return JSONResponse({"tokens": tokens})

    async def document(self, request: Request) -> Response:
        """Returns the text of a file that the page has read, and notices of what cannot be read of it."""
        body = await _body(request, DocumentRequest)
        try:
            data = base64.b64decode(body.data, validate=True)
        except (binascii.Error, ValueError):
            raise ApiError(400, "data is not base64", "invalid_value", "data") from None
        if body.encoding is not None:
            try:
                check_encoding(body.encoding)
            except UsageError as error:
                raise ApiError(400, str(error), "invalid_value", "encoding") from None
        notices = list[str]()
        text = await asyncio.to_thread(document_text, body.name, data, notices.append, body.encoding)
        return JSONResponse({"text": text, "notices": notices})

    async def health(self, request: Request) -> Response:
        if self._worker.closing:
            raise Closing
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        store = self._llm.engine.store
        gauges = {
            "running": ("Requests that are read or continued.", self._worker.running),
            "waiting": ("Requests in the queue.", self._worker.waiting),
            "kept_prefixes": ("Prefixes whose KV is kept in memory.", self._worker.kept_prefixes),
            "kv_bytes": ("Bytes of KV in memory.", store.used_bytes),
        }
        return PlainTextResponse(self._metrics.text(gauges), media_type="text/plain; version=0.0.4")

    # What they share:

    def _model(self, name: str) -> dict[str, object]:
        """Returns the model by one of its names, as OpenAI's clients, vLLM's and Anthropic's read it."""
        positions = self._llm.engine.target.max_positions
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "offload-rt",
            "max_model_len": positions,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._began, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": positions,
        }

    def _check_model(self, name: str | None) -> None:
        """Raises ApiError for another model than the one that is served; None: any."""
        if name is not None and name not in self._names:
            message = f"model {name!r} is not served here: use {' or '.join(map(repr, self._names))}"
            raise ApiError(404, message, "model_not_found", "model")

    async def _tokenized(
        self, request: Request, parts: Iterator[list[int]], most: int | None = None
    ) -> list[int]:
        """Returns the tokens of a text that come in parts; other requests have their turns between them.

        Args:
            most: number of tokens beyond which the text is refused, without reading on; None: no limit.

        Raises:
            ContextTooLong: there are more.
            ClientGone: nobody waits for them any more.
        """
        tokens = list[int]()
        while True:
            async with self._tokenizing:
                part = await asyncio.to_thread(next, parts, None)
            if part is None:
                return tokens
            tokens += part
            if most is not None and len(tokens) > most:
                self._refuse_prompt(len(tokens))
            if await request.is_disconnected():
                raise ClientGone

    def _check_characters(self, characters: int) -> None:
        """Raises ContextTooLong for a text that is too long whatever its tokens are."""
        longest = self._longest_token
        if longest is not None and characters > longest * self._positions:
            self._refuse_prompt(-(-characters // longest))

    def _refuse_prompt(self, least_tokens: int) -> NoReturn:
        most, name = self._positions, self._llm.engine.target.name
        raise ContextTooLong(
            f"at least {least_tokens} prompt tokens are more than the {most} positions of {name}: use at most"
            f" {most - 1} prompt tokens"
        )

    @property
    def _positions(self) -> int:
        return self._llm.engine.target.max_positions

    @cached_property
    def _longest_token(self) -> int | None:
        tokenizer = self._llm.tokenizer
        return None if tokenizer is None else longest_token(tokenizer)

    def _check_choices(self, choices: int) -> None:
        """Raises UsageError for a request of more choices than an idle server takes."""
        if choices > (limit := self._worker.most_jobs):
            raise UsageError(f"{choices} choices are more than the {limit} that fit: ask for fewer at a time")

    def _limit(self, body: GenerationRequest, tokens: Sequence[int]) -> int:
        """Returns the most new tokens behind a prompt. Raises ContextTooLong where not one fits."""
        target = self._llm.engine.target
        limit = max(1, min(body.limit or self._max_tokens, target.max_positions - len(tokens)))
        check_positions(target, len(tokens), limit)
        return limit

    async def _chat(
        self, request: Request, body: ChatRequest, answer: Callable[[Sequence[int], int], Answer]
    ) -> Response:
        """Answers a request for an answer to messages, of any protocol.

        Args:
            answer: returns the protocol's answer to a prompt of these tokens, of so many choices.
        """
        self._check_choices(body.n)
        tokens = await self._prompt(request, body)
        return await self._generate(request, body, [tokens], partial(answer, tokens))

    async def _prompt(self, request: Request, body: ChatRequest) -> list[int]:
        """Returns the tokens of the prompt that the messages of a request make."""
        template = self._llm.chat_template
        thinking = template.thoughts(body.thinking, body.json_schema)
        self._check_characters(text_length(body.messages))
        parts = await asyncio.to_thread(
            template.encoded,
            body.messages,
            thinking=thinking,
            tools=body.called,
            effort=body.effort,
            answer=body.add_generation_prompt is not False,
            continue_final=body.continued,
            most=self._positions,
        )
        return await self._tokenized(request, parts, most=self._positions)

    async def _generate(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[list[int]],
        answer: Callable[[int], Answer],
    ) -> Response:
        """Answers a request for continuations of prompts, as one object or as a stream.

        Args:
            answer: returns the protocol's answer of so many choices, those of the first prompt first.
        """
        self._check_model(body.model)
        suggested = self._llm.model_sampling or SamplingParams()
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        def send(choice: int, event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, (choice, event))

        jobs = list[Job]()
        for tokens in prompts:
            for params in body.params(suggested, self._limit(body, tokens)):
                if body.thinking:
                    _, params = self._llm.with_thoughts(True, params)
                params = self._llm.checked_params(params)
                jobs.append(Job(tokens, params, partial(send, len(jobs)), body.scored))
        answering = Answering(jobs, answer(len(jobs)), events)
        self._worker.submit(jobs)
        return await (answering.stream if body.stream else answering.whole)(request)

    def _base(self, request_id: str, body: GenerationRequest, choice: int) -> tuple[Any, ...]:
        """Returns what a reply of OpenAI's completions takes first; see `Reply`."""
        name, tokenizer = self._name, self._llm.tokenizer
        return request_id, name, choice, tokenizer, body.alternatives, body.prompt_logprobs

    def _text(self, tokens: Sequence[int]) -> str:
        """Returns the text of a prompt that was given as token IDs; empty without a tokenizer."""
        return "" if self._llm.tokenizer is None else self._llm.decode(tokens, special=True)

    def _completions(self, body: GenerationRequest, replies: Sequence[Reply], prompts: int = 1) -> Answer:
        options = body.stream_options or StreamOptions()
        return CompletionAnswer(
            replies,
            prompts=prompts,
            with_usage=options.include_usage,
            with_progress=body.return_progress,
        )


@contextmanager
def _prompt_named(field: str) -> Iterator[None]:
    """Names the field that has the prompt in the refusal of one that is too long."""
    try:
        yield
    except ContextTooLong as error:
        raise ApiError(400, str(error), "context_length_exceeded", field) from None


async def _body(
    request: Request,
    kind: type[Body],
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = supported,
) -> Body:
    """Returns the body of a request, checked. Raises ApiError, which names the field.

    Args:
        fields: returns the fields of `kind` among those of the body.
    """
    try:
        values = json.loads(await request.body())
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {first_line(error)}", "invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", "invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_json")
    try:
        return kind.model_validate(fields(values))
    except ValidationError as error:
        # Of alternatives, such as the kinds of a prompt, the first one that was tried is named.
        first = error.errors(include_url=False, include_input=False)[0]
        names = [str(part) for part in first["loc"]]
        param = names[0] if names else None
        if first["type"] == "extra_forbidden":
            raise ApiError(
                400, f"unknown parameter {'.'.join(names)}: leave it out", "unknown_parameter", param
            ) from None
        message = f"{'.'.join(names)}: {first['msg']}"
        raise ApiError(400, message, "invalid_value", param) from None


def create_app(
    service: Service,
    metrics: Metrics,
    *,
    api_key: str | None = None,
    body_bytes: int = 2**26,
    hosts: frozenset[str] | None = None,
    cors_origins: Sequence[str] = (),
) -> Starlette:
    """Returns the ASGI application of a service.

    Args:
        api_key, body_bytes, hosts: see `Limits`.
        cors_origins: sites whose pages may use the server.
    """

    def route(path: str, answer: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        async def guarded(request: Request) -> Response:
            try:
                return await answer(request)
            except ClientGone:
                return Response(status_code=499)
            except (Exception, asyncio.CancelledError) as error:
                return error_response(request.scope, *explained(error))

        return Route(path, guarded, methods=[method])

    async def not_found(request: Request, error: HTTPException) -> Response:
        served = ", ".join(one.path for one in routes)
        message = f"{request.method} {request.url.path}: {error.detail}; there are {served}"
        return error_response(request.scope, error.status_code, message, "http")

    limits = Middleware(
        Limits, api_key=api_key, body_bytes=body_bytes, hosts=hosts, on_answer=metrics.answered
    )
    origins, methods = list(cors_origins), ["GET", "POST"]
    # OpenAI's client sends headers of its own.
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])
    page_files = PageFiles()
    routes: list[Route | Mount] = [
        route("/v1/chat/completions", service.chat, "POST"),
        route("/v1/completions", service.complete, "POST"),
        route("/v1/messages", service.messages, "POST"),
        route("/v1/messages/count_tokens", service.count_tokens, "POST"),
        route("/v1/responses", service.respond, "POST"),
        route("/v1/models", service.models, "GET"),
        route("/v1/models/{model:path}", service.model, "GET"),
        route("/tokenize", service.tokenize, "POST"),
        route("/document", service.document, "POST"),
        route("/health", service.health, "GET"),
        route("/metrics", service.metrics, "GET"),
        route("/", page_files.page, "GET"),
        Mount("/page", page_files),
    ]
    return Starlette(
        routes=routes,
        middleware=[cors, limits] if cors_origins else [limits],
        exception_handlers={HTTPException: not_found},  # type: ignore[dict-item]
    )
