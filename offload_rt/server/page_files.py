"""Serves the page on which users try a model with a document: static files, under a strict policy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).with_name("page")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "connect-src 'self'",
        "img-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""The page loads from this server and calls it, and nothing else, whatever a model writes."""
HEADERS = {
    "Cache-Control": "no-cache",  # so that a new version of one file is never used with old ones
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFiles(StaticFiles):
    """ASGI application of the files of the page, for the path `/page`; `page` answers `/`."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    async def page(self, request: Request) -> Response:
        return await self.get_response("page.html", request.scope)

    def file_response(self, full_path: str | os.PathLike[str], *args: Any, **options: Any) -> Response:
        response = super().file_response(full_path, *args, **options)
        response.headers.update(HEADERS)
        return response
