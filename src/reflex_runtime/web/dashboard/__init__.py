"""The pages that show a server while it runs: `/dashboard`, and `/feeds` of cameras, from files of their own, and the
stream that they read.

The files hold no data, so they need no key; the stream does, where there is one. The page asks for the key and sends it
in a header: `EventSource` could send it only in the address, where it would stand in logs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from reflex_runtime.web.errors import PLAIN
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route
from reflex_runtime.web.watchers import Watchers

PAGE: Final = "/dashboard"
GRID: Final = "/feeds"
STREAM: Final = "/dashboard/stream"
_FILES: Final = {
    "index.html": b"text/html; charset=utf-8",
    "feeds.html": b"text/html; charset=utf-8",
    "grid.js": b"text/javascript; charset=utf-8",
    "link.js": b"text/javascript; charset=utf-8",
    "dashboard.js": b"text/javascript; charset=utf-8",
    "strip.js": b"text/javascript; charset=utf-8",
    "feeds.js": b"text/javascript; charset=utf-8",
    "charts.js": b"text/javascript; charset=utf-8",
    "tables.js": b"text/javascript; charset=utf-8",
    "uplot.js": b"text/javascript; charset=utf-8",
    "uplot.css": b"text/css; charset=utf-8",
    "dashboard.css": b"text/css; charset=utf-8",
}
_POLICY: Final = (
    b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS: Final = [
    (b"cache-control", b"no-cache"),
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


def dashboard_routes(watchers: Watchers) -> list[Route]:
    """The page, its files and its stream."""
    routes = [Route(STREAM, watchers.watch, own_pages=True, operators=True, form=PLAIN)]
    routes.append(Route(PAGE, partial(_send, "index.html"), open=True))
    return routes + [Route(f"{PAGE}/{name}", partial(_send, name), open=True) for name in _FILES]


def grid_route(others: tuple[Route, ...] = ()) -> Route:
    """The page with a picture of every feed. others: see `Route`."""
    return Route(GRID, partial(_send, "feeds.html"), open=True, others=others)


async def _send(name: str, request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, (Path(__file__).parent / name).read_bytes(), _FILES[name], list(_HEADERS))
