"""What a caller says of itself and of one request, where its protocol has no field for it: in the URL's query, or under
`reflex/…` in an observation. And the `Question` that comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from reflex_runtime.core.request import PRIORITIES
from reflex_runtime.policies.serving.question import Question
from reflex_runtime.policies.wires.observations import Observed, text_of
from reflex_runtime.web.fields import invalid_field

OWN: Final = "reflex/"


class RequestLimits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """As the fields of POST /act."""

    robot_id: str | None = None
    episode_id: str | None = None
    request_id: str | None = None
    priority: Literal["urgent", "default", "background"] | None = None
    deadline_ms: float | None = None
    seed: int | None = None
    executed: int | None = None


class SocketLimits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a URL's query may say, for all requests of its websocket."""

    robot_id: str | None = None
    episode_id: str | None = None
    priority: Literal["urgent", "default", "background"] | None = None
    deadline_ms: float | None = None


def limits_of(said: Mapping[str, Any]) -> RequestLimits:
    """Those of one request; 422 naming what is wrong. Numbers may come as text."""
    limits: RequestLimits = _converted(said, RequestLimits)
    return limits


def limits_in(observation: Mapping[str, Any]) -> RequestLimits:
    """Those that stand under `reflex/…` in an observation."""
    return limits_of({name[len(OWN) :]: text_of(value) for name, value in observation.items() if name.startswith(OWN)})


def socket_limits(query: Mapping[str, str]) -> SocketLimits:
    """Those of a websocket."""
    limits: SocketLimits = _converted(query, SocketLimits)
    return limits


def question_of(
    observed: Observed, limits: RequestLimits, said: SocketLimits, robot_id: str | None, episode_id: str | None
) -> Question:
    """What is asked. limits: of the request; said: of its websocket. robot_id: where `limits` has none."""
    images, state, instruction = observed
    return Question(
        images=images,
        state=state,
        instruction=instruction,
        episode_id=episode_id,
        request_id=limits.request_id,
        robot_id=limits.robot_id or robot_id,
        seed=limits.seed,
        executed=limits.executed,
        priority=PRIORITIES[limits.priority or said.priority or "default"],
        deadline_ms=said.deadline_ms if limits.deadline_ms is None else limits.deadline_ms,
    )


def _converted(said: Mapping[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(said, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
