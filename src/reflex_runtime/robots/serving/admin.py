"""What an operator may change while the server runs, and how episodes ended: `/admin/*`, `/episodes/*`.

Every question is JSON with the fields it says, no more. Loading takes as long as it takes, so it is answered by a task;
everything else is answered at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from reflex_runtime.core.errors import Closed, ConfigError, ReflexError
from reflex_runtime.robots.policy.spec import PYTHON
from reflex_runtime.robots.serving.handler import RequestHandler
from reflex_runtime.robots.sources.load import directory_of
from reflex_runtime.robots.versions.slots import SHADOW, Version
from reflex_runtime.web.errors import Conflict, InvalidJson, NotFound
from reflex_runtime.web.fields import Whole, check_id, encode, invalid, invalid_field, printable, whole
from reflex_runtime.web.request import Handler, HttpRequest, HttpResponse

log = logging.getLogger("reflex.admin")

MAX_FAULTS = 100
T = TypeVar("T", bound=msgspec.Struct)


class Split(msgspec.Struct, forbid_unknown_fields=True):
    """a's percent of new episodes."""

    split: Annotated[Whole, Meta(extra_json_schema={"minimum": 0, "maximum": 100})]


class SlotName(msgspec.Struct, forbid_unknown_fields=True):
    """One slot."""

    slot: str


class Load(msgspec.Struct, forbid_unknown_fields=True):
    """An export to put into a slot."""

    slot: str
    path: Annotated[str, Meta(extra_json_schema={"minLength": 1, "pattern": r"^[^\u0000]*$"})]


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """The faults of a drill, as --inject-fault takes them; none ends it."""

    faults: Annotated[list[str], Meta(extra_json_schema={"maxItems": MAX_FAULTS})]


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No fields."""


class Outcome(msgspec.Struct, forbid_unknown_fields=True):
    """How an episode ended."""

    success: bool
    reward: float | None = None
    robot_id: str | None = None


BODIES = (Split, SlotName, Load, Faults, Nothing, Outcome)


class Admin:
    """Answers operators of one policy."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._tasks: set[asyncio.Task[Version]] = set()
        self.changes: dict[str, Handler] = {
            "/admin/split": self.split,
            "/admin/rollback": self.rollback,
            "/admin/reset": self.reset,
            "/admin/load": self.load,
            "/admin/faults": self.faults,
        }

    async def split(self, request: HttpRequest) -> HttpResponse:
        """Another split for new episodes."""
        split = whole("split", _decode(await self._body(request), Split).split)
        if not 0 <= split <= 100:
            raise invalid("split", f"split={split}: must be in [0, 100]")
        self._handler.served.rollout.set_split(split, time.monotonic())
        return _told({"split": split})

    async def rollback(self, request: HttpRequest) -> HttpResponse:
        """Everything to a, running episodes too."""
        _decode(await self._body(request) or b"{}", Nothing)
        moved = self._handler.served.rollout.rollback(time.monotonic())
        return _told({"split": 100, "episodes_moved": len(moved)})

    async def reset(self, request: HttpRequest) -> HttpResponse:
        rollout, shadow = self._handler.served.rollout, self._handler.served.shadow
        slot, now = _decode(await self._body(request), SlotName).slot, time.monotonic()
        if shadow is not None and slot == SHADOW:
            shadow.resume()
            rollout.changed(now, "shadow", "was reset by an operator", {})
        else:
            rollout.reset(slot, now)
        slots = dict(rollout.breaker.verdicts) | ({} if shadow is None else {SHADOW: shadow.verdict})
        return _told({"verdict": rollout.breaker.verdict, "slots": slots})

    async def faults(self, request: HttpRequest) -> HttpResponse:
        """Begin or end a drill."""
        asked = _decode(await self._body(request), Faults)
        if len(asked.faults) > MAX_FAULTS:
            raise invalid("faults", f"faults: {len(asked.faults)} are given, at most {MAX_FAULTS} may be")
        served = self._handler.served
        try:
            served.inject(asked.faults)
        except ConfigError as error:
            raise invalid("faults", error.message) from None
        now, told = time.monotonic(), {"faults": asked.faults}
        if asked.faults:
            served.rollout.changed(now, "fault", f"injected by an operator: {', '.join(asked.faults)}", told)
        else:
            served.rollout.changed(now, "mended", "no injected faults any more", told)
        return _told({"faults": served.faults})

    async def load(self, request: HttpRequest) -> HttpResponse:
        """Another policy in a slot. It takes as long as it takes; the end of the server gives it up."""
        asked = _decode(await self._body(request), Load)
        if not asked.path or "\0" in asked.path or asked.path.startswith(PYTHON):
            raise invalid("path", f"path={asked.path[:200]!r}: must be an export directory, lerobot:DIR or openpi:DIR")
        if not is_directory(asked.path):
            raise NotFound(printable(f"path={asked.path[:200]!r}: there is no such directory"), field="path")
        served, runtime = self._handler.served, self._handler.runtime
        if runtime.exchanges:
            raise Conflict("another policy is being loaded")
        runtime.exchanges = True
        task = asyncio.get_running_loop().create_task(served.exchange(asked.slot, asked.path))
        self._tasks.add(task)
        task.add_done_callback(self._loaded)
        try:
            version = await asyncio.shield(task)  # an operator that leaves does not end it
            return _told({"slot": asked.slot, "model_version": version.name, "path": version.policy.spec.source})
        except asyncio.CancelledError:
            if task.cancelled():
                raise Closed("the server is shutting down", retry_after=1.0) from None
            raise
        except ConfigError as error:
            raise invalid("path", error.message) from None
        except OSError as error:
            raise invalid("path", f"path: {error.strerror}") from None
        except ReflexError:
            raise
        except Exception:
            log.exception("loading %s into slot %s failed", asked.path, asked.slot)
            raise ReflexError("the policy could not be loaded; the server's log has the details") from None

    def _loaded(self, task: asyncio.Task[Version]) -> None:
        self._tasks.discard(task)
        self._handler.runtime.exchanges = False
        if not task.cancelled():
            task.exception()  # its operator may have left

    async def _body(self, request: HttpRequest) -> bytes:
        self._handler.runtime.need_loaded()
        return await request.body()

    def close(self) -> None:
        """The server ends: give up the present load, and answer its operator."""
        for task in self._tasks:
            task.cancel()

    async def outcome(self, request: HttpRequest) -> HttpResponse:
        """How an episode ended: /episodes/{id}/outcome."""
        episode = _episode_of(request.path.removeprefix(self._handler.prefix))
        asked = _decode(await self._body(request), Outcome)
        fields = {"reward": asked.reward} if asked.reward is not None else {}
        if asked.robot_id is not None:
            check_id("robot_id", asked.robot_id)
        told = self._handler.served.ended(episode, asked.success, asked.robot_id, **fields)
        return _told(told)


def _told(told: Mapping[str, Any]) -> HttpResponse:
    """The answer that it is done."""
    return HttpResponse(200, encode(told))


def is_directory(source: str) -> bool:
    """Whether what a source names is a directory."""
    return os.path.isdir(directory_of(source))


def _episode_of(path: str) -> str:
    episode = path[len("/episodes/") : -len("/outcome")]  # decoded when it was parsed, and not twice
    check_id("episode_id", episode)
    return episode


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error, kind) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None
