"""A limit of connections, and of the time that the headers of a request may take."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from offload_rt.server.protocols.errors import CROWDED, error_json

HEADER_TIMEOUT_S = 10.0
REFUSED_SHARE = 0.25
"""Share of the limit up to which connections beyond it are told that they are refused; others are closed."""


class Connection(H11Protocol):
    """A connection of uvicorn's whose requests begin in time.

    Requests on a connection beyond the limit are marked (`CROWDED` in their state is the limit), so that
    `Limits` refuses them as it refuses others.
    Connections that are open and silent are closed, and so are those that send headers without end.

    Args:
        most: largest number of connections.
        header_timeout_s: seconds that the headers of a request may take.
    """

    def __init__(
        self, *args: Any, most: int, header_timeout_s: float = HEADER_TIMEOUT_S, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._most = most
        self._header_timeout_s = header_timeout_s
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        count = len(self.connections)
        if count > self._most + max(1, int(self._most * REFUSED_SHARE)):
            transport.abort()
            return
        if count > self._most:
            self.app_state = {**self.app_state, CROWDED: self._most}
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._await_headers(False)

    def _await_headers(self, open: bool = True) -> None:
        """Starts the time of headers that have not all come, and ends it where they have."""
        if open and self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            if self._late is None:
                self._late = self.loop.call_later(self._header_timeout_s, self._refuse)
        elif self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self) -> None:
        self._late = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:  # a request has begun
            limit = f"{self._header_timeout_s:g} seconds"
            message = f"the headers of the request did not come within {limit}: send them in one go"
            self._send_error(408, message, "header_timeout")
        self.transport.close()

    def _send_error(self, status: int, message: str, code: str) -> None:
        body = json.dumps(error_json(status, message, code)).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        headers.append(("connection", "close"))
        response = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


def connection_class(most: int, header_timeout_s: float = HEADER_TIMEOUT_S) -> Any:
    """Returns what uvicorn's `Config` takes as `http`; see `Connection`."""
    return partial(Connection, most=most, header_timeout_s=header_timeout_s)
