"""The outputs that settings name."""

from __future__ import annotations

from dataclasses import replace

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.outputs.address import ReceiverAddress, mqtt_address, webhook_address
from reflex_runtime.feeds.outputs.output import AnyOutput
from reflex_runtime.settings import FeedsConfig


def outputs_of(config: FeedsConfig) -> list[AnyOutput]:
    """Those of --publish and --webhook, not started. Raises ConfigError, which names the flag, no secret."""
    found: list[AnyOutput] = []
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
