"""Who may use a server. With a key: programs that send it; operators' paths have a key of their own. Without a key:
programs on this machine and, if the server is bound to other addresses, on its network, but no web pages. With --cors:
pages of the named sites.

A browser lets every web page send a simple POST to any address, and puts the page's site into `Origin`. A site that
rebinds its DNS name to this machine makes its pages same-origin; the browser then puts that name into `Host`. Without a
key, therefore, both headers must name this server. Without the operators' key, changes of state are accepted from
loopback only, and not through a proxy: behind a proxy on this machine every caller has a loopback address.

Before a page of another site sends a request, its browser sends a preflight without a key. The page can read an answer
only if its headers allow the page's site. Routes that change state or show recordings never do, nor do websockets.
"""

from __future__ import annotations

import hmac
import logging
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from reflex_runtime.settings.declare import did_you_mean
from reflex_runtime.web.errors import ClientError, Forbidden, Headers, Overloaded, Unauthorized
from reflex_runtime.web.request import Handler, HttpRequest, HttpResponse, Route, Seldom, WebSocket

log = logging.getLogger("reflex.server")

ANY: Final = "*"
_KEPT: Final = 256  # accepted values of Host, so that the next request needs only a look-up
_FORWARDED: Final = (  # headers of proxies
    b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"x-cluster-client-ip", b"x-original-forwarded-for",
    b"x-envoy-external-address", b"true-client-ip", b"cf-connecting-ip", b"fastly-client-ip", b"fly-client-ip",
)  # fmt: skip
_ONCE: Final = (b"authorization", b"x-api-key", b"origin", b"content-type", b"content-encoding")
OURS: Final = b"x-reflex-"
_EVERYWHERE: Final = (b"x-reflex-key", b"x-reflex-episode")  # balancers read the second
_PORTS: Final = {"http": ":80", "https": ":443"}
Client = tuple[str, int] | None  # as uvicorn has it: address and port
UNIX: Final = "unix"
_CROWDED: Final = Seldom()
_MOST: Final = 1024  # bytes of a preflight's list of headers
_EXPOSED: Final = b"X-Request-Id, X-Should-Retry, X-Reflex-Ignored, Retry-After"


class Trust:
    """Checks the requests of a server without a key.

    host: the address that the server is bound to. names: its further host names; `*` accepts every name.
    """

    def __init__(self, host: str, names: Collection[str] = ()) -> None:
        self._names = {name.lower().rstrip(".").strip("[]") for name in (host, *names)} | {"localhost"}
        bound = _address(host)
        self._everywhere = not host or (bound is not None and bound.is_unspecified)  # on all addresses of this machine
        if self._everywhere:
            self._names = self._names - {""} | {socket.gethostname().lower()}
        self._known: set[bytes] = set()

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise Forbidden for a Host that is not this server's, and for a POST from the page of another site."""
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host is not None and host not in self._known:
            self._check_host(host)
        if origin is not None and method not in ("GET", "HEAD") and not self._is_own_page(origin, host):
            raise Forbidden(
                f"Origin: {_shown(origin)}: pages of other sites may not use this server while it has no key; start it "
                "with --api-key, or with --allow-host and the site's name"
            )

    def _check_host(self, host: bytes) -> None:
        name = _hostname(b"http://" + host)
        if not (self._is_named(name) or (self._everywhere and _address(name) is not None)):
            raise Forbidden(
                f"Host: {_shown(host)}: this server has no key, so it answers only to localhost and to the address it "
                "is bound to; start it with --api-key, or with --allow-host and this name"
            )
        if len(self._known) < _KEPT:
            self._known.add(host)

    def _is_own_page(self, origin: bytes, host: bytes | None) -> bool:
        """Whether a page is from this server, from this machine, or from a site in `names`."""
        own = () if host is None else (b"http://" + host, b"https://" + host)
        return origin in own or self._is_named(_hostname(origin))

    def _is_named(self, name: str) -> bool:
        return ANY in self._names or name in self._names or is_loopback(name)


def check_direct(client: Client, headers: Mapping[bytes, bytes], key: str) -> None:
    """Raise Unauthorized unless a program on this machine sent the request, without a proxy. key: the option that would
    admit others."""
    if client is None or not (client[0] == UNIX or is_loopback(client[0])):
        raise Unauthorized(f"without {key} this path answers on loopback only")
    for name in headers:
        if name in _FORWARDED or name.startswith(b"x-forwarded-"):
            raise Unauthorized(
                f"{_shown(name)}: the request came through a proxy, so its sender is not known; without {key} this "
                "path answers only what programs on this machine send directly"
            )


