"""The state and the end of an episode, for both clients; `BaseEpisode` says what is reported when."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, field
from typing import Any

from reflex_runtime.client.answers import Chunk
from reflex_runtime.client.calls import Call, Calls
from reflex_runtime.client.errors import ClientError
from reflex_runtime.client.requests import ActFields

log = logging.getLogger("reflex.client")


def new_id() -> str:
    return f"ep-{uuid.uuid4().hex}"


@dataclass(slots=True)
class BaseEpisode:
    """One episode, without I/O.

    success: how it ended; set it in the block. An exception in the block makes an unset one False. None is not
    reported, because the client does not know the outcome. An interrupted episode (KeyboardInterrupt, a cancelled task)
    is not reported either, because that is no failure of the policy.
    reward: reported with it. reported: the server has accepted the report; a report that fails is logged, not raised.
    changed: the server moved the episode to another policy.
    """

    client: Any
    episode_id: str
    robot_id: str | None = None
    instruction: str | None = None
    success: bool | None = None
    reward: float | None = None
    reported: bool = field(default=False, init=False)
    changed: bool = field(default=False, init=False)

    def _ended(self, calls: Calls, error: BaseException | None) -> Call[None]:
        """The block has ended, with this exception or without: report the outcome if there is one."""
        if self.success is None and isinstance(error, Exception):
            self.success = False
        if self.success is None:
            return
        try:
            yield from calls.outcome(self.episode_id, self.success, self.reward)
            self.reported = True
        except ClientError as lost:
            log.warning("the outcome of episode %s (success=%s) was not taken: %s", self.episode_id, self.success, lost)

    def _carried(self, fields: ActFields) -> ActFields:
        known: ActFields = {
            "episode_id": self.episode_id, "robot_id": self.robot_id, "instruction": self.instruction
        }  # fmt: skip
        return known | fields

    def _seen(self, chunk: Chunk) -> Chunk:
        self.changed = self.changed or chunk.policy_changed
        return chunk
