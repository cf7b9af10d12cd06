"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from starlette.responses import JSONResponse

from offload_rt.errors import shortened

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}
"""OpenAI's type of an error by HTTP status; other statuses below 500 are `invalid_request_error`."""


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
    # A request may hold halves of surrogate pairs, and its error name them.
    message = shortened(message).encode(errors="backslashreplace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(status: int, message: str, code: str, param: str | None = None) -> JSONResponse:
    """Returns the response of an error."""
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    if status in (401, 403, 408, 413, 415):  # the rest of the body is not read
        headers["Connection"] = "close"
    return JSONResponse(error_json(status, message, code, param), status, headers)
