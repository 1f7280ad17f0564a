"""`reflex serve --replicas N` and `--devices`: what each replica serves, and on which device."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings import ServeConfig
from reflex_runtime.settings.declare import Places, flag, one_line
from reflex_runtime.settings.read import environment

if TYPE_CHECKING:
    from reflex_runtime.cli.serve_policies import PolicyAsked
    from reflex_runtime.replicas.replica import ReplicaPlan

_DEVICE: Final = re.compile(r"cpu|cuda(?::(\d{1,3}))?")
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_MOST: Final = 64
_EVERYWHERE: Final = frozenset({"*", "0.0.0.0", "::"})  # hosts that mean all addresses
_LISTENERS: Final = ("gr00t", "oip_grpc", "lerobot")  # wires with ports of their own


def devices_of(config: ServeConfig, places: Places) -> list[str]:
    """The device of each replica, "" for that of --provider; one where there are no replicas. ConfigError if the
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
            told = places["provider"]
            raise ConfigError(f"{where} {told}: --devices says it already; leave one out", field="devices")
    if len(devices) > 1:
        _check_ports(config, len(devices))
    return devices


def _check_ports(config: ServeConfig, replicas: int) -> None:
    """ConfigError if two listeners would have one port."""
    taken = [(config.host, config.port, "the server")]
    for number in range(replicas):
        for name, address in _listeners_of(config, number).items():
            place, _, text = address.removeprefix("tcp://").rpartition(":")
            host, port, own = place.strip("[]"), int(text), f"{flag(name)} of replica {number}"
            for other, number_of_other, owner in taken:
                if port == number_of_other and (host == other or not _EVERYWHERE.isdisjoint((host, other))):
                    raise ConfigError(
                        f"{flag(name)}={one_line(getattr(config, name))}: with {replicas} replicas port {port} would "
                        f"be that of {owner} and of {own}; leave {replicas} ports from each number on",
                        field=name,
                    )
            taken.append((host, port, own))


def providers_of(config: ServeConfig, devices: Sequence[str]) -> list[str]:
    """What the replicas on these devices run on, each once."""
    return list(dict.fromkeys(_on_device(device)[0].get("provider", config.provider) for device in devices))


def _listeners_of(config: ServeConfig, number: int) -> dict[str, str]:
    """The addresses of a replica for wires that are not HTTP: their connections cannot be handed over, so every replica
    has ports of its own, one after the other. A port 0 is any free one."""
    found = {}
    for name in _LISTENERS:
        host, _, port = getattr(config, name).rpartition(":")
        if port and int(port):
            found[name] = f"{host}:{int(port) + number}"
            if int(port) + number > 65535:
                where = f"{flag(name)}={one_line(getattr(config, name))}"
                raise ConfigError(f"{where}: replica {number} would have port {int(port) + number}", field=name)
    return found


def replica_plans(
    config: ServeConfig, places: Places, asked: Sequence[PolicyAsked], devices: Sequence[str]
) -> list[ReplicaPlan]:
    """What each replica is told."""
    from reflex_runtime.replicas.inside import settings_of
    from reflex_runtime.replicas.messages import Serve
    from reflex_runtime.replicas.replica import LIMITS, ReplicaPlan

    plans = []
    limits = replace(LIMITS, heartbeat_s=0.0) if not config.watchdog_s else LIMITS
    if config.watchdog_s:
        silent = max(1.0, config.watchdog_s)
        limits = replace(LIMITS, heartbeat_s=min(0.5, silent / 4), hung_after_s=silent)
    for number, device in enumerate(devices):
        changed, env = _on_device(device)
        changed |= _listeners_of(config, number)
        own = settings_of(config, number, **changed)
        told = [
            msgspec.to_builtins(replace(policy, config=replace(policy.config, **changed))) for policy in asked
        ]
        name = f"replica-{number}"
        serve = Serve(name, own, dict(places), told)
        plans.append(ReplicaPlan(name, device or config.provider, serve, env, limits))
    return plans


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
