"""Errors as clients of OpenAI and of Anthropic read them."""

from __future__ import annotations

import re

from starlette.responses import JSONResponse
from starlette.types import Scope

from offload_rt.errors import shortened

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}
"""OpenAI's type of an error by HTTP status; other statuses below 500 are `invalid_request_error`."""
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's type of an error, likewise; other statuses from 500 are `api_error`."""
CROWDED = "too_many_connections"
"""Code of the refusal of a connection beyond the limit."""
ANTHROPIC_PATHS = re.compile("/v1/messages(/|$)")
"""Paths whose clients are Anthropic's."""


class ApiError(Exception):
    """A request that is refused.

    Args:
        code: a word that programs read.
        param: the field that is wrong.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def error_json(status: int, message: str, code: str, param: str | None = None) -> dict[str, object]:
    """Returns the body of an error."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": sendable(message), "type": kind, "param": param, "code": code}}


def anthropic_error_json(status: int, message: str, code: str, request_id: str) -> dict[str, object]:
    """Returns the body of an error in Anthropic's form."""
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if code == "context_length_exceeded":  # words by which Claude Code knows that it must compact the chat
        message = f"prompt is too long: {message}"
    error = {"type": kind, "message": sendable(message)}
    return {"type": "error", "error": error, "request_id": request_id}


def sendable(message: str) -> str:
    """Returns a message shortened; a request may hold halves of surrogate pairs, and its error name them."""
    return shortened(message).encode(errors="backslashreplace").decode()


def error_response(
    scope: Scope, status: int, message: str, code: str, param: str | None = None
) -> JSONResponse:
    """Returns the response of an error to a request, in the form that the clients of its path read."""
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    if status in (401, 403, 408, 413, 415) or code == CROWDED:  # the rest of the body is not read
        headers["Connection"] = "close"
    if ANTHROPIC_PATHS.match(scope["path"]):
        body = anthropic_error_json(status, message, code, scope["state"]["request_id"])
    else:
        body = error_json(status, message, code, param)
    return JSONResponse(body, status, headers)
