"""Which pages of other sites may read answers (CORS). Without --cors none may.

A browser asks first, without a key, whether a page may send a request (a preflight), and shows the page an answer only
if that names the page's site. Routes that change state or show what was recorded take no part, and neither do
websockets: pages of other sites never reach them through this.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.form import Headers

ANY: Final = "*"
_PORTS: Final = {"http": ":80", "https": ":443"}
_MOST: Final = 1024  # bytes of the list of headers that a preflight asks for
_SHOWN: Final = b"X-Request-Id, X-Should-Retry, Retry-After"


class Cors:
    """origins: of pages, such as http://localhost:3000; `*` is any."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = {_as_sent(origin) for origin in origins}

    def admits(self, exchange: Exchange, route: Route | None) -> bool:
        """Whether the request is from a page that may read the answer. Its headers are set then."""
        origin = exchange.headers.get(b"origin")
        if not self._origins or origin is None or (route is not None and not _takes_part(route)) or exchange.upgrades:
            return False
        if ANY.encode() in self._origins:
            exchange.cross = [(b"access-control-allow-origin", b"*")]
        elif origin.lower() in self._origins:
            exchange.cross = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
        else:
            return False
        exchange.cross.append((b"access-control-expose-headers", _SHOWN))
        return True


def _as_sent(origin: str) -> bytes:
    """As browsers send it: they leave out the port that its scheme has anyway."""
    scheme, _, site = origin.lower().partition("://")
    return f"{scheme}://{site.removesuffix(_PORTS[scheme])}".encode() if site else origin.encode()


def _takes_part(route: Route) -> bool:
    return route.checked and not (route.changes or route.own_pages)


def is_preflight(exchange: Exchange) -> bool:
    """Whether a browser asks what it may send."""
    return exchange.method == "OPTIONS" and b"access-control-request-method" in exchange.headers


def answer_preflight(exchange: Exchange, route: Route) -> None:
    """Say what may be sent: this path's method, and the headers that were asked for."""
    asked = exchange.headers.get(b"access-control-request-headers", b"")
    told: Headers = [(b"access-control-allow-methods", route.method.encode()), (b"access-control-max-age", b"600")]
    if asked and len(asked) <= _MOST:
        told.append((b"access-control-allow-headers", asked))
    exchange.answer(200, b"", extra=told)
