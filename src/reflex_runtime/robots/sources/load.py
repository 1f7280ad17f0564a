"""Where a policy comes from: an export directory, a checkpoint of LeRobot or openpi, or a factory in Python."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.base import MonolithicPolicy, Policy, PolicySource, StagedModel, WholeModel
from reflex_runtime.robots.policy.decomposed import CACHE_BYTES, DecomposedPolicy
from reflex_runtime.robots.policy.episodes import Rtc
from reflex_runtime.robots.policy.spec import LEROBOT, OPENPI, PYTHON, DeviceOptions, PolicySpec
from reflex_runtime.robots.sources.export_directory import Export
from reflex_runtime.robots.sources.export_files import CONFIG_FILE, model_bytes
from reflex_runtime.robots.sources.lerobot_checkpoint import LeRobotCheckpoint, is_checkpoint
from reflex_runtime.robots.sources.memory import Weight
from reflex_runtime.robots.sources.openpi_checkpoint import OpenpiCheckpoint
from reflex_runtime.run.modules import imported, made
from reflex_runtime.run.processor import kind_of


def read_source(source: str | Path, device: DeviceOptions | None = None) -> PolicySource:
    """Read and check a policy's description; its model is loaded by `open`. ConfigError for what is wrong with it.

    source: an export directory, `lerobot:DIR` (or DIR alone, if it is a checkpoint), `openpi:DIR`, or
        `python:module:make`.
    device: of a factory in Python.
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
    """The directory that a source names; of `python:` the current one."""
    return Path() if source.startswith(PYTHON) else Path(source.removeprefix(LEROBOT).removeprefix(OPENPI))


def weight_of(source: str) -> Weight:
    """The size of a source's model files, without reading them; 0 for `python:`, which has none."""
    return Weight(source, 0 if source.startswith(PYTHON) else model_bytes(directory_of(source)))


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

    rows: as in `Policy`. cache_bytes, max_age_chunks, rtc, adaptive: as in `DecomposedPolicy`; a whole model has no
    prefix and denoises inside its call, so it has no cache and refuses the other two.
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
    """made: the model that the factory made for `device`; taken by the first `open` on that device."""

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
    """Import the module, call its factory, and check what it made. ConfigError for what is wrong with it.

    source: `python:package.module:make`. The module is looked for in the current directory first.
    """
    factory = imported(source.removeprefix(PYTHON), source, "python:package.module:function")
    if not callable(factory):
        name = source.rpartition(":")[2]
        raise ConfigError(f"{source}: {name!r} is no function; define `def {name}(device): …` there")
    model = _made(source, factory, device)
    values = {field.name: getattr(model.spec, field.name) for field in fields(PolicySpec)}
    if not values["config_hash"]:  # of plain values; objects (a tokenizer, a robot) have no text of their own
        plain = {name: value for name, value in values.items() if name not in ("source", "model_hash")}
        text = json.dumps(plain, sort_keys=True, default=lambda value: type(value).__name__)
        values["config_hash"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    if not values["model_hash"]:  # it has no weights to hash: its file's
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
        raise ConfigError(f"{source}: made {kind_of(model)}, expected a StagedModel or a WholeModel")
    if not isinstance(getattr(model, "spec", None), PolicySpec):
        raise ConfigError(f"{source}: the model has no spec; call super().__init__(spec) with a PolicySpec")
    if tuple(model.captured_sizes) != tuple(device.captured_sizes):
        raise ConfigError(f"{source}: --cuda-graphs: the model captures no batch sizes; leave the option out")
    if model.spec.staged != isinstance(model, StagedModel):
        kind = "StagedModel" if isinstance(model, StagedModel) else "WholeModel"
        raise ConfigError(f"{source}: spec.staged is {model.spec.staged}, but it made a {kind}")
    return model
