"""The key `prompt` of an export: a template, and how instructions are cleaned first."""

from __future__ import annotations

import re
from typing import Annotated, Final, get_args

import msgspec
from msgspec import Meta

from reflex_runtime.policies.export.config_file import ExportObject
from reflex_runtime.policies.policy.prompt import PROMPT, STATE_BINS, Cleaning, PromptTemplate

_WORDS: Final = ", ".join(get_args(Cleaning))
_Template = Annotated[str, Meta(max_length=4096, description=f"a text with {PROMPT} once, and perhaps {STATE_BINS}")]


class _PromptKeys(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    template: _Template = PROMPT
    clean: Annotated[tuple[Cleaning, ...], Meta(max_length=8, description=f"a list of {_WORDS}")] = ()


def read_prompt(config: ExportObject, takes_text: bool) -> PromptTemplate | None:
    """The template; None without the key."""
    if not config.has("prompt"):
        return None
    if not takes_text:
        config.wrong("prompt", "none, because `inputs` has no role tokens")
    said = config.get("prompt")
    table = ExportObject(config.file, {"template": said} if isinstance(said, str) else said, "prompt")
    keys = table.read(_PromptKeys)
    places = re.findall(r"{\w*}", keys.template)
    if places.count(PROMPT) != 1 or set(places) - {PROMPT, STATE_BINS}:
        config.wrong("prompt", f"a text with {PROMPT} once, and perhaps {STATE_BINS}", keys.template)
    return PromptTemplate(keys.template, keys.clean)
