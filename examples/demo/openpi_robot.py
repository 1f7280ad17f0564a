"""A simulated robot that speaks openpi, through the stock client, unmodified: `python -m …`, as `robot`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import quote

import numpy as np
from websockets.exceptions import ConnectionClosed

from demo.robot import LOOK_AGAIN, Ending, HttpPolicy, main
from demo.tasks import RobotView, episode_id
from reflex_runtime.client import BadAnswer, Chunk, ClientError, Unreachable
from reflex_runtime.client.exchange import Reply, refused
from reflex_runtime.core.errors import ConfigError

HINT: Final = "pip install --no-deps openpi-client==0.1.2, and pip install dm-tree typing_extensions"


def need_client() -> None:
    """ConfigError where the stock client is not installed. It asks for numpy 1, and runs with numpy 2 as well."""
    missing = [name for name in ("openpi_client", "tree", "typing_extensions") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"--wire=openpi: {', '.join(missing)} not installed: {HINT}")


@dataclass
class OpenpiPolicy(HttpPolicy):
    """A policy behind openpi's client. png has no effect."""

    _socket: Any = field(default=None, repr=False)
    _situation: str = ""

    def __post_init__(self) -> None:
        from openpi_client.websocket_client_policy import WebsocketClientPolicy

        url = f"ws{self.url.removeprefix('http').rstrip('/')}/?robot_id={quote(self.robot_id)}"
        self._socket = WebsocketClientPolicy(url, api_key=self.api_key)

    @contextmanager
    def episode(self, situation: str) -> Iterator[Ending]:
        """Requests made inside belong to one episode. openpi has no word for how it ended."""
        self._situation = episode_id(self.robot_id, self.run, situation)
        yield SimpleNamespace(success=None)

    def close(self) -> None:
        self._socket._ws.close()  # the client itself has no way to

    def _ask(self, seen: RobotView) -> Chunk:
        """Ask until the server does not refuse any more, or patience ends."""
        observation: dict[str, Any] = {
            "observation/image": seen.image,
            "observation/state": seen.state,
            "prompt": seen.instruction,
            "episode_id": self._situation,
        }
        limits = {"reflex/executed": seen.executed, "reflex/deadline_ms": self.deadline_ms}
        observation |= {name: value for name, value in limits.items() if value is not None}
        began = self._sent = time.monotonic()
        while True:
            try:
                return _chunk(self._infer(observation))
            except ClientError as error:
                if not error.retry_safe or time.monotonic() - began > self.patience:
                    raise
            self._pause(LOOK_AGAIN)

    def _infer(self, observation: dict[str, Any]) -> Any:
        try:
            return self._socket.infer(observation)
        except ConnectionClosed as error:
            raise Unreachable(f"the websocket was closed: {error}") from None
        except RuntimeError as error:  # so the client raises what the server says
            raise refused(Reply(0, {}, str(error).partition("\n")[2].encode())) from None


def _chunk(answer: Any) -> Chunk:
    actions = answer["actions"]
    if actions.ndim != 2 or not np.isfinite(actions).all():
        raise BadAnswer(f"actions: {list(actions.shape)}, expected finite [n, action_dim]")
    changed = answer["policy_changed"] is True
    timing, batch, cache = answer["timing"], answer["batch"], answer["cache"]
    return Chunk(actions, answer["request_id"], timing, batch, cache, answer["guard"], None, None, changed, 1, answer)


if __name__ == "__main__":
    sys.exit(main(kind=OpenpiPolicy))
