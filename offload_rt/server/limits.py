"""Refuses requests before they are read: wrong keys and hosts, forms of other sites, large bodies."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from offload_rt.server.protocols.errors import CROWDED, error_response

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""What a client may name its request, to find it again in the answer."""
REQUEST_ID_HEADERS = (b"x-request-id", b"request-id")
"""Headers of an answer that name its request: OpenAI's clients read the first one, Anthropic's the second."""
BODY_TIMEOUT_S = 60.0
PUBLIC = re.compile("/|/health|/page/.*")
"""Paths that take no key: none tells anything of a user."""


class Limits:
    """ASGI middleware around the whole server.

    The `state` of a request holds its `request_id`.

    Args:
        api_key: what clients must send as a bearer token, or as Anthropic's do; None: nothing.
        body_bytes: the largest body that is read.
        hosts: names that the `Host` header may have; None: any. A page of another site can reach a server on
            this machine under a name of its own (DNS rebinding), and is refused by that name.
        on_answer: called with the status of each answer.
        body_timeout_s: seconds that the next piece of a body may take.
    """

    def __init__(
        self,
        app: App,
        *,
        api_key: str | None,
        body_bytes: int,
        hosts: frozenset[str] | None,
        on_answer: Callable[[int], object],
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._app = app
        self._api_key = api_key
        self._body_bytes = body_bytes
        self._hosts = hosts
        self._on_answer = on_answer
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._on_answer(message["status"])
                own = [(name, request_id.encode()) for name in REQUEST_ID_HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        refusal = self._refused(scope, headers)
        if refusal is not None:
            await error_response(scope, *refusal)(scope, receive, counted)
            return
        body = bytearray()
        while True:
            try:
                message = await asyncio.wait_for(receive(), self._body_timeout_s)
            except TimeoutError:
                await error_response(scope, *self._too_slow())(scope, receive, counted)
                return
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > self._body_bytes:
                await error_response(scope, *self._too_large())(scope, receive, counted)
                return
            if not message.get("more_body"):
                break
        ended = False

        async def replay() -> MutableMapping[str, Any]:
            nonlocal ended
            if ended:
                return await receive()
            ended = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self._app(scope, replay, counted)

    def _refused(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str, str] | None:
        """Returns status, message and code of a refusal; None where the request may be read."""
        if (most := scope.get("state", {}).get(CROWDED)) is not None:
            message = f"more than {most} connections are open: close some, or serve with --max-connections"
            return 503, message, CROWDED
        host = re.sub(r":\d*$", "", headers.get("host", "")).strip("[]").lower()
        if self._hosts is not None and host not in self._hosts:
            return (
                403,
                f"host {host!r} is not this server: use http://127.0.0.1, or serve with --host",
                "host",
            )
        bearer = re.sub("^Bearer +", "", headers.get("authorization", ""), flags=re.IGNORECASE)
        key = bearer or headers.get("x-api-key", "")
        open_to_all = PUBLIC.fullmatch(scope["path"]) or scope["method"] == "OPTIONS"
        if self._api_key and not open_to_all and not _equal(key, self._api_key):
            return (
                401,
                "the API key is missing or wrong: send it as a bearer token or as x-api-key",
                "invalid_api_key",
            )
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        # Browsers let any page send forms and plain text to this server, but ask before they send JSON.
        if scope["method"] == "POST" and kind != "application/json":
            return 415, f"content-type {kind!r} is not supported: send application/json", "content_type"
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._body_bytes:
            return self._too_large()
        return None

    def _too_slow(self) -> tuple[int, str, str]:
        limit = f"{self._body_timeout_s:g} seconds"
        return 408, f"nothing more of the body came for {limit}: send it in one go", "body_timeout"

    def _too_large(self) -> tuple[int, str, str]:
        limit = f"{self._body_bytes / 2**20:g} MiB"
        return 413, f"the body is larger than {limit}: shorten it, or serve with --max-body", "body_too_large"


def _equal(key_of_client: str, key: str) -> bool:
    """Returns whether a header has the key, in UTF-8."""
    return hmac.compare_digest(key_of_client.encode("latin-1"), os.fsencode(key))