def check_once(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise ClientError if a header that may come once came twice: a proxy in front may have read the other one."""
    for name, count in Counter(name for name, _ in headers).items():
        if count > 1 and (name in _ONCE or name.startswith(OURS)):
            raise ClientError(f"the request has {count} {_shown(name)} headers, there may be one")


def check_known(headers: Iterable[bytes], read: Collection[bytes]) -> None:
    """Raise ClientError for a header X-Reflex-… that the path does not read: a proxy adds headers of other names."""
    for name in headers:
        if name.startswith(OURS) and name not in _EVERYWHERE and name not in read:
            shown, known = _shown(name), [one.decode()[len(OURS) :] for one in (*_EVERYWHERE, *read)]
            near = did_you_mean(shown[len(OURS) :], known, OURS.decode())
            raise ClientError(f"{shown}: this path reads no such header{near}")


class Keys:
    """The keys of a server, "" for none. The operators' key opens every path."""

    def __init__(self, callers: str = "", operators: str = "") -> None:
        self.callers, self.operators = callers.encode(), operators.encode()

    def __bool__(self) -> bool:
        return bool(self.callers or self.operators)

    def of(self, route: Route | None, socket: bool = False) -> bytes:
        """The key that a route needs, b"" for none. Websockets and unknown paths need the callers' key."""
        if route is not None and route.operators and self.operators:
            return self.operators
        return b"" if route is not None and route.open and not socket else self.callers

    def sent(self, headers: Mapping[bytes, bytes], key: bytes) -> bool:
        """Whether a request has this key or the operators' key."""
        plain, bearer = keys_in(headers)
        known = hmac.compare_digest(plain, key) | hmac.compare_digest(bearer, key)
        if self.operators:
            known |= hmac.compare_digest(plain, self.operators) | hmac.compare_digest(bearer, self.operators)
        return known


NO_KEYS: Final = Keys()


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    address = _address(host)
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1, on a socket that takes both
    return address is not None and bool((mapped or address).is_loopback)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _hostname(url: bytes) -> str:
    """The host of a URL in lower case, "" if it has none."""
    try:
        return (urlsplit(url.decode("ascii")).hostname or "").rstrip(".")
    except ValueError:
        return ""


def keys_in(headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """A caller's keys: in X-Reflex-Key or x-api-key, and in Authorization; b"" for none."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    plain = headers.get(b"x-reflex-key") or headers.get(b"x-api-key", b"")
    return plain, bearer.strip() if scheme.lower() in (b"bearer", b"api-key") else b""


def _shown(value: bytes) -> str:
    return value[:100].decode("ascii", "backslashreplace")


def warn_if_open(config: Any) -> None:
    """Warn when other machines reach a server without a key."""
    if not (getattr(config, "uds", "") or config.api_key or config.host == "localhost" or is_loopback(config.host)):
        logging.warning("--host=%s is reachable from outside and there is no --api-key", config.host)


# -- pages of other sites ----------------------------------------------------------------------------------------------


class Cors:
    """origins: of pages, such as http://localhost:3000; `*` is any."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = {_as_sent(origin) for origin in origins}

    def admits(self, request: HttpRequest, route: Route | None) -> bool:
        """Whether the request is from a page of these sites; adds the headers that let it read the answer."""
        origin = request.headers.get(b"origin")
        closed = route is not None and (route.changes or route.own_pages or route.operators)
        if not self._origins or origin is None or closed or isinstance(request, WebSocket):
            return False
        if ANY.encode() in self._origins:
            request.cross = [(b"access-control-allow-origin", b"*")]
        elif origin.lower() in self._origins:
            request.cross = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
        else:
            return False
        request.cross.append((b"access-control-expose-headers", _EXPOSED))
        return True


def _as_sent(origin: str) -> bytes:
    """An origin as browsers send it, without the default port of its scheme."""
    scheme, _, site = origin.lower().partition("://")
    return f"{scheme}://{site.removesuffix(_PORTS[scheme])}".encode() if site else origin.encode()


def is_preflight(request: HttpRequest) -> bool:
    """Whether a request is a browser's preflight."""
    return request.method == "OPTIONS" and b"access-control-request-method" in request.headers


def answer_preflight(route: Route) -> Handler:
    """A handler that allows the route's method, and the headers that the preflight names."""

    async def answer(request: HttpRequest) -> HttpResponse:
        asked = request.headers.get(b"access-control-request-headers", b"")
        headers: Headers = [(b"access-control-allow-methods", route.method.encode())]
        headers.append((b"access-control-max-age", b"600"))
        if asked and len(asked) <= _MOST:
            headers.append((b"access-control-allow-headers", asked))
        return HttpResponse(200, headers=headers)

    return answer


class AddressShares:
    """Counts the open connections of each address, over all listeners. most: of one address; 0 for no limit."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: Counter[str] = Counter()

    def opened(self, client: Client) -> None:
        if self.most:
            self._open[_sender(client)] += 1

    def closed(self, client: Client) -> None:
        if self.most:
            sender = _sender(client)
            self._open[sender] -= 1
            if not self._open[sender]:
                del self._open[sender]

    def over(self, client: Client) -> int:
        """How many the address of this client has over the limit; 0 on a Unix socket, which has no addresses."""
        sender = _sender(client) if self.most else UNIX
        return 0 if sender == UNIX else self._open[sender] - self.most

    def refused(self, client: Client) -> Overloaded:
        """The error for a connection too many."""
        if _CROWDED.first():
            line = "%d connections of %s are open (--max-connections-per-address): its new ones are refused"
            log.warning(line, self.most, _sender(client))
        return Overloaded(f"{self.most} connections of your address are open, the most it may have", retry_after=1.0)


def _sender(client: Client) -> str:
    """The address that connections are counted by: of IPv6 the /64 network, because one caller has all of it."""
    host = client[0] if client is not None else UNIX
    address = _address(host)
    if not isinstance(address, IPv6Address):
        return host
    return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))
