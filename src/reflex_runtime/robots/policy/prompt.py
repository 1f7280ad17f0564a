"""The text that a policy reads: the instruction, cleaned and put into a template, perhaps with the state in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from reflex_runtime.robots.policy.units import Floats

Cleaning = Literal["strip", "lower", "underscores", "newlines", "end_newline"]

PROMPT, STATE_BINS = "{prompt}", "{state_bins}"
_EDGES: Final = np.linspace(-1.0, 1.0, 257)[:-1]  # of 256 bins; what is below them is -1


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The template has `{prompt}`, and perhaps `{state_bins}`: the normalised state, each number as its bin of 256 in
    [-1, 1], with spaces between.

    clean: what is done to the instruction first, in this order: "strip" white space, "lower" case, "underscores" and
    "newlines" become spaces, "end_newline" adds a newline unless it ends with one.
    """

    template: str = PROMPT
    clean: tuple[Cleaning, ...] = ()

    @property
    def reads_state(self) -> bool:
        return STATE_BINS in self.template

    def render(self, instruction: str, state: Floats | None) -> str:
        """The text to tokenize. state: float32 [state_dim], normalised, None for none."""
        before, _, after = self.template.partition(PROMPT)
        return _with_bins(before, state) + self._cleaned(instruction) + _with_bins(after, state)

    def _cleaned(self, text: str) -> str:
        for step in self.clean:
            if step == "strip":
                text = text.strip()
            elif step == "lower":
                text = text.lower()
            elif step == "underscores":
                text = text.replace("_", " ")
            elif step == "newlines":
                text = text.replace("\n", " ")
            elif not text.endswith("\n"):
                text += "\n"
        return text


def _with_bins(part: str, state: Floats | None) -> str:
    if STATE_BINS not in part:
        return part
    assert state is not None
    bins = np.digitize(state.astype(np.float64), _EDGES) - 1
    return part.replace(STATE_BINS, " ".join(map(str, bins.tolist())))
