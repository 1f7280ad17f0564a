"""Loads policies from a source: an export directory, a checkpoint of LeRobot or openpi, or a factory in Python. Checks
whether several fit into the memory."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.base import MonolithicPolicy, Policy, PolicySource, StagedModel, WholeModel
from reflex_runtime.robots.policy.decomposed import CACHE_BYTES, DecomposedPolicy
from reflex_runtime.robots.policy.episodes import Rtc
from reflex_runtime.robots.policy.spec import LEROBOT, OPENPI, PYTHON, DeviceOptions, PolicySpec
from reflex_runtime.robots.sources.export_directory import Export
from reflex_runtime.robots.sources.export_files import CONFIG_FILE, configured, model_bytes
from reflex_runtime.robots.sources.lerobot_checkpoint import LeRobotCheckpoint, is_checkpoint
from reflex_runtime.robots.sources.openpi_checkpoint import OpenpiCheckpoint
from reflex_runtime.run.model_files import check_files
from reflex_runtime.run.modules import imported, made
from reflex_runtime.run.onnx_session import CPU, CUDA
from reflex_runtime.run.process import CGROUP, container_memory
from reflex_runtime.run.processor import kind_of

log = logging.getLogger("reflex.policies")


def read_source(source: str | Path, device: DeviceOptions | None = None) -> PolicySource:
    """Read and check a policy's description, whose `open` loads the model. ConfigError names a fault and its place.

    source: an export directory, `lerobot:DIR` (or DIR alone, if it is a checkpoint), `openpi:DIR`, or
        `python:module:make`.
    device: for a factory in Python.
    """
    text = str(source)
    if text.startswith(PYTHON):
        return read_python(text, device or DeviceOptions())
    if text.startswith(OPENPI):
        return OpenpiCheckpoint.load(text)
    if text.startswith(LEROBOT) or _is_lerobot(text):
        return LeRobotCheckpoint.load(text)
    return Export.load(source)


def _is_lerobot(source: str) -> bool:
    """Whether a plain directory is a LeRobot checkpoint."""
    return not (Path(source) / CONFIG_FILE).is_file() and is_checkpoint(Path(source))


def is_export(source: str) -> bool:
    """Whether a source is read as an export directory."""
    return not source.startswith((LEROBOT, OPENPI, PYTHON)) and not _is_lerobot(source)


def directory_of(source: str) -> Path:
    """The directory that a source names; for `python:` the current one."""
    return Path() if source.startswith(PYTHON) else Path(source.removeprefix(LEROBOT).removeprefix(OPENPI))


class Weight(NamedTuple):
    """The size of a policy's model files, without their hash: hashing gigabytes would only delay a refusal."""

    source: str
    model_bytes: int


def weight_of(source: str) -> Weight:
    """The size of a source's model files, without reading them; 0 for a factory, and if there is no configuration."""
    root = directory_of(source)
    if source.startswith(PYTHON) or not configured(root):
        return Weight(source, 0)
    check_files(root)  # bounds the number of files
    return Weight(source, model_bytes(root))


def load_policy(
    source: PolicySource | str | Path,
    slot: str = "prod",
    *,
    device: DeviceOptions | None = None,
    cache_bytes: int = CACHE_BYTES,
    max_age_chunks: int = 0,
    rtc: Rtc | None = None,
    adaptive: bool = False,
    rows: int = 0,
) -> Policy:
    """The policy of a source, as in `read_source`. ConfigError if files or model are wrong, or do not match.

    rows: as in `Policy`. cache_bytes, max_age_chunks, rtc, adaptive: as in `DecomposedPolicy`; a whole model denoises
    inside its call, so it has no cache and refuses the last two.
    """
    spec = source if isinstance(source, PolicySource) else read_source(source)
    if not spec.staged:
        for flag, given in (("--rtc", rtc is not None), ("--adaptive-steps", adaptive)):
            if given:
                raise ConfigError(
                    f"{flag}: {spec.source} is {spec.inference_mode}; only decomposed policies denoise step by step"
                )
    model = spec.open(device or DeviceOptions())
    if isinstance(model, WholeModel):
        return MonolithicPolicy(model, slot, rows)
    return DecomposedPolicy(
        model, slot, cache_bytes=cache_bytes, max_age_chunks=max_age_chunks, rtc=rtc, adaptive=adaptive, rows=rows
    )


# -- python:module:make ------------------------------------------------------------------------------------------------


Factory = Callable[..., StagedModel | WholeModel]  # of a device, or of nothing


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PythonSource(PolicySource):
    """A policy of a factory. made: the model for `device`, until the first `open` on that device takes it."""

    factory: Factory
    device: DeviceOptions
    made: list[StagedModel | WholeModel]

    def open(self, device: DeviceOptions) -> StagedModel | WholeModel:
        mine = device == self.device and self.made
        model = self.made.pop() if mine else _made(self.source, self.factory, device)
        model.spec = self
        return model

    def forget(self) -> None:
        self.made.clear()


