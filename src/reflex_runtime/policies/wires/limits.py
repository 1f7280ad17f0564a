"""Identity and limits of a request on wires without fields for them: from the URL's query, or from `reflex/…` in an
observation. Builds the `Question`."""

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
    """Limits of one request; the same fields as in POST /act."""

    robot_id: str | None = None
    episode_id: str | None = None
    request_id: str | None = None
    priority: Literal["urgent", "default", "background"] | None = None
    deadline_ms: float | None = None
    seed: int | None = None
    executed: int | None = None
    policy: str | None = None


class SocketLimits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of a URL's query, for all requests of its websocket."""

    robot_id: str | None = None
    episode_id: str | None = None
    priority: Literal["urgent", "default", "background"] | None = None
    deadline_ms: float | None = None
    policy: str | None = None


def limits_of(said: Mapping[str, Any]) -> RequestLimits:
    """Validate the limits of one request; 422 names the wrong field. Numbers may be text."""
    limits: RequestLimits = _converted(said, RequestLimits)
    return limits


def limits_in(observation: Mapping[str, Any]) -> RequestLimits:
    """The limits under `reflex/…` in an observation."""
    return limits_of({name[len(OWN) :]: text_of(value) for name, value in observation.items() if name.startswith(OWN)})


def socket_limits(query: Mapping[str, str]) -> SocketLimits:
    """Validate the query of a websocket's URL."""
    limits: SocketLimits = _converted(query, SocketLimits)
    return limits


def question_of(
    observed: Observed, limits: RequestLimits, said: SocketLimits, robot_id: str | None, episode_id: str | None
) -> Question:
    """Build the question. limits: of the request; said: of its websocket. robot_id: default if `limits` has none."""
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
        policy=limits.policy,
    )


def _converted(said: Mapping[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(said, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
