"""Outputs: results that leave for a receiver that may be slow or away, each on a thread of its own.

An output never delays a frame. Its queue is bounded, and the newest results win: where there is no room, the oldest one
is dropped and counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.outputs.output import ReceiverAddress, ResultOutput, mqtt_address, webhook_address
from reflex_runtime.settings import FeedsConfig


def outputs_of(config: FeedsConfig) -> list[ResultOutput[Any]]:
    """Those of --publish and --webhook, not started. Raises ConfigError, which names the flag, no secret."""
    found: list[ResultOutput[Any]] = []
    if config.publish:
        from reflex_runtime.feeds.outputs.mqtt import MqttPublisher

        try:
            found.append(MqttPublisher(_broker(config), config.publish_qos))
        except ConfigError as error:
            raise ConfigError(f"--publish={error.message}", field="publish") from None
    if config.webhook:
        from reflex_runtime.feeds.outputs.webhook import Webhook

        try:
            found.append(Webhook(webhook_address(config.webhook)))
        except ConfigError as error:
            raise ConfigError(f"--webhook={error.message}", field="webhook") from None
    return found


def _broker(config: FeedsConfig) -> ReceiverAddress:
    address = mqtt_address(config.publish)
    if not config.publish_user:
        return address
    if address.user is not None:
        raise ConfigError(f"{address.shown}: has a user of its own; leave out --publish-user")
    return replace(address, user=config.publish_user, password=config.publish_password or None)
