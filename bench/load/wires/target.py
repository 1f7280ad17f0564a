"""Where a robot of the load generator asks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from reflex_runtime.cli.probe import SCHEMES, ServerLook, listener
from reflex_runtime.client.errors import NotFound
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.web.server_address import ServerAddress


@dataclass(frozen=True, slots=True)
class Target:
    """key: "" for none. timeout: seconds of each step. model, policy_type: name of the served model, and what robots of
    LeRobot call its kind; "" if unknown."""

    address: ServerAddress
    key: str = ""
    timeout: float = 10.0
    model: str = ""
    policy_type: str = ""

    @classmethod
    def of(cls, url: str, key: str = "", timeout: float = 10.0) -> Target:
        """ConfigError for what is no address of a server."""
        return cls(ServerAddress.of(url, SCHEMES), key, timeout)

    def on(self, setting: str, seen: ServerLook) -> Target:
        """The same for a wire, whose listener is named in /config. NotFound without it."""
        model = seen.model.rpartition("@")[0].rpartition("/")[2]
        lerobot = seen.wires.get("lerobot") or {}
        try:
            address = listener(self.address, setting, seen)
            return replace(self, address=address, model=model, policy_type=str(lerobot.get("policy_type", "")))
        except ConfigError as error:
            raise NotFound(error.message, code="not_found") from None

    def headers(self, kind: str = "application/json") -> dict[str, str]:
        """Of an HTTP request. kind: media type of the body and of the wanted answer."""
        found = {"Host": self.address.netloc, "Content-Type": kind, "Accept": kind}
        return found | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
