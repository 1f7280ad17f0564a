"""The settings of the commands: frozen values, declared with `option`."""

from reflex_runtime.settings.feeds import FeedsConfig
from reflex_runtime.settings.policies import (
    DEFAULT_POLICY,
    MAX_POLICIES,
    OWN_SETTINGS,
    DeviceConfig,
    FunctionsConfig,
    OwnSettings,
    PolicyAsked,
    ServeConfig,
    named,
)
from reflex_runtime.settings.server import LLMServeConfig, ServerConfig

__all__ = [
    "DEFAULT_POLICY",
    "MAX_POLICIES",
    "OWN_SETTINGS",
    "DeviceConfig",
    "FeedsConfig",
    "FunctionsConfig",
    "LLMServeConfig",
    "OwnSettings",
    "PolicyAsked",
    "ServeConfig",
    "ServerConfig",
    "named",
]
