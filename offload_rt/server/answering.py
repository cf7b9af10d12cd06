"""Answers a request from the events of its jobs: as one object, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from offload_rt.engine.results import TokenEvent
from offload_rt.errors import UsageError, first_line
from offload_rt.planning.request import ContextTooLong
from offload_rt.server.errors import ApiError, error_json
from offload_rt.server.replies import Json, Reply, timings, usage
from offload_rt.server.schema import GenerationRequest
from offload_rt.server.worker import Closing, Event, Finished, Job, PromptProgress, QueueFull

WAITING = ": waiting\n\n"
"""A comment in a stream."""
KEEP_ALIVE_S = 5.0
"""Time without an event after which a stream sends a comment, so that no client thinks it dead."""


class ClientGone(Exception):
    """The client has closed its connection."""


class Answering:
    """A request under way: jobs, and the events that they send.

    Args:
        events: pairs of a job's number and its event.
        prompts: number of prompts; each has as many jobs.
    """

    def __init__(
        self,
        request: GenerationRequest,
        jobs: Sequence[Job],
        replies: Sequence[Reply],
        events: asyncio.Queue[tuple[int, Event]],
        prompts: int,
    ) -> None:
        self._request = request
        self._jobs = jobs
        self._replies = replies
        self._events = events
        self._prompts = prompts

    def cancel(self) -> None:
        """Ends the jobs that have not ended."""
        for job in self._jobs:
            job.cancelled = True

    async def whole(self, request: Request) -> Response:
        """Waits for all choices and returns them in one object."""
        try:
            while not self._ended:
                await self._chunks(request)
        finally:
            self.cancel()
        choices = [reply.choice() for reply in self._replies]
        answer = self._replies[0].whole(choices, usage=usage(self._finished, self._prompts))
        return JSONResponse(answer | self._timings())

    async def stream(self, request: Request) -> Response:
        """Returns a stream of server-sent events. It begins at once: a later refusal is an event."""
        return EventStream(self._lines(request), self.cancel)

    async def _lines(self, request: Request) -> AsyncIterator[str]:
        try:
            yield WAITING  # so that a client whose turn is late sees that it waits
            while not self._ended:
                chunks = await self._chunks(request)
                if chunks is None:
                    yield WAITING
                for chunk in chunks or ():
                    yield _line(chunk)
            options = self._request.stream_options
            if options is not None and options.include_usage:
                yield _line(self._replies[0].chunk([], usage=usage(self._finished, self._prompts)))
            yield "data: [DONE]\n\n"
        except ClientGone:
            pass
        except Exception as error:  # the status has been sent: an error is an event
            yield _line(error_json(*explained(error)))

    @property
    def _finished(self) -> list[Finished]:
        return [reply.finished for reply in self._replies if reply.finished is not None]

    @property
    def _ended(self) -> bool:
        return len(self._finished) == len(self._jobs)

    async def _chunks(self, request: Request) -> list[Json] | None:
        """Returns the chunks of the next event; None: there was none for a while.

        Raises:
            ClientGone: the client closed its connection.
            Exception: the event is an error.
        """
        event = asyncio.create_task(self._events.get())
        disconnection = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait(
                (event, disconnection), timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED
            )
            if event.done():
                return self._take(*event.result())
            if disconnection.done():
                raise ClientGone
            return None
        finally:
            event.cancel()
            disconnection.cancel()

    def _take(self, index: int, event: Event) -> list[Json]:
        reply = self._replies[index]
        if isinstance(event, Exception):
            raise event
        if isinstance(event, PromptProgress):
            return [reply.progress(event)] if self._request.return_progress else []
        if isinstance(event, TokenEvent):
            chunk = reply.token(event)
            return [] if chunk is None else [chunk]
        *chunks, last = reply.finish(event)
        return [*chunks, last | self._timings() if self._ended else last]

    def _timings(self) -> Json:
        return {"timings": timings(self._finished[0])} if len(self._jobs) == 1 else {}


class EventStream(StreamingResponse):
    """Server-sent events; `on_end` is called however the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncIterator[str], on_end: Callable[[], object]) -> None:
        # Proxies must not hold tokens back.
        super().__init__(lines, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError as cut:
            last = _line(error_json(*explained(cut))).encode()
            with suppress(TimeoutError):  # the client may not read
                await asyncio.wait_for(send({"type": "http.response.body", "body": last}), 1)
        finally:
            self._on_end()


def _line(chunk: Json) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def explained(error: BaseException) -> tuple[int, str, str, str | None]:
    """Returns status, message, code and field of an error."""
    if isinstance(error, ApiError):
        return error.status, str(error), error.code, error.param
    if isinstance(error, ContextTooLong):
        return 400, str(error), "context_length_exceeded", "messages"
    if isinstance(error, UsageError):
        return 400, str(error), "invalid_request", None
    if isinstance(error, QueueFull):
        return 429, "too many requests are waiting: try again later", "queue_full", None
    if isinstance(error, Closing | asyncio.CancelledError):  # cancelled: it has waited long enough
        return 503, "the server is shutting down", "closing", None
    return 500, f"the engine failed: {first_line(error)}", "engine_error", None
