"""The options `--policy.…` of the policy type `reflex`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs.policies import PreTrainedConfig

PRIORITIES = ("urgent", "default", "background")


@PreTrainedConfig.register_subclass("reflex")
@dataclass
class ReflexConfig(PreTrainedConfig):
    """The address of the server and the options of requests. The key is in the environment, REFLEX_API_KEY, because
    LeRobot prints and saves its configuration.

    url: http://, https://, ws:// or wss://. robot_id: this robot's name; with several environments `ID/0`, `ID/1` ….
    deadline_ms: time in which an answer is useful; None for no limit. priority: urgent, default or background.
    n_action_steps: executed actions of a chunk; None for all. names: LeRobot's name of an observation → the server's,
    where they differ. timeout_s: for an answer. connect_timeout_s: until the server's policy is ready. retries: of
    requests that were refused without a run.
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

    device: str | None = "cpu"  # of the observations, which are only sent
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
        """None: there is no training."""
        return

    @property
    def reward_delta_indices(self) -> None:
        """None: there is no training."""
        return

    def get_optimizer_preset(self) -> Any:
        """Raises ValueError: there are no weights."""
        raise ValueError("--policy.type=reflex cannot be trained: it has no weights, a server computes its actions")

    def get_scheduler_preset(self) -> None:
        """None: there is no training."""
        return

    def validate_features(self) -> None:
        """The server compares each observation with its export."""
