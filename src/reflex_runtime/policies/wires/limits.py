"""What a caller says of itself and of one request, where its protocol has no field for it: in the URL's query, or under
`reflex/…` in an observation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from reflex_runtime.web.fields import invalid_field


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


def socket_limits(query: Mapping[str, str]) -> SocketLimits:
    """Those of a websocket."""
    limits: SocketLimits = _converted(query, SocketLimits)
    return limits


def _converted(said: Mapping[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(said, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