def read_python(source: str, device: DeviceOptions) -> PythonSource:
    """Import the module, call its factory, and check the model. ConfigError for a fault.

    source: `python:package.module:make`. The current directory comes first in the search for the module.
    """
    factory = imported(source.removeprefix(PYTHON), source, "python:package.module:function")
    if not callable(factory):
        name = source.rpartition(":")[2]
        raise ConfigError(f"{source}: {name!r} is no function; define `def {name}(device): …` there")
    model = _made(source, factory, device)
    values = {field.name: getattr(model.spec, field.name) for field in fields(PolicySpec)}
    if not values["config_hash"]:  # over plain values; of objects (a tokenizer, a robot) only over their class
        plain = {name: value for name, value in values.items() if name not in ("source", "model_hash")}
        text = json.dumps(plain, sort_keys=True, default=lambda value: type(value).__name__)
        values["config_hash"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    if not values["model_hash"]:  # over the factory's file, as the weights are not known
        file = getattr(sys.modules.get(getattr(factory, "__module__", "")), "__file__", None)
        values["model_hash"] = hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()[:16]
    return PythonSource(**{**values, "source": source}, factory=factory, device=device, made=[model])


def _made(source: str, factory: Factory, device: DeviceOptions) -> StagedModel | WholeModel:
    try:
        takes_device = bool(inspect.signature(factory).parameters)
    except ValueError:  # some built-in functions have no signature
        takes_device = True
    model = made(partial(factory, device) if takes_device else factory, source, "the factory")
    if not isinstance(model, StagedModel | WholeModel):
        wanted = "expected a StagedModel or a WholeModel; a function to serve takes a list"
        raise ConfigError(f"{source}: made {kind_of(model)}, {wanted}")
    if not isinstance(getattr(model, "spec", None), PolicySpec):
        raise ConfigError(f"{source}: the model has no spec; call super().__init__(spec) with a PolicySpec")
    if tuple(model.captured_sizes) != tuple(device.captured_sizes):
        raise ConfigError(f"{source}: --cuda-graphs: the model captures no batch sizes; leave the option out")
    if model.spec.staged != isinstance(model, StagedModel):
        kind = "StagedModel" if isinstance(model, StagedModel) else "WholeModel"
        raise ConfigError(f"{source}: spec.staged is {model.spec.staged}, but it made a {kind}")
    base = StagedModel if isinstance(model, StagedModel) else WholeModel
    for name in ("prefix", "pack", "step") if base is StagedModel else ("chunk",):
        if getattr(getattr(model, name), "__func__", None) is getattr(base, name):
            arguments = ", ".join([*inspect.signature(getattr(model, name)).parameters])
            raise ConfigError(f"{source}: {type(model).__name__} has no {name}({arguments}); define it")
    return model


# -- memory ------------------------------------------------------------------------------------------------------------
#
# Policies that do not fit into the device together are refused before any is loaded. The rest of the memory is for
# activations, prefix caches and whatever else runs there.


SHARE: Final = 0.7
"""The share of all memory that the models together may take."""

SKIP: Final = "REFLEX_SKIP_2POLICY_MEMORY_CHECK"
GB: Final = 1 << 30  # as for GPUs, and in nvidia-smi


def refusal(model_bytes: int, total: int, policies: int = 2, beside: int = 0, provider: str = CPU) -> str:
    """Why `policies` models of this size do not fit into `total` bytes of memory with `beside` bytes of others: the
    sizes, and three remedies. "" if they fit."""
    needed, available = policies * model_bytes + beside, SHARE * total
    if needed <= available:
        return ""
    what, where = ("VRAM", "GPU") if provider == CUDA else ("of memory", "machine")
    mode, fewer = f"{policies}-policy mode requires {in_gb(needed)} {what}", "drop to single-policy mode"
    if beside:
        mode = f"all policies together require {in_gb(needed)} {what}, {in_gb(beside)} beside this one,"
        fewer = "serve fewer policies"
    return (
        f"{mode} but only {in_gb(available)} ({SHARE:.0%} of {in_gb(total)}) is available. Either pick smaller models, "
        f"run on a larger {where}, or {fewer}."
    )


def check_two_policies(
    exports: Sequence[Weight | PolicySpec],
    environ: Mapping[str, str],
    provider: str = CPU,
    total: Callable[[str], int] | None = None,
    policies: int = 2,
    beside: int = 0,
) -> None:
    """ConfigError if policies of the largest export's size do not fit; to be called before any is loaded.

    policies: how many are in memory at a time, more than two during an exchange. beside: bytes of the server's other
    policies. environ: REFLEX_SKIP_2POLICY_MEMORY_CHECK=1 skips the check, with a warning in the log. total: bytes of
    memory by provider, default `total_memory`.
    """
    larger = max(exports, key=lambda export: export.model_bytes)
    if environ.get(SKIP) == "1":
        size = in_gb(larger.model_bytes)
        log.warning("%s=1: no check that %d policies of %s (%s) fit the memory", SKIP, policies, size, larger.source)
        return
    if why := refusal(larger.model_bytes, (total or total_memory)(provider), policies, beside, provider):
        raise ConfigError(f"{larger.source}: {why}")


def in_gb(size: float) -> str:
    """Bytes for people: one decimal, or three digits below 1 GB, without an exponent."""
    value = size / GB
    if 0.0 < value < 1e-4:
        return "under 0.0001 GB"
    return f"{value:.1f} GB" if value >= 1.0 else f"{value:.3g} GB"


# -- probes ------------------------------------------------------------------------------------------------------------


def total_memory(provider: str) -> int:
    """Bytes of memory where the provider keeps its models: the GPU's for CUDA, else the host's."""
    return gpu_memory(os.environ) if provider == CUDA else host_memory()


def host_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of physical memory, or the container's limit."""
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise ConfigError(f"the size of this machine's memory cannot be read; {SKIP}=1 skips the check") from None
    container = container_memory(cgroup)
    return size if container is None else min(size, container[0])


def gpu_memory(environ: Mapping[str, str], command: str = "nvidia-smi") -> int:
    """Bytes of the first GPU in CUDA_VISIBLE_DEVICES, read by nvidia-smi. An index counts in PCI order, as with
    CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    query = [command, f"--id={visible}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        mebibytes = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
        return int(mebibytes) << 20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"the GPU's memory cannot be read: {error}. {command} belongs to the NVIDIA driver (in a container: "
            f"NVIDIA_DRIVER_CAPABILITIES=compute,utility); install it, or set {SKIP}=1 to do without the check"
        ) from None
