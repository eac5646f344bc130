"""PageFiles: the page at `/`, from files of this package. It asks for nothing from elsewhere, and may not.

The files hold no secret, so they need no key; what they ask the server for does.
"""

import os
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"
PREFIX = "/page/"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a new version of the server is a new page
}


def is_open(path: str) -> bool:
    """Whether a path is one of the page's."""
    return path == "/" or path.startswith(PREFIX)


class PageFiles(StaticFiles):
    """The folder, each file with the headers."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def routes() -> list[BaseRoute]:
    """`/`, and what it is made of."""
    files = PageFiles(directory=FOLDER)

    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    return [Route("/", index), Mount(PREFIX.rstrip("/"), files)]
