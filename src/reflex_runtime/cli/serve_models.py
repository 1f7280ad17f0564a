"""What `reflex serve MODEL_DIR …` serves: the models and their names, the tables [models.NAME], each checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reflex_runtime.cli.embedding_settings import embedding_config, read_embedding
from reflex_runtime.cli.serving import told_of
from reflex_runtime.cli.worker_settings import adapters_of, check_model
from reflex_runtime.config import (
    EMBEDDING_SETTINGS,
    MAX_MODELS,
    MODEL_SETTINGS,
    EmbeddingServeConfig,
    LLMServeConfig,
    OwnSettings,
)
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo.scribe import model_directory
from reflex_runtime.options import Places, one_line
from reflex_runtime.sources import MODELS, own_settings, tables_of

if TYPE_CHECKING:
    from reflex_runtime.llm.serving.model_host import EmbeddingPlan, ModelPlan

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
    config: LLMServeConfig | EmbeddingServeConfig
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


def models_of(
    config: LLMServeConfig | EmbeddingServeConfig, words: Sequence[str], file: Path | None = None
) -> list[ModelAsked]:
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
    lora = config.lora if isinstance(config, LLMServeConfig) else ()
    aliases, adapters = _aliases(config.alias, list(sources)), _adapters(lora, list(sources))
    found = []
    for name, directory in sources.items():
        where = f"model {name}: " if len(sources) > 1 else ""
        own, settings, places = _settings(config, name, directory, tables.get(name, {}), file, adapters[name])
        mine = settings.alias if "alias" in places else ()
        for alias in mine:
            _checked(alias, places["alias"])
        found.append(ModelAsked(name, directory, settings, places, own.weight, (*aliases[name], *mine), where))
    _check_names(found)
    return _divided(config, found)


def _settings(
    config: LLMServeConfig | EmbeddingServeConfig,
    name: str,
    directory: Path,
    table: Mapping[str, Any],
    file: Path | None,
    adapters: Sequence[str],
) -> tuple[OwnSettings, LLMServeConfig | EmbeddingServeConfig, Places]:
    """The settings of one model: the server's, with those of its table in their place. adapters: by --lora."""
    from reflex_runtime.llm.embedding.directory import is_embedding

    if isinstance(config, EmbeddingServeConfig) or (directory.is_dir() and is_embedding(directory)):
        _check_embedding(config, name, adapters)
        _check_kind(file, name, table, MODEL_SETTINGS - EMBEDDING_SETTINGS, "models that generate")
        return own_settings(file, MODELS, name, table, embedding_config(config), EMBEDDING_SETTINGS)
    _check_kind(file, name, table, EMBEDDING_SETTINGS - MODEL_SETTINGS, "embedding models")
    own, settings, places = own_settings(file, MODELS, name, table, config, MODEL_SETTINGS)
    own_adapters = [_adapter(text, places["lora"]) for text in settings.lora] if "lora" in places else []
    return own, replace(settings, lora=tuple(_named_once([*adapters, *own_adapters]))), places


def _check_embedding(config: LLMServeConfig | EmbeddingServeConfig, name: str, adapters: Sequence[str]) -> None:
    """ConfigError for what an embedding model does not have."""
    if isinstance(config, LLMServeConfig) and config.workers:
        told = f"runtime processes run models that generate, and {name} makes vectors"
        raise ConfigError(f"--workers={config.workers}: {told}; leave it out, or start a server for each")
    if adapters:
        raise ConfigError(f"--lora={one_line(adapters[0])}: {name} is an embedding model, and takes no adapters")


def _check_kind(file: Path | None, name: str, table: Mapping[str, Any], others: frozenset[str], kind: str) -> None:
    """ConfigError for a setting that only models of the other kind have. others, kind: those."""
    for key in table:
        if key.replace("-", "_") in others:
            raise ConfigError(f"{file}: [{MODELS}.{name}] {key}: is a setting of {kind}, and {name} is none of them")


def _sources(config: LLMServeConfig | EmbeddingServeConfig, words: Sequence[str]) -> dict[str, Path]:
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


