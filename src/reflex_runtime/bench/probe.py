"""Sends one observation on every wire of a server: which answer, what they expect, and what to do if none does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from reflex_runtime.bench.caller import WireAnswer, WireCaller
from reflex_runtime.bench.callers import CALLERS
from reflex_runtime.bench.expected import GUESSES, Expected, Observed, shown
from reflex_runtime.bench.target import HTTP, LANGUAGE_MODEL, ServerLook, Target, look
from reflex_runtime.client.errors import (
    BadAnswer,
    ClientError,
    Forbidden,
    InvalidRequest,
    NotFound,
    NotReady,
    ServerError,
    TimedOut,
    TooLarge,
    Unauthorized,
    Unreachable,
)

_ADVICE: Final[tuple[tuple[type[ClientError], str], ...]] = (
    (Unauthorized, "give the server's key: --api-key KEY, or REFLEX_API_KEY in the environment"),
    (Forbidden, "start the server with --allow-host NAME, or with --api-key KEY"),
    (NotReady, "wait until /health says ready; if it never does, the server's log says why"),
    (TooLarge, "send smaller pictures, or start the server with a larger --max-body-bytes"),
    (InvalidRequest, "send an observation of your own: --wire NAME --observation FILE.npz"),
    (TimedOut, "wait until the policy is loaded, or give it longer: --timeout-s"),
    (Unreachable, "is the server running, and is this its port?"),
    (BadAnswer, "what listens there does not speak this protocol"),
)


@dataclass(slots=True)
class WireProbe:
    """The result of one wire. Times in milliseconds; None for steps that were not reached.

    sent: name → type and shape. known: where those names are from. actions: shape of the answer.
    """

    wire: str
    works: bool = False
    connect_ms: float | None = None
    answer_ms: float | None = None
    announced: dict[str, Any] = field(default_factory=dict)
    known: str = ""
    sent: dict[str, str] = field(default_factory=dict)
    actions: list[int] | None = None
    error: str = ""
    message: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class ServerProbe:
    """The result of a server."""

    url: str
    server: ServerLook
    wires: Sequence[WireProbe]

    @property
    def works(self) -> bool:
        """Whether at least one wire answered."""
        return any(wire.works for wire in self.wires)


async def probe(target: Target, wires: Sequence[str] = (), own: Observed | None = None) -> ServerProbe:
    """Ask on these wires; without any, on all wires of the URL's scheme. own: what to send, see `read_observation`.

    Raises Unreachable where nothing listens, NotFound where a language model is served.
    """
    seen = await look(target)
    there = [name for name, kind in CALLERS.items() if target.scheme in kind.schemes]
    names = wires or [name for name in there if target.scheme not in HTTP or _is_on(CALLERS[name], seen)]
    return ServerProbe(target.url, seen, [await _probe(target, name, seen, own) for name in names])


async def _probe(target: Target, name: str, seen: ServerLook, own: Observed | None) -> WireProbe:
    found = WireProbe(name)
    caller: WireCaller | None = None
    try:
        caller = CALLERS[name](at(target, CALLERS[name], seen))
        began = time.perf_counter()
        await caller.connect()
        if caller.schemes != HTTP:  # on HTTP the request opens the connection
            found.connect_ms = 1e3 * (time.perf_counter() - began)
        found.announced = plain(caller.announced)
        await meet(caller, seen, own, found)
    except ClientError as error:
        found.error, found.message = error.code, error.message
        found.advice = advice(error, seen, target.key)
        setting = CALLERS[name].setting.replace("_", "-")
        if setting and target.scheme in HTTP and isinstance(error, NotFound):
            found.advice = f"start the server with --{setting}, or give the listener's own URL"
        elif setting and target.scheme not in HTTP and isinstance(error, (NotFound, InvalidRequest)):
            found.advice = "give the server's http:// URL: it says what its listeners expect"
            found.advice += "" if isinstance(error, NotFound) else "; or --wire NAME --observation FILE.npz"
    finally:
        if caller is not None:
            await caller.close()
    return found


def at(target: Target, kind: type[WireCaller], seen: ServerLook) -> Target:
    """The address of a wire: the server's, or that of the listener named in /config. NotFound without that listener."""
    target = replace(target, model=seen.model.rpartition("@")[0].rpartition("/")[2])
    if not kind.setting or target.scheme not in HTTP:
        return target
    if not _is_on(kind, seen):
        raise NotFound(f"/config names no --{kind.setting.replace('_', '-')}")
    return target.listener(str(seen.settings[kind.setting]))


def _is_on(kind: type[WireCaller], seen: ServerLook) -> bool:
    return not kind.setting or bool(seen.settings.get(kind.setting))


async def meet(caller: WireCaller, seen: ServerLook, own: Observed | None, found: WireProbe) -> Observed:
    """Ask once with an observation that fits, and return it. Guesses are tried in turn; the last one's error is
    raised."""
    last: ClientError = BadAnswer("the server does not say what it expects, and there is no guess for this wire")
    for source, observed in candidates(caller, seen, own):
        found.known, found.sent = source, shown(observed)
        frame = caller.frame(observed, 0.0)
        began = time.perf_counter()
        try:
            answer: WireAnswer = await caller.ask(frame)
        except ServerError as error:
            last = error
            continue
        found.answer_ms = 1e3 * (time.perf_counter() - began)
        found.actions, found.works = list(answer.shape), True
        return observed
    raise last


def candidates(caller: WireCaller, seen: ServerLook, own: Observed | None) -> list[tuple[str, Observed]]:
    """Observations to send, the most reliable source first, each with its source."""
    if own is not None:
        return [("--observation", own)]
    expected = Expected.of("/config", seen.wires.get(caller.config)) or caller.expected()
    if expected is not None:
        return [(expected.source, expected.observation())]
    return [(guess.source, guess.observation()) for guess in GUESSES.get(caller.config, ())] or [("nothing", {})]


def advice(error: ClientError, seen: ServerLook, key: str) -> str:
    """What the user should do about an error."""
    if isinstance(error, Unauthorized) and key:
        return "the server has another key than this one"
    if error.code == LANGUAGE_MODEL:
        return "probe and bench ask robot policies"
    if error.code in ("http_404", "http_405", "http_501") or (isinstance(error, BadAnswer) and not seen.ours):
        return "no server of this protocol is there; is it another port?"
    return next((told for kind, told in _ADVICE if isinstance(error, kind)), "docs/errors.md has what to do")


def plain(announced: Mapping[str, Any]) -> dict[str, Any]:
    """An announcement as JSON-safe values; large arrays become their type and shape."""

    def written(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(name): written(v) for name, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [written(v) for v in value]
        if isinstance(value, np.ndarray):
            return value.tolist() if value.size <= 64 else f"{value.dtype} {list(value.shape)}"
        return (
            value if isinstance(value, (str, int, float, bool, type(None))) else bytes(value).decode(errors="replace")
        )

    return {str(name): written(value) for name, value in announced.items()}
