"""Which pages of other sites may read answers (CORS). Without --cors none may.

A browser asks first, without a key, whether a page may send a request (a preflight), and shows the page an answer only
if that names the page's site. Routes that change state or show what was recorded take no part, and neither do
websockets: pages of other sites never reach them through this.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from reflex_runtime.web.form import Headers
from reflex_runtime.web.request import Handler, HttpRequest, HttpResponse, Route, WebSocket

ANY: Final = "*"
_PORTS: Final = {"http": ":80", "https": ":443"}
_MOST: Final = 1024  # bytes of the list of headers that a preflight asks for
_SHOWN: Final = b"X-Request-Id, X-Should-Retry, Retry-After"


class Cors:
    """origins: of pages, such as http://localhost:3000; `*` is any."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = {_as_sent(origin) for origin in origins}

    def admits(self, request: HttpRequest, route: Route | None) -> bool:
        """Whether the request is from a page that may read the answer. Its headers are set then."""
        origin = request.headers.get(b"origin")
        apart = isinstance(request, WebSocket) or (route is not None and not _takes_part(route))
        if not self._origins or origin is None or apart:
            return False
        if ANY.encode() in self._origins:
            request.cross = [(b"access-control-allow-origin", b"*")]
        elif origin.lower() in self._origins:
            request.cross = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
        else:
            return False
        request.cross.append((b"access-control-expose-headers", _SHOWN))
        return True


def _as_sent(origin: str) -> bytes:
    """As browsers send it: they leave out the port that its scheme has anyway."""
    scheme, _, site = origin.lower().partition("://")
    return f"{scheme}://{site.removesuffix(_PORTS[scheme])}".encode() if site else origin.encode()


def _takes_part(route: Route) -> bool:
    return not (route.changes or route.own_pages)


def is_preflight(request: HttpRequest) -> bool:
    """Whether a browser asks what it may send."""
    return request.method == "OPTIONS" and b"access-control-request-method" in request.headers


def answer_preflight(route: Route) -> Handler:
    """Says what may be sent: this path's method, and the headers that were asked for."""

    async def answer(request: HttpRequest) -> HttpResponse:
        asked = request.headers.get(b"access-control-request-headers", b"")
        told: Headers = [(b"access-control-allow-methods", route.method.encode()), (b"access-control-max-age", b"600")]
        if asked and len(asked) <= _MOST:
            told.append((b"access-control-allow-headers", asked))
        return HttpResponse(200, headers=told)

    return answer
