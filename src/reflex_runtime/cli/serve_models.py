"""What `reflex serve MODEL_DIR …` serves: the models and their names, the tables [models.NAME], each checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reflex_runtime.cli.serving import told_of
from reflex_runtime.cli.worker_settings import adapters_of, check_model
from reflex_runtime.config import MAX_MODELS, MODEL_SETTINGS, LLMServeConfig
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo.scribe import model_directory
from reflex_runtime.options import Places, one_line
from reflex_runtime.sources import MODELS, own_settings, tables_of

if TYPE_CHECKING:
    from reflex_runtime.llm.serving.model_host import ModelPlan

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
_CACHE_GB: Final = (1 << 30) / 1e9  # what a cache takes where nothing is said


@dataclass(frozen=True, slots=True)
class ModelAsked:
    """One model as the command line and the file ask for it.

    config: with its own settings; places: where those were given. aliases: further names. where: begins its errors, ""
    where there is no other model.
    """

    name: str
    directory: Path
    config: LLMServeConfig
    places: Places
    weight: float
    aliases: tuple[str, ...]
    where: str


def source_of(word: str) -> tuple[str, Path]:
    """What a word of the command line names: a directory, or NAME=DIR. The name is "" where it has none."""
    name, equals, source = word.partition("=")
    if not equals or Path(word).exists():
        return "", model_directory(word)
    return name, model_directory(source)


def models_of(config: LLMServeConfig, words: Sequence[str], file: Path | None = None) -> list[ModelAsked]:
    """Every model, those of the command line first; ConfigError when the options contradict each other."""
    tables = tables_of(file, MODELS)
    sources = _sources(config, words)
    for name, table in tables.items():
        if name not in sources and table.get("source"):
            sources[_checked(name, f"{file}: [{MODELS}.{name}]")] = model_directory(str(table["source"]))
        elif name not in sources:
            raise ConfigError(f"{file}: [{MODELS}.{name}]: no such model is served: write {name}=DIR, or give source")
    if not sources:
        raise ConfigError("MODEL_DIR: is missing; name a directory, or give tables [models.NAME] with a source")
    if len(sources) > MAX_MODELS:
        raise ConfigError(f"MODEL_DIR: {len(sources)} models are named, at most {MAX_MODELS} are served")
    aliases, adapters = _aliases(config, list(sources)), _adapters(config, list(sources))
    found = []
    for name, directory in sources.items():
        where = f"model {name}: " if len(sources) > 1 else ""
        own, settings, places = own_settings(file, MODELS, name, tables.get(name, {}), config, MODEL_SETTINGS)
        mine = settings.alias if "alias" in places else ()
        for alias in mine:
            _checked(alias, places["alias"])
        own_adapters = [_adapter(text, places["lora"]) for text in settings.lora] if "lora" in places else []
        settings = replace(settings, lora=tuple(_named_once([*adapters[name], *own_adapters])))
        found.append(ModelAsked(name, directory, settings, places, own.weight, (*aliases[name], *mine), where))
    _check_names(found)
    return _divided(config, found)


def _sources(config: LLMServeConfig, words: Sequence[str]) -> dict[str, Path]:
    """The directories of the command line, by name."""
    found: dict[str, Path] = {}
    for word in words:
        name, directory = source_of(word)
        if config.served_model_name and (name or len(words) > 1):
            given = f"--served-model-name={one_line(config.served_model_name)}"
            raise ConfigError(f"{given}: is for one MODEL_DIR without a name; write NAME=DIR, or --alias")
        name = _checked(name, one_line(word)) if name else config.served_model_name or directory.resolve().name
        if name in found:
            raise ConfigError(f"{one_line(word)}: a model is called {name} already; write NAME=DIR with another name")
        found[name] = directory
    return found


def _checked(name: str, where: str) -> str:
    if not _NAME.fullmatch(name):
        what = "must be 1 to 64 letters, digits, and . _ / -, and begin with a letter or a digit"
        raise ConfigError(f"{where}: the name {one_line(name)!r} {what}")
    return name


def _aliases(config: LLMServeConfig, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The further names of each model by --alias."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())
    for text in config.alias:
        alias, equals, name = text.partition("=")
        if not equals and len(names) > 1:
            raise ConfigError(f"--alias={one_line(text)}: must be ALIAS=MODEL, MODEL of {', '.join(names)}")
        name = name if equals else names[0]
        if name not in found:
            raise ConfigError(f"--alias={one_line(text)}: {one_line(name)} is none of {', '.join(names)}")
        found[name] += (_checked(alias, f"--alias={one_line(text)}"),)
    return found


def _adapters(config: LLMServeConfig, names: Sequence[str]) -> dict[str, list[str]]:
    """The adapters of each model by --lora, as NAME=DIR."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for text in config.lora:
        where = f"--lora={one_line(text)}"
        model, colon, _ = text.partition("=")[0].partition(":")
        if len(names) > 1 and not (colon and model in found):
            raise ConfigError(f"{where}: must be MODEL:NAME=DIR, MODEL of {', '.join(names)}")
        if colon and model not in found:
            raise ConfigError(f"{where}: {one_line(model)} is none of {', '.join(names)}")
        found[model if colon else names[0]].append(_adapter(text[len(model) + 1 :] if colon else text, where))
    return found


