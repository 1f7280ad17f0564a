"""Options of a request for tokens beside its sampling, and the sampling that a model's authors chose for it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Priority
from reflex_runtime.ipc.sampling import SamplingParams
from reflex_runtime.llm.runners.checkpoint import read_json
from reflex_runtime.observe.trace_context import SpanContext

GENERATION_FILE: Final = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options of a generation request other than sampling.

    id: for people and traces; "" lets the engine name it. priority, client: see `Request`. time_limit: seconds until
    the first token; max_gap: between two of them. span: steps refer to it. adapter: the name of one of the runner's, ""
    for none. draft: guess the output, as these tokens first; None guesses as configured. prompt_logprobs: report what
    the model says of the prompt's own tokens, each with so many alternatives; see `Sequence.score`.
    """

    id: str = ""
    priority: Priority = Priority.DEFAULT
    client: Hashable = ""
    time_limit: float | None = None
    max_gap: float | None = None
    span: SpanContext | None = None
    adapter: str = ""
    draft: Sequence[int] | None = None
    prompt_logprobs: int | None = None


PLAIN: Final = GenerationOptions()


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults from `generation_config.json` for fields of `SamplingParams` that a request omits; without the file, the
    OpenAI API's own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __str__(self) -> str:
        """Those that differ from the API's own."""
        plain = SamplingDefaults()
        told = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name} {value:g}" for name, value in told if value != getattr(plain, name))


def sampling_defaults(directory: Path | str) -> SamplingDefaults:
    """Of a model directory. ConfigError that names the file, the key and the range for a value that cannot be.

    `do_sample` and `max_new_tokens` are for other programs: in the OpenAI API a request says both.
    """
    file = Path(directory) / GENERATION_FILE
    said = read_json(file) if file.is_file() else {}
    found = {f.name: said[f.name] for f in fields(SamplingDefaults) if said.get(f.name) is not None}
    for name, value in found.items():
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{file}: {name}={value!r:.200}: must be a {'whole ' if whole else ''}number")
    if found.get("top_k", 0) < 0:  # -1 is off, too, in some files
        found["top_k"] = 0
    try:
        SamplingParams(**found)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message.removeprefix('SamplingParams.')}") from None
    return SamplingDefaults(**_typed(found))


def _typed(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value if name == "top_k" else float(value) for name, value in found.items()}
