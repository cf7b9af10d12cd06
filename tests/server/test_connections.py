"""Connections beyond a limit are refused, and those that send nothing, or headers without end, are closed."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import pytest
from support.serving import Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(config="lookup", layers=1, connections=3, header_timeout_s=0.3) as one:
        yield one


def connected(served: Served) -> socket.socket:
    address = urlsplit(served.address)
    assert address.hostname is not None and address.port is not None
    return socket.create_connection((address.hostname, address.port), timeout=30)


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def test_a_connection_that_sends_nothing_is_closed(served: Served) -> None:
    with closing(connected(served)) as connection:
        assert received(connection) == b""


def test_headers_that_do_not_end_are_refused(served: Served) -> None:
    with closing(connected(served)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ")
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"did not come within 0.3 seconds" in answer


def test_the_next_request_on_a_connection_has_its_time_too(served: Served) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with closing(connected(served)) as connection:
        connection.sendall(request)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        time.sleep(0.5)  # the time of the first one's headers is over
        connection.sendall(request[:20])
        assert b"HTTP/1.1 408 Request Timeout" in received(connection)


def test_connections_beyond_the_limit_are_refused_as_json() -> None:
    with serving(config="lookup", layers=1, connections=3) as served:
        with ExitStack() as open_connections:
            others = [open_connections.enter_context(closing(connected(served))) for _ in range(3)]
            for path, word in (("/v1/models", "server_error"), ("/v1/messages", "overloaded_error")):
                status, text, headers = served.call(path, {} if path == "/v1/messages" else None)
                error = json.loads(text)["error"]
                assert (status, error["type"]) == (503, word) and headers["connection"] == "close"
                assert "more than 3 connections are open" in error["message"]
            with closing(connected(served)), closing(connected(served)) as further:
                assert received(further) == b""  # without a word
            others[0].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert others[0].recv(1 << 16).startswith(b"HTTP/1.1 200")
        served.wait_until(lambda: served.call("/health")[0] == 200)
