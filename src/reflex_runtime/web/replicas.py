"""Replicas: worker processes that accept from one port. Each has a device, and its own files and other ports."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings import DeviceConfig
from reflex_runtime.settings.declare import Places, flag, one_line
from reflex_runtime.settings.read import environment

_DEVICE: Final = re.compile(r"cpu|cuda(?::(\d{1,3}))?")
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_MOST: Final = 64
LISTENERS: Final = ("gr00t", "oip_grpc", "lerobot")  # wires with ports of their own


def devices_of(config: DeviceConfig, places: Places) -> list[str]:
    """The device of each replica, "" for the one of --provider; a single server is one replica. ConfigError if the
    options contradict each other."""
    if not config.devices:
        devices = [""] * config.replicas
    else:
        devices = [device.strip() for device in config.devices.split(",")]
        where = f"--devices={one_line(config.devices)}"
        for device in devices:
            if not _DEVICE.fullmatch(device):
                raise ConfigError(f"{where}: must be devices with commas, each cpu, cuda or cuda:N", field="devices")
        if len(devices) > _MOST:
            raise ConfigError(f"{where}: {len(devices)} devices, at most {_MOST} may be", field="devices")
        if config.replicas not in (1, len(devices)):
            raise ConfigError(
                f"{where} --replicas={config.replicas}: there is a replica for each device; leave --replicas out",
                field="devices",
            )
        if "provider" in places:
            other = places["provider"]
            raise ConfigError(f"{where} {other}: both choose the device; leave one out", field="devices")
    if len(devices) > 1 and not config.supervise:
        raise ConfigError("--no-supervise: several replicas need the supervisor to start them", field="supervise")
    for number in range(len(devices)):
        _listeners_of(config, number)
    return devices


def _listeners_of(config: DeviceConfig, number: int) -> dict[str, str]:
    """The addresses of a replica for wires with their own ports: consecutive ports; port 0 is any free one and is left
    out."""
    found = {}
    for name in LISTENERS:
        host, _, port = getattr(config, name, "").rpartition(":")
        if port and int(port):
            found[name] = f"{host}:{int(port) + number}"
            if int(port) + number > 65535:
                where = f"{flag(name)}={one_line(getattr(config, name))}"
                raise ConfigError(f"{where}: replica {number} would have port {int(port) + number}", field=name)
    return found


def settings_of(config: DeviceConfig, devices: Sequence[str], number: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of one worker (its device, files and ports), and its environment."""
    if len(devices) == 1:
        return _on_device(devices[0])
    changed, env = _on_device(devices[number])
    changed |= _listeners_of(config, number)
    if config.trace:
        stem, ending = os.path.splitext(config.trace)
        changed["trace"] = f"{stem}-{number}{ending}"
    if config.record:
        changed["record"] = os.path.join(config.record, f"worker-{number}")
    return changed, env


def _on_device(device: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings and the environment that put a process on a device."""
    found = _DEVICE.fullmatch(device)
    if found is None:
        return {}, {}
    if device == "cpu":
        return {"provider": "cpu"}, {}
    number = int(found[1] or 0)
    visible = [name for name in environment().get(_VISIBLE, os.environ.get(_VISIBLE, "")).split(",") if name]
    if visible and number >= len(visible):
        raise ConfigError(
            f"--devices: {device}: {_VISIBLE} names {len(visible)} devices, numbered from 0", field="devices"
        )
    return {"provider": "cuda"}, {_VISIBLE: visible[number] if visible else str(number)}