def _aliases(given: Sequence[str], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The further names of each model by --alias."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())
    for text in given:
        alias, equals, name = text.partition("=")
        if not equals and len(names) > 1:
            raise ConfigError(f"--alias={one_line(text)}: must be ALIAS=MODEL, MODEL of {', '.join(names)}")
        name = name if equals else names[0]
        if name not in found:
            raise ConfigError(f"--alias={one_line(text)}: {one_line(name)} is none of {', '.join(names)}")
        found[name] += (_checked(alias, f"--alias={one_line(text)}"),)
    return found


def _adapters(given: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """The adapters of each model by --lora, as NAME=DIR."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for text in given:
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
    for model, own in _generating(asked):  # a name without a check, that of a directory, may have a colon
        for adapter in (text.partition("=")[0] for text in own.lora):
            twice = next((name for name in (model.name, *model.aliases) if f"{name}:{adapter}" in taken), None)
            if twice is not None:
                raise ConfigError(f"--lora={adapter}=…: a model is called {one_line(twice)}:{adapter} already")


def _divided(config: LLMServeConfig | EmbeddingServeConfig, asked: Sequence[ModelAsked]) -> list[ModelAsked]:
    """With the memory of the cache divided: models without a kv_cache_gb of their own share the server's evenly."""
    generating = _generating(asked)
    sharing = {model.name for model, _ in generating if "kv_cache_gb" not in model.places}
    if len(generating) < 2 or not sharing or isinstance(config, EmbeddingServeConfig):
        return list(asked)
    each = (config.kv_cache_gb or _CACHE_GB) / len(sharing)
    divided = {
        model.name: replace(model, config=replace(own, kv_cache_gb=each))
        for model, own in generating
        if model.name in sharing
    }
    return [divided.get(model.name, model) for model in asked]


def _generating(asked: Sequence[ModelAsked]) -> list[tuple[ModelAsked, LLMServeConfig]]:
    """The language models, each with its settings."""
    return [(model, model.config) for model in asked if isinstance(model.config, LLMServeConfig)]


def plans_of(asked: Sequence[ModelAsked]) -> tuple[list[ModelPlan], list[EmbeddingPlan]]:
    """What is served: models that generate, and models that make vectors. ConfigError for what can be found before
    anything is loaded."""
    from reflex_runtime.llm.load import describe
    from reflex_runtime.llm.sampling_defaults import sampling_defaults
    from reflex_runtime.llm.serving.model_host import EmbeddingPlan, ModelPlan
    from reflex_runtime.llm.tokenizer import HFTokenizer

    plans, embeddings = list[ModelPlan](), list[EmbeddingPlan]()
    for model in asked:
        config = model.config
        with told_of(model.where):
            if isinstance(config, EmbeddingServeConfig):
                read = read_embedding(model.directory, config)
                embeddings.append(EmbeddingPlan(model.name, config, read, model.weight, model.aliases))
                continue
            check_model(config, describe(model.directory))
            HFTokenizer.load(model.directory)
            defaults = sampling_defaults(model.directory)
        names, adapters = model.aliases, tuple(adapters_of(config))
        plans.append(ModelPlan(model.name, config, model.directory, model.weight, names, adapters, defaults))
    _check_memory([config for _, config in _generating(asked)])
    return plans, embeddings


def _check_memory(configs: Sequence[LLMServeConfig]) -> None:
    """Whether the caches of several models fit together, in all processes: each was checked as if it were alone."""
    from reflex_runtime.llm.load import choose
    from reflex_runtime.llm.memory import free_bytes

    if len(configs) < 2:
        return
    copies = max(1, configs[0].workers)
    devices = {choose(c.device, c.runner, c.dtype, quantization=c.quantization)[0] for c in configs}
    total, free = copies * sum(config.kv_cache_gb or _CACHE_GB for config in configs), free_bytes() / 1e9
    if devices == {"cpu"} and total > free:
        where = f" in {copies} processes" if copies > 1 else " together"
        raise ConfigError(f"kv_cache_gb: the models' caches take {total:.2f} GB{where}, and {free:.2f} GB are free")


def rows_of(asked: Sequence[ModelAsked]) -> Iterator[tuple[str, str]]:
    """A row of the settings for each of several models: its directory, weight, names, and its own settings."""
    if len(asked) < 2:
        return
    for model in asked:
        config, told = model.config, [str(model.directory), f"weight {model.weight:g}"]
        if isinstance(config, LLMServeConfig):
            told.append(f"cache {config.kv_cache_gb or _CACHE_GB:.3g} GB")
        else:
            told.append("makes vectors")
        told += [f"alias {alias}" for alias in model.aliases]
        told += [f"lora {text}" for text in config.lora] if isinstance(config, LLMServeConfig) else []
        told += [
            f"{name} {getattr(config, name)}"
            for name in model.places
            if name in (MODEL_SETTINGS | EMBEDDING_SETTINGS) - {"alias", "lora", "kv_cache_gb"}
        ]
        yield f"model {model.name}", ", ".join(told)
