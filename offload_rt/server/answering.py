"""Answers a request from the events of its jobs: as one object, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from offload_rt.errors import UsageError, first_line
from offload_rt.planning.request import ContextTooLong
from offload_rt.server.jobs.worker import Closing, Event, Job, QueueFull
from offload_rt.server.protocols.answer import Answer, Message
from offload_rt.server.protocols.errors import ApiError
from offload_rt.system import clock

KEEP_ALIVE_S = 5.0
"""Time without a message after which a stream says that it waits, so that no client thinks it dead."""


class ClientGone(Exception):
    """The client has closed its connection."""


class Answering:
    """A request under way: jobs, and the events that they send.

    Args:
        jobs: of the choices, in their order.
        answer: what the protocol makes of the events.
        events: pairs of a job's number and its event.
    """

    def __init__(self, jobs: Sequence[Job], answer: Answer, events: asyncio.Queue[tuple[int, Event]]) -> None:
        self._jobs = jobs
        self._answer = answer
        self._events = events

    def cancel(self) -> None:
        """Ends the jobs that have not ended."""
        for job in self._jobs:
            job.cancelled = True

    async def whole(self, request: Request) -> Response:
        """Waits for all choices and returns them in one object."""
        try:
            while not self._answer.ended:
                await self._next(request)
        finally:
            self.cancel()
        return JSONResponse(self._answer.whole())

    async def stream(self, request: Request) -> Response:
        """Returns a stream of server-sent events. It begins at once: a later refusal is an event."""
        return EventStream(self._lines(request), self.cancel, self._failed)

    async def _lines(self, request: Request) -> AsyncIterator[str]:
        answer = self._answer
        try:
            yield answer.waiting  # so that a client whose turn is late sees that it waits
            for message in answer.begin():
                yield message.line
            due = clock.now() + KEEP_ALIVE_S
            while not answer.ended:
                lines = [message.line for message in await self._next(request, due - clock.now())]
                if not lines and clock.now() >= due:
                    lines = [answer.waiting]
                for line in lines:
                    yield line
                    due = clock.now() + KEEP_ALIVE_S
            for message in answer.end():
                yield message.line
        except ClientGone:
            pass
        except Exception as error:  # the status has been sent: an error is an event
            yield self._failed(error)

    def _failed(self, error: BaseException) -> str:
        return self._answer.failed(*explained(error)).line

    async def _next(self, request: Request, timeout_s: float | None = None) -> list[Message]:
        """Returns the messages of the next event; none where it has none, or does not come in time.

        Args:
            timeout_s: time that it may take; None: any time.

        Raises:
            ClientGone: the client closed its connection.
            Exception: the event is an error.
        """
        event = asyncio.create_task(self._events.get())
        disconnection = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((event, disconnection), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if event.done():
                return self._answer.take(*event.result())
            if disconnection.done():
                raise ClientGone
            return []
        finally:
            event.cancel()
            disconnection.cancel()


class EventStream(StreamingResponse):
    """Server-sent events.

    Args:
        on_end: called however the stream ends.
        failed: returns the event of an error that cuts the stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        lines: AsyncIterator[str],
        on_end: Callable[[], object],
        failed: Callable[[BaseException], str],
    ) -> None:
        # Proxies must not hold tokens back.
        super().__init__(lines, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_end = on_end
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError as cut:
            last = self._failed(cut).encode()
            with suppress(TimeoutError):  # the client may not read
                await asyncio.wait_for(send({"type": "http.response.body", "body": last}), 1)
        finally:
            self._on_end()


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
