"""Checks that two policies fit the device, before anything is loaded: out of memory in the tenth minute is too late.

The rule (twice the larger model within 70 % of the memory) is a pure function of two sizes; the probes stand apart. The
rest of the memory is for activations, prefix caches and whatever else runs there.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.spec import PolicySpec
from reflex_runtime.run.onnx_session import CPU, CUDA

SHARE: Final = 0.7
"""Of all memory, what the models together may take."""

SKIP: Final = "REFLEX_SKIP_2POLICY_MEMORY_CHECK"
GB: Final = 1 << 30  # as makers of GPUs count, and nvidia-smi shows

_CGROUP: Final = Path("/sys/fs/cgroup")

log = logging.getLogger("reflex.policies")


class Weight(NamedTuple):
    """A policy by the sizes of its files: hashing gigabytes first would only delay the refusal."""

    source: str
    model_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """What `policies` models of `model_bytes` each need, and others beside them, and what there is; bytes."""

    model_bytes: int
    total: int
    policies: int = 2
    beside: int = 0

    @property
    def needed(self) -> int:
        return self.policies * self.model_bytes + self.beside

    @property
    def available(self) -> float:
        return SHARE * self.total

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def refusal(self, provider: str = CPU) -> str:
        """The sizes, and the three ways out."""
        what, where = ("VRAM", "GPU") if provider == CUDA else ("of memory", "machine")
        mode, fewer = f"{self.policies}-policy mode requires {in_gb(self.needed)} {what}", "drop to single-policy mode"
        if self.beside:
            mode = f"all policies together require {in_gb(self.needed)} {what}, {in_gb(self.beside)} beside this one,"
            fewer = "serve fewer policies"
        return (
            f"{mode} but only {in_gb(self.available)} ({SHARE:.0%} of {in_gb(self.total)}) is available. Either pick "
            f"smaller models, run on a larger {where}, or {fewer}."
        )


def check_two_policies(
    exports: Sequence[Weight | PolicySpec],
    environ: Mapping[str, str],
    provider: str = CPU,
    total: Callable[[str], int] | None = None,
    policies: int = 2,
    beside: int = 0,
) -> None:
    """ConfigError when policies of the largest export's size do not fit; to be called before any is loaded.

    policies: how many are in memory at a time, more than two while one is exchanged. beside: bytes of the server's
    other policies. environ: REFLEX_SKIP_2POLICY_MEMORY_CHECK=1 skips the check, with a warning in the log. total: bytes
    of memory by provider, default `total_memory`.
    """
    larger = max(exports, key=lambda export: export.model_bytes)
    if environ.get(SKIP) == "1":
        size = in_gb(larger.model_bytes)
        log.warning("%s=1: no check that %d policies of %s (%s) fit the memory", SKIP, policies, size, larger.source)
        return
    room = Room(larger.model_bytes, (total or total_memory)(provider), policies, beside)
    if not room.fits:
        raise ConfigError(f"{larger.source}: {room.refusal(provider)}")


def in_gb(size: float) -> str:
    """Bytes as people read them: one decimal, or three digits where that would say nothing."""
    value = size / GB
    return f"{value:.1f} GB" if value >= 1.0 else f"{value:.3g} GB"


# -- probes ------------------------------------------------------------------------------------------------------------


def total_memory(provider: str) -> int:
    """Bytes of memory where the provider keeps its models: the GPU's for CUDA, else the host's."""
    return gpu_memory(os.environ) if provider == CUDA else host_memory()


def host_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes of physical memory, or of what the container may take of it."""
    try:
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):
        raise ConfigError(f"the size of this machine's memory cannot be read; {SKIP}=1 skips the check") from None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # version 2 and version 1
        try:
            text = (cgroup / name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdigit():  # else "max": no limit
            sizes.append(int(text))
    return min(sizes)


def gpu_memory(environ: Mapping[str, str], command: str = "nvidia-smi") -> int:
    """Bytes of the first GPU that CUDA_VISIBLE_DEVICES leaves visible, as the driver's own program tells.

    An index there counts in PCI order, as with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    ask = [command, f"--id={visible}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout
        return int(told) << 20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"the GPU's memory cannot be read: {error}. {command} belongs to the NVIDIA driver (in a container: "
            f"NVIDIA_DRIVER_CAPABILITIES=compute,utility); install it, or set {SKIP}=1 to do without the check"
        ) from None