def _adapter(text: str, where: str) -> str:
    """NAME=DIR, the directory in full: it is read in other processes, too."""
    name, equals, directory = text.partition("=")
    if not (equals and directory):
        raise ConfigError(f"{where}: must be NAME=DIR, DIR a directory of peft with adapter_config.json")
    return f"{_checked(name, where)}={Path(directory).resolve()}"


def _named_once(adapters: Sequence[str]) -> Sequence[str]:
    names = [text.partition("=")[0] for text in adapters]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--lora={twice}=…: two adapters of a model have this name")
    return adapters


def _check_names(asked: Sequence[ModelAsked]) -> None:
    taken = {model.name: model.name for model in asked}
    for model in asked:
        for alias in model.aliases:
            if alias in taken:
                raise ConfigError(f"--alias={one_line(alias)}: names {taken[alias]} already")
            taken[alias] = model.name
    for model in asked:  # a name without a check, that of a directory, may have a colon
        for adapter in (text.partition("=")[0] for text in model.config.lora):
            twice = next((name for name in (model.name, *model.aliases) if f"{name}:{adapter}" in taken), None)
            if twice is not None:
                raise ConfigError(f"--lora={adapter}=…: a model is called {one_line(twice)}:{adapter} already")


def _divided(config: LLMServeConfig, asked: Sequence[ModelAsked]) -> list[ModelAsked]:
    """With the memory of the cache divided: models without a kv_cache_gb of their own share the server's evenly."""
    sharing = [model for model in asked if "kv_cache_gb" not in model.places]
    if len(asked) == 1 or not sharing:
        return list(asked)
    each = (config.kv_cache_gb or _CACHE_GB) / len(sharing)
    return [
        replace(model, config=replace(model.config, kv_cache_gb=each)) if model in sharing else model
        for model in asked
    ]


def plans_of(asked: Sequence[ModelAsked]) -> list[ModelPlan]:
    """What is served. ConfigError for what can be found before anything is loaded."""
    from reflex_runtime.llm.embedding.directory import is_embedding
    from reflex_runtime.llm.load import describe
    from reflex_runtime.llm.sampling_defaults import sampling_defaults
    from reflex_runtime.llm.serving.model_host import ModelPlan
    from reflex_runtime.llm.tokenizer import HFTokenizer

    plans = []
    for model in asked:
        with told_of(model.where):
            if model.directory.is_dir() and is_embedding(model.directory):
                alone = f"it is served alone: reflex serve {model.directory}"
                raise ConfigError(f"{model.directory}: is an embedding model, not one that generates; {alone}")
            check_model(model.config, describe(model.directory))
            HFTokenizer.load(model.directory)
            defaults = sampling_defaults(model.directory)
        names, adapters = model.aliases, tuple(adapters_of(model.config))
        plans.append(ModelPlan(model.name, model.config, model.directory, model.weight, names, adapters, defaults))
    _check_memory(asked)
    return plans


def _check_memory(asked: Sequence[ModelAsked]) -> None:
    """Whether the caches of several models fit together, in all processes: each was checked as if it were alone."""
    from reflex_runtime.llm.load import choose
    from reflex_runtime.llm.memory import free_bytes

    configs, copies = [model.config for model in asked], max(1, asked[0].config.workers)
    devices = {choose(c.device, c.runner, c.dtype, quantization=c.quantization)[0] for c in configs}
    total, free = copies * sum(config.kv_cache_gb or _CACHE_GB for config in configs), free_bytes() / 1e9
    if len(asked) > 1 and devices == {"cpu"} and total > free:
        where = f" in {copies} processes" if copies > 1 else " together"
        raise ConfigError(f"kv_cache_gb: the models' caches take {total:.2f} GB{where}, and {free:.2f} GB are free")


def rows_of(asked: Sequence[ModelAsked]) -> Iterator[tuple[str, str]]:
    """A row of the settings for each of several models: its directory, weight, names, and its own settings."""
    if len(asked) < 2:
        return
    for model in asked:
        told = [str(model.directory), f"weight {model.weight:g}", f"cache {model.config.kv_cache_gb:.3g} GB"]
        told += [f"alias {alias}" for alias in model.aliases] + [f"lora {text}" for text in model.config.lora]
        told += [
            f"{name} {getattr(model.config, name)}"
            for name in model.places
            if name in MODEL_SETTINGS - {"alias", "lora", "kv_cache_gb"}
        ]
        yield f"model {model.name}", ", ".join(told)
