"""What an operator may change while feeds run: which there are, what is reported of each, and the detector of all.

    POST   /feeds           {"name", "source", settings of a feed, "score", "classes"}
    GET    /feeds/NAME      what it is and does
    PATCH  /feeds/NAME      {"score", "classes", "every", "fps"}: null is what the command says
    DELETE /feeds/NAME
    POST   /admin/load      {"path", settings of a detector}

Every body is JSON with these fields, no more. Changes wait for each other, for threads that end and for models that are
loaded, so they are made in threads of their own; a stop does not wait for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.drivers.in_thread import in_thread
from reflex_runtime.feeds.fleet import OF_DETECTOR, OF_RATE, FeedFleet
from reflex_runtime.feeds.onnx import FrameLimits
from reflex_runtime.feeds.spec import PER_FEED
from reflex_runtime.options import did_you_mean
from reflex_runtime.web.errors import Conflict, InvalidJson, NotFound
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.fields import invalid
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.json import encode, printable

log = logging.getLogger("reflex.admin")

FEEDS: Final = "/feeds"
LOAD: Final = "/admin/load"
_LIMITS: Final = ("score", "classes")
_CLASSES: Final = 1000  # names of classes in a request
_WAITING: Final = 16  # changes that wait for others

Fields = dict[str, Any]
Change = Callable[[], Fields]


class FeedControl:
    """Answers operators. removed: called on the loop with the name of each feed that is gone."""

    def __init__(self, fleet: FeedFleet, removed: Callable[[str], None]) -> None:
        self._fleet, self._removed = fleet, removed
        self._waiting = 0
        changing = partial(Route, changes=True, form=PLAIN)
        self.add = changing(FEEDS, self._add, "POST")
        self.load = changing(LOAD, self._load, "POST")
        change = changing(f"{FEEDS}/NAME", self._change, "PATCH")
        remove = changing(f"{FEEDS}/NAME", self._remove, "DELETE")
        self.one = Route(f"{FEEDS}/NAME", self._tell, own_pages=True, form=PLAIN, others=(change, remove))

    def find(self, path: str) -> Route | None:
        """The route of a feed; None for other paths."""
        return self.one if path.startswith(f"{FEEDS}/") and len(path) > len(FEEDS) + 1 else None

    # -- what is asked -------------------------------------------------------------------------------------------------

    def _tell(self, exchange: Exchange, _: bytes) -> None:
        name = _name_in(exchange.path)
        try:
            exchange.answer(200, encode(self._fleet.told(name)))
        except KeyError:
            raise _no_feed(name) from None

    def _add(self, exchange: Exchange, body: bytes) -> None:
        asked = _fields(body, ("name", "source", *PER_FEED, *_LIMITS), ("name", "source"))
        name, source = _text(asked, "name"), _text(asked, "source")
        own = {key: asked[key] for key in PER_FEED if key in asked}
        self._do(exchange, partial(self._fleet.add, name, source, own, _limits(asked, FrameLimits())), 201)

    def _change(self, exchange: Exchange, body: bytes) -> None:
        asked, name = _fields(body, (*_LIMITS, *OF_RATE)), _name_in(exchange.path)
        rate: Fields = {key: asked[key] for key in OF_RATE if key in asked}
        self._do(exchange, partial(self._fleet.change, name, partial(_limits, asked), rate))

    def _remove(self, exchange: Exchange, _: bytes) -> None:
        name = _name_in(exchange.path)
        self._do(exchange, partial(self._fleet.remove, name), then=partial(self._removed, name))

    def _load(self, exchange: Exchange, body: bytes) -> None:
        asked = _fields(body, ("path", *OF_DETECTOR), ("path",))
        own = {key: value for key, value in asked.items() if key != "path"}
        self._do(exchange, partial(self._loaded, _text(asked, "path"), own))

    def _loaded(self, path: str, own: Fields) -> Fields:
        before = self._fleet.version
        version = self._fleet.replace(path, own)
        log.info("%s runs now, in place of %s", version.name, before)
        return {"model_version": version.name, "path": str(version.path), "before": before}

    # -- making the change ---------------------------------------------------------------------------------------------

    def _do(
        self, exchange: Exchange, change: Change, status: int = 200, then: Callable[[], None] | None = None
    ) -> None:
        if self._waiting >= _WAITING:
            raise Conflict(f"{_WAITING} changes wait already, which is the most")
        self._waiting += 1
        exchange.app.spawn(exchange, self._done(exchange, change, status, then))

    async def _done(
        self, exchange: Exchange, change: Change, status: int, then: Callable[[], None] | None
    ) -> None:
        try:
            told = await in_thread(change)
        except KeyError as error:
            raise _no_feed(str(error.args[0])) from None
        except ConfigError as error:
            raise _refusal(error, "path" if exchange.path == LOAD else "source") from None
        finally:
            self._waiting -= 1
        if then is not None:
            then()
        exchange.answer(status, encode(told))


def _refusal(error: ConfigError, field: str) -> Exception:
    """field: which one it is about, unless the error says it."""
    message = printable(error.message)
    if error.details.get("conflict"):
        return Conflict(message)
    return invalid(str(error.details.get("field") or field), message)


def _no_feed(name: str) -> NotFound:
    return NotFound(printable(f"there is no feed {name[:200]}"))


def _name_in(path: str) -> str:
    return path[len(FEEDS) + 1 :]


# -- bodies ------------------------------------------------------------------------------------------------------------


def _fields(body: bytes, known: tuple[str, ...], needed: tuple[str, ...] = ()) -> Fields:
    """The fields of a body, each checked for being known."""
    try:
        asked = msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise invalid("body", "the body must be an object")
    for name in asked:
        if name not in known:
            raise invalid(printable(name), printable(f"{name[:100]}: no such field") + did_you_mean(name[:100], known))
    for name in needed:
        if name not in asked:
            raise invalid(name, f"{name}: must be there")
    return asked


def _text(asked: Fields, name: str) -> str:
    value = asked[name]
    if not isinstance(value, str) or not value or "\0" in value:
        raise invalid(name, f"{name}: must be text")
    return value


def _limits(asked: Fields, now: FrameLimits) -> FrameLimits:
    """The limits of a feed: those that are asked for, the others as they are."""
    score, classes = asked.get("score", now.score), asked.get("classes", now.classes)
    if score is not None and (isinstance(score, bool) or not isinstance(score, (int, float)) or not 0 <= score <= 1):
        raise invalid("score", f"score={score!r:.100}: must be a number in [0, 1], or null")
    if classes is not None:
        fine = isinstance(classes, (list, tuple)) and len(classes) <= _CLASSES
        if not fine or not all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in classes):
            raise invalid("classes", f"classes: must be a list of at most {_CLASSES} names or numbers, or null")
        classes = tuple(classes)
    return FrameLimits(score, classes)
