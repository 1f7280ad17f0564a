"""`python:module:make`: a policy that a factory in somebody's own Python makes."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.policy.model import PolicySource, StagedModel, WholeModel
from reflex_runtime.robots.policy.spec import PYTHON, DeviceOptions, PolicySpec

Factory = Callable[[DeviceOptions], StagedModel | WholeModel]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PythonSource(PolicySource):
    """What a factory made says of itself.

    factory: makes it. made: the model it made, for `device`; taken by the first `open` on that device.
    """

    factory: Factory
    device: DeviceOptions
    made: list[StagedModel | WholeModel]

    def open(self, device: DeviceOptions) -> StagedModel | WholeModel:
        if device == self.device and self.made:
            model = self.made.pop()
        else:
            model = _made(self.source, self.factory, device)
        model.spec = self
        return model

    def forget(self) -> None:
        self.made.clear()


def read_python(source: str, device: DeviceOptions) -> PythonSource:
    """Import the module, call its factory, and check what it made. ConfigError says what is wrong with it.

    source: `python:package.module:make`. The module is looked for in the current directory first.
    """
    factory = _factory(source)
    model = _made(source, factory, device)
    spec = model.spec
    own = {field.name: getattr(spec, field.name) for field in fields(PolicySpec)}
    own |= {"source": source, "model_hash": spec.model_hash or _file_hash(factory)}
    own["config_hash"] = spec.config_hash or _config_hash(spec)
    return PythonSource(**own, factory=factory, device=device, made=[model])


def _factory(source: str) -> Factory:
    module, _, name = source.removeprefix(PYTHON).partition(":")
    if not module or not name:
        raise ConfigError(f"{source}: must be python:package.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        hint = "run reflex in the directory that contains it, or install it with pip" if _own(error, module) else (
            "install it with pip"
        )
        raise ConfigError(f"{source}: there is no module {error.name!r}: {hint}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{source}: {module} cannot be imported: {_told(error)}") from error
    if not callable(found):
        what = "has no" if found is None else "has something that is no function as"
        raise ConfigError(f"{source}: {module} {what} {name!r}; define `def {name}(device): …` there")
    factory: Factory = found
    return factory


def _made(source: str, factory: Factory, device: DeviceOptions) -> StagedModel | WholeModel:
    try:
        model = factory(device)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{source}: the factory failed: {_told(error)}") from error
    if not isinstance(model, StagedModel | WholeModel):
        raise ConfigError(f"{source}: made a {type(model).__name__}, expected a StagedModel or a WholeModel")
    if not isinstance(getattr(model, "spec", None), PolicySpec):
        raise ConfigError(f"{source}: the model has no spec; call super().__init__(spec) with a PolicySpec")
    if tuple(model.captured_sizes) != tuple(device.captured_sizes):
        raise ConfigError(f"{source}: --cuda-graphs: the model captures no batch sizes; leave the option out")
    if model.spec.staged != isinstance(model, StagedModel):
        kind = "StagedModel" if isinstance(model, StagedModel) else "WholeModel"
        raise ConfigError(f"{source}: spec.staged is {model.spec.staged}, but it made a {kind}")
    return model


def _own(error: ModuleNotFoundError, module: str) -> bool:
    """Whether the module that is missing is the one that was named, not one that it imports."""
    return error.name is not None and (module == error.name or module.startswith(f"{error.name}."))


def _told(error: Exception | SystemExit) -> str:
    """An exception of foreign code in one line: its class, its text, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{where}"


def _file_hash(factory: Any) -> str:
    """The version of a model that has no weights to hash: its file's."""
    module = sys.modules.get(getattr(factory, "__module__", ""))
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()[:16]


def _config_hash(spec: PolicySpec) -> str:
    """Of what it says of itself in plain values; objects (a tokenizer, a robot) have no text of their own."""
    plain = {f.name: getattr(spec, f.name) for f in fields(PolicySpec) if f.name not in ("source", "model_hash")}
    text = json.dumps(plain, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


