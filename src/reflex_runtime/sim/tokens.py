"""Runs of prompts on an engine that generates tokens, measured from its events: one, and the same at many budgets.

    from reflex_runtime.llm import SamplingParams
    from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
    from reflex_runtime.llm.engine.llm_engine import Engines
    from reflex_runtime.sim.tokens import Prompt, StepTime, TokenRuns

    takes = StepTime(fixed=0.002, per_token=0.00005)
    prompt = Prompt("A", "hello", SamplingParams.greedy(4, ignore_eos=True))
    runs = TokenRuns(Engines(ToyRunner(), ByteTokenizer(), takes), [prompt])
    assert runs.measure(budget=8).tokens == [5, 1, 1, 1]

The engine is a parameter, so that nothing here depends on a language model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from reflex_runtime.core.events import BatchScheduled, Event, RequestProgressed, RequestSettled
from reflex_runtime.core.request import Priority
from reflex_runtime.observe.journal_view import FAINT, INK, PALETTE, RULE

if TYPE_CHECKING:
    from reflex_runtime.observe.plots import Axes, Figure

Progress = Callable[[int, int], object]  # told (done, total) runs
NO_LIMIT = 1 << 20


class PromptEnd(Protocol):
    """The result of a request that ended."""

    @property
    def request_id(self) -> str:
        """The name of its prompt."""


E = TypeVar("E", bound=PromptEnd)
E_co = TypeVar("E_co", bound=PromptEnd, covariant=True)


class TokenEngine(Protocol[E_co]):
    """The engine as a run uses it; `llm.engine.LLMEngine` is one."""

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""

    def add_request(self, prompt: str, params: Any, *, request_id: str, priority: Priority) -> object:
        """Queue a request."""

    def step(self) -> Sequence[E_co]:
        """Make one step; returns the requests that ended."""

    def close(self) -> None:
        """Free what the engine holds."""


class StartEngine(Protocol):
    """Starts a fresh engine for each run; `llm.virtual.Engines` is one."""

    def __call__(
        self, sinks: Iterable[Callable[[Event], object]] = (), **changes: Any
    ) -> tuple[TokenEngine[PromptEnd], Callable[[], float]]:
        """An engine and its clock, in seconds. changes: settings of the engine that differ in this run."""


class Prompt(NamedTuple):
    """One request. params: sampling parameters, as the engine takes them. arrives: steps made before it arrives."""

    name: str
    text: str
    params: Any
    arrives: int = 0
    priority: Priority = Priority.DEFAULT


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds that a step takes: a fixed part, and one for each of its tokens."""

    fixed: float
    per_token: float

    def __call__(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens

    def __str__(self) -> str:
        return f"{self.fixed * 1e3:.4g} ms + {self.per_token * 1e3:.4g} ms a token"


class Measured(NamedTuple):
    """One run in figures. Tokens per step; by request the step of its first token (from 1), and seconds to it."""

    budget: int
    tokens: list[int]
    first_step: list[int]
    first_token: list[float]

    @property
    def wasted(self) -> float:
        """Share of the budget that no step used, 0 to 1."""
        return 1.0 - sum(self.tokens) / (self.budget * len(self.tokens))


def drive(engine: TokenEngine[E], prompts: Iterable[Prompt]) -> dict[str, E]:
    """Run all prompts, each arriving when its step has come, and close the engine; their outputs by name."""
    todo = sorted(prompts, key=lambda p: p.arrives)[::-1]
    outputs: dict[str, E] = {}
    made = 0
    while todo or engine.unfinished:
        if not engine.unfinished:
            made = max(made, todo[-1].arrives)  # nothing to run until the next one comes
        while todo and todo[-1].arrives <= made:
            prompt = todo.pop()
            engine.add_request(prompt.text, prompt.params, request_id=prompt.name, priority=prompt.priority)
        for output in engine.step():
            outputs[output.request_id] = output
        made += 1
    engine.close()
    return outputs


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """The same prompts, run as often as needed, each time on a fresh engine."""

    start: StartEngine
    prompts: Sequence[Prompt]

    def measure(self, budget: int, **changes: Any) -> Measured:
        """Run the prompts with at most `budget` tokens in a step. changes: further settings of the engine."""
        tokens: list[int] = []
        first: dict[str, tuple[int, float]] = {}

        def watch(event: Event) -> None:
            if isinstance(event, BatchScheduled):
                tokens.append(int(sum(event.batch.grants.values())))
            elif isinstance(event, RequestSettled) or (
                isinstance(event, RequestProgressed) and event.value is not None
            ):
                first.setdefault(event.ticket.id, (len(tokens), event.at - event.ticket.arrived))

        engine, _ = self.start([watch], max_num_batched_tokens=budget, **changes)
        drive(engine, self.prompts)
        return Measured(
            budget,
            tokens,
            [first[p.name][0] for p in self.prompts],
            [first[p.name][1] for p in self.prompts],
        )


class Knee(NamedTuple):
    """Where a larger budget stops paying.

    saturated: the smallest budget beyond which more has no effect; None if the sweep ends before it. floor: steps
    needed without any limit. bend: the budget at which the curve bends most: the point farthest below the straight
    line between its ends, on the axis that it is drawn on.
    """

    saturated: int | None
    floor: int
    bend: int


def sweep(runs: TokenRuns, budgets: Sequence[int], progress: Progress = lambda *_: None) -> tuple[list[Measured], Knee]:
    """Run the prompts under every budget, ascending; returns the runs and where a larger budget stops paying."""
    found = []
    for number, budget in enumerate(budgets, 1):
        found.append(runs.measure(budget))
        progress(number, len(budgets))
    return found, knee(found, len(runs.measure(NO_LIMIT).tokens))


def knee(runs: Sequence[Measured], floor: int) -> Knee:
    """The knee and the bend of runs with ascending budgets."""
    budgets, steps = [r.budget for r in runs], [len(r.tokens) for r in runs]
    saturated = None
    for budget, count in zip(reversed(budgets), reversed(steps), strict=True):
        if count > floor:
            break
        saturated = budget
    places = [log2(b) if wide(budgets) else b for b in budgets]
    width, height = places[-1] - places[0] or 1, steps[0] - steps[-1] or 1
    under = [1.0 - (x - places[0]) / width - (s - steps[-1]) / height for x, s in zip(places, steps, strict=True)]
    return Knee(saturated, floor, budgets[under.index(max(under))])


def wide(budgets: Sequence[float]) -> bool:
    """Whether the budgets span so much that a logarithmic axis is needed."""
    return budgets[-1] > 32 * budgets[0]


def in_words(found: Knee, runs: Sequence[Measured]) -> list[str]:
    """Both points in words."""
    steps = {r.budget: len(r.tokens) for r in runs}
    last = runs[-1].budget
    if found.saturated is None:
        lines = [f"no knee up to {last}: {steps[last]} steps there, {found.floor} without a limit"]
    else:
        peaks = {r.budget: max(r.tokens) for r in runs}
        fits = "everything fits, and " if peaks[found.saturated] == peaks[last] else ""
        lines = [f"knee at {found.saturated}: {fits}more budget buys nothing ({found.floor} steps, as without a limit)"]
    if found.bend != found.saturated:
        lines.append(
            f"sharpest bend at {found.bend}: the curve is farthest below the line between its ends; beyond it a token "
            f"of budget buys less ({steps[found.bend]} steps)"
        )
    return lines


# -- the picture -------------------------------------------------------------------------------------------------------


def draw_sweep(runs: Sequence[Measured], found: Knee, prefix: Path, hint: str = "") -> tuple[Path, Path]:
    """Steps over budget into PREFIX.svg and PREFIX.png, the knee named. Raises ConfigError, with the hint, when a
    file cannot be written."""
    from reflex_runtime.observe.plots import saved

    return saved(prefix, lambda: _sweep_figure(runs, found), hint)


def _sweep_figure(runs: Sequence[Measured], found: Knee) -> Figure:
    from reflex_runtime.observe.plots import Figure, MaxNLocator

    budgets, steps = [r.budget for r in runs], [len(r.tokens) for r in runs]
    figure = Figure(figsize=(9.0, 5.0), facecolor="white")
    box = {"left": 0.075, "right": 0.985, "top": 0.89 - 0.042 * len(in_words(found, runs)), "bottom": 0.10}
    panels = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (10, 3), "hspace": 0.16, **box})
    axes, waste = panels
    for one in (axes, waste):
        one.set_axisbelow(True)
        one.yaxis.grid(True, color=RULE, linewidth=0.6)
        one.spines["left"].set_visible(False)
    if wide(budgets):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.plot(
        budgets, steps, color=PALETTE[4], linewidth=1.4, marker="o", markersize=3.2, drawstyle="steps-post", gid="steps"
    )
    axes.axhline(found.floor, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), gid="floor")
    axes.annotate(
        f"{found.floor} steps: needed without a limit", (1.0, found.floor), xycoords=("axes fraction", "data"),
        xytext=(0, -3), textcoords="offset points", ha="right", va="top", color=FAINT, fontsize=7.5,
    )  # fmt: skip
    axes.set_ylim(0.0, 1.12 * max(steps))
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    axes.set_ylabel("steps")
    for name, budget, colour in (("sharpest bend", found.bend, PALETTE[8]), ("knee", found.saturated, PALETTE[1])):
        if budget is not None and (name == "knee" or budget != found.saturated):
            _name_point(axes, name, (budget, steps[budgets.index(budget)]), colour)
    if found.bend != found.saturated:
        ends = [budgets[0], budgets[-1]], [steps[0], steps[-1]]
        axes.plot(*ends, color=PALETTE[8], linewidth=0.8, linestyle=(0, (1, 3)), gid="between-ends")
    waste.plot(budgets, [100.0 * r.wasted for r in runs], color=PALETTE[6], linewidth=1.2, drawstyle="steps-post")
    waste.set_ylim(0.0, 105.0)
    waste.set_ylabel("unused\nbudget, %")
    waste.set_xlabel("max_num_batched_tokens: the budget of a step, tokens")
    _head(figure, runs, found)
    return figure


def _name_point(axes: Axes, name: str, at: tuple[float, float], colour: str) -> None:
    axes.plot(*([x] for x in at), "o", color=colour, markersize=8, gid=name.split()[-1])
    axes.annotate(
        f"{name} {at[0]:g}", at, xytext=(6, 9 if name == "knee" else 30), textcoords="offset points", color=colour,
        fontsize=9, fontweight="bold",
    )  # fmt: skip


def _head(figure: Figure, runs: Sequence[Measured], found: Knee) -> None:
    count = len(runs[0].first_step)
    title = f"steps over budget: {count:,} request{'s' * (count != 1)}, {sum(runs[0].tokens):,} tokens"
    figure.text(0.012, 0.955, title, fontsize=12.5, fontweight="bold", va="center", color=INK)
    for i, line in enumerate(in_words(found, runs)):
        figure.text(0.012, 0.905 - 0.042 * i, line, color=FAINT, va="center")
