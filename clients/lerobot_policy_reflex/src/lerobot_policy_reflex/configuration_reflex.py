"""The options `--policy.…` of the policy type `reflex`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs.policies import PreTrainedConfig

PRIORITIES = ("urgent", "default", "background")


@PreTrainedConfig.register_subclass("reflex")
@dataclass
class ReflexConfig(PreTrainedConfig):
    """Where the server is and how it is asked. A key is read from the environment, REFLEX_API_KEY: LeRobot prints and
    saves its configuration.

    url: http://, https://, ws:// or wss://. robot_id: this robot's name; with several environments `ID/0`, `ID/1` ….
    deadline_ms: how long after it was sent an answer is of use; None for no limit. priority: urgent, default or
    background. n_action_steps: how many actions of a chunk are executed; None for all. names: LeRobot's name of an
    observation → the server's, for those that differ. timeout_s: for an answer. connect_timeout_s: until the server's
    policy is ready. retries: of requests that the server refused without having run them.
    """

    url: str = "http://127.0.0.1:8000"
    robot_id: str | None = None
    deadline_ms: float | None = None
    priority: str = "default"
    n_action_steps: int | None = None
    names: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 10.0
    connect_timeout_s: float = 60.0
    retries: int = 2

    device: str | None = "cpu"  # where the observations are put: they are sent, not computed with
    push_to_hub: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"--policy.url={self.url}: must be as http://127.0.0.1:8000")
        if self.priority not in PRIORITIES:
            raise ValueError(f"--policy.priority={self.priority}: must be one of {', '.join(PRIORITIES)}")
        if self.n_action_steps is not None and self.n_action_steps < 1:
            raise ValueError(f"--policy.n_action_steps={self.n_action_steps}: must be 1 or more")
        if self.deadline_ms is not None and not self.deadline_ms > 0:
            raise ValueError(f"--policy.deadline_ms={self.deadline_ms}: must be more than 0")
        for name in ("timeout_s", "connect_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--policy.{name}={getattr(self, name)}: must be more than 0")
        if self.retries < 0:
            raise ValueError(f"--policy.retries={self.retries}: must be 0 or more")

    @property
    def observation_delta_indices(self) -> None:
        """The current observation alone."""
        return

    @property
    def action_delta_indices(self) -> None:
        """Nothing is trained."""
        return

    @property
    def reward_delta_indices(self) -> None:
        """Nothing is trained."""
        return

    def get_optimizer_preset(self) -> Any:
        """Raises ValueError: there are no weights."""
        raise ValueError("--policy.type=reflex cannot be trained: it has no weights, a server computes its actions")

    def get_scheduler_preset(self) -> None:
        """None: nothing is trained."""
        return

    def validate_features(self) -> None:
        """The server compares each observation with its export."""
