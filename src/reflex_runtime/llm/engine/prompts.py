"""`reflex trace --prompts`: the steps in which the engine of `reflex serve` runs prompts; with `--sweep`, at many
budgets of tokens, and the budget beyond which a larger one changes nothing (the knee)."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from reflex_runtime.core.batch import BatchScheduled, Event, RequestProgressed, RequestSettled
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import PRIORITIES, Priority
from reflex_runtime.core.statistics import percentile
from reflex_runtime.observe.journal import Journal, plain
from reflex_runtime.observe.trace_tables import PALETTE, ROWS, Colours, courses, ink
from reflex_runtime.settings.declare import one_line, option, validate
from reflex_runtime.settings.read import load

if TYPE_CHECKING:
    from reflex_runtime.llm.engine.llm_engine import LLMEngine
    from reflex_runtime.llm.engine.sequence import RequestOutput
    from reflex_runtime.llm.engine.tokenizer import Tokenizer
    from reflex_runtime.llm.runners.runner import Runner, Step
    from reflex_runtime.observe.picture import Figure

MOST_PROMPTS = 10_000
LONGEST = 65_536  # tokens of output
LATEST = 999_999_999  # steps before a prompt arrives
BUDGETS = 64  # most budgets of a sweep
HIGHEST = 1 << 20  # tokens of a budget

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptsConfig:
    """The options of `reflex trace --prompts`."""

    model: str = option(
        "", "a Hugging Face directory, or scribe, the bundled model; without it a toy model", metavar="DIR"
    )
    max_tokens: str = option(
        "4", f"output tokens of all prompts, or of each; an end token does not end the output; range 1 to {LONGEST}",
        metavar="N[,N…]",
    )  # fmt: skip
    max_num_batched_tokens: int = option(2048, "the budget: most tokens in a step", (1, 1 << 20))
    max_num_seqs: int = option(256, "most sequences generated at a time", (1, 1 << 16))
    long_prefill_token_threshold: int = option(
        0, "most tokens of one sequence in a step; 0 is no limit of its own", (0, 1 << 20)
    )
    block_size: int = option(16, "tokens in a block of the cache (--model may set its own)", (1, 65_536))
    num_blocks: int = option(4096, "blocks of the cache (--model may set its own)", (1, 1 << 22))
    prefix_caching: bool = option(True, "compute the common beginning of prompts once")
    at: str = option("", "steps made before all prompts arrive, or before each: 0,0,3", metavar="N[,N…]")
    priority: str = option("default", "of all prompts, or of each: " + ", ".join(PRIORITIES), metavar="NAME[,NAME…]")
    sweep: str = option(
        "",
        "run the prompts at the budgets from LOW to HIGH, at most 64 of them, and compare the number of steps",
        metavar="LOW..HIGH",
    )

    def __post_init__(self) -> None:
        validate(self)


ONLY_PROMPTS = tuple(f.name for f in fields(PromptsConfig))


class Prompt(NamedTuple):
    """One request. params: sampling parameters, as the engine takes them. arrives: steps made before it arrives."""

    name: str
    text: str
    params: Any
    arrives: int = 0
    priority: Priority = Priority.DEFAULT


class Setup(NamedTuple):
    """The engine for the prompts. clock: a toy's virtual time; None: real time. settings: keywords of `LLMEngine`."""

    runner: Runner
    tokenizer: Tokenizer
    clock: Callable[[], float] | None
    settings: Mapping[str, Any]


def setup_of(args: argparse.Namespace, directory_of: Callable[[str], Path]) -> tuple[Setup, list[Prompt]]:
    """Read the flags and load the model. directory_of: the directory of a model's name. Raises ConfigError with flag,
    value and range."""
    config = load(PromptsConfig, "trace", None, {}, vars(args))
    prompts = _prompts(args.prompts, config)
    given = {"block_size", "num_blocks"} & vars(args).keys() if config.model else {"block_size", "num_blocks"}
    runner, tokenizer = _load(config.model, directory_of, **{name: getattr(config, name) for name in sorted(given)})
    settings: dict[str, Any] = {
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "enable_prefix_caching": config.prefix_caching,
        "max_queue": MOST_PROMPTS,
    }
    return Setup(runner, tokenizer, None if config.model else runner.now, settings), prompts


def _load(model: str, directory_of: Callable[[str], Path], **cache: Any) -> tuple[Any, Any]:
    """Runner and tokenizer: the toy's, or those of a directory. cache: block_size and num_blocks, if given."""
    if not model:
        from reflex_runtime.llm.engine.toy import ByteTokenizer, TimedToy

        return TimedToy(max_model_len=1 << 20, **cache), ByteTokenizer()
    from reflex_runtime.llm.engine.load import load as load_model

    directory = directory_of(model)
    if not directory.is_dir():
        raise ConfigError(f"--model={one_line(model)}: no such directory; scribe is the bundled model")
    return load_model(directory, **cache)


def record(setup: Setup, prompts: Sequence[Prompt], path: Path) -> dict[str, RequestOutput]:
    """Run the prompts and write the trace; returns their outputs by name."""
    from reflex_runtime.llm.engine.llm_engine import LLMEngine
    from reflex_runtime.llm.engine.toy import MODELLED
    from reflex_runtime.observe.journal_writer import JournalWriter

    clock = time.monotonic if setup.clock is None else setup.clock

    def note(event: Event) -> None:  # marks virtual times in the trace
        if isinstance(event, BatchScheduled) and setup.clock is not None:
            event.batch.notes["modelled"] = MODELLED

    sinks: list[Any] = []
    engine = LLMEngine(
        setup.runner, setup.tokenizer, sinks=[lambda event: [sink(event) for sink in sinks]], clock=clock,
        **setup.settings,
    )  # fmt: skip
    try:
        writer = JournalWriter(path, [engine.processor.group], capacity=1 << 20, clock=clock)
    except ConfigError as error:
        raise ConfigError(f"--out={path.with_suffix('')}: {error.message.partition(': ')[2]}") from error
    with writer:
        sinks += [note, writer]
        outputs = drive(engine, prompts)
    if writer.error is not None:
        raise ConfigError(f"--out={path.with_suffix('')}: cannot be written: {writer.error.strerror}")
    return outputs


def drive(engine: LLMEngine, prompts: Iterable[Prompt]) -> dict[str, RequestOutput]:
    """Run all prompts, each from the step at which it arrives, and close the engine; returns their outputs by name."""
    todo = sorted(prompts, key=lambda p: p.arrives)[::-1]
    outputs: dict[str, RequestOutput] = {}
    steps = 0
    while todo or engine.unfinished:
        if not engine.unfinished:
            steps = max(steps, todo[-1].arrives)  # nothing to run: skip the steps until the next one arrives
        while todo and todo[-1].arrives <= steps:
            prompt = todo.pop()
            engine.add_request(prompt.text, prompt.params, request_id=prompt.name, priority=prompt.priority)
        outputs |= {output.request_id: output for output in engine.step()}
        steps += 1
    engine.close()
    return outputs


# -- the prompts and their options -------------------------------------------------------------------------------------


def _prompts(given: Sequence[str], config: PromptsConfig) -> list[Prompt]:
    from reflex_runtime.ipc.messages import SamplingParams

    texts = [text for one in given for text in (_lines(one[1:]) if one.startswith("@") else [one])]
    for text in texts:
        if not text:
            raise ConfigError("--prompts='': must have at least one character")
    if not 1 <= len(texts) <= MOST_PROMPTS:
        raise ConfigError(f"--prompts: there are {len(texts):,}; must be in [1, {MOST_PROMPTS}]")
    count = len(texts)
    outputs = _each("--max-tokens", config.max_tokens, count, _whole(1, LONGEST), f"a whole number in [1, {LONGEST}]")
    arrivals = _each("--at", config.at or "0", count, _whole(0, LATEST), f"a whole number in [0, {LATEST}]")
    priorities = _each("--priority", config.priority, count, PRIORITIES.get, f"one of {', '.join(PRIORITIES)}")
    params = [SamplingParams.greedy(tokens, ignore_eos=True) for tokens in outputs]
    each = zip(texts, params, arrivals, priorities, strict=True)
    return [Prompt(letters(i), *one) for i, one in enumerate(each)]


def _lines(file: str) -> list[str]:
    try:
        return [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line]
    except OSError as error:
        raise ConfigError(f"--prompts=@{one_line(file)}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts=@{one_line(file)}: not UTF-8 at byte {error.start}") from error


def _each(flag: str, text: str, count: int, read: Callable[[str], T | None], what: str) -> list[T]:
    """The values of an option that has one value for all prompts, or one for each. read: None for a wrong value."""
    parts = [read(part.strip()) for part in text.split(",")]
    values = [value for value in parts if value is not None]
    if len(values) == len(parts) and len(parts) in (1, count):
        return (values * count)[:count]
    more = f", or {count} of them separated by commas, one for each prompt" if count > 1 else ""
    raise ConfigError(f"{flag}={one_line(text)}: must be {what}{more}")


def _whole(low: int, high: int) -> Callable[[str], int | None]:
    return lambda text: int(text) if text.isdecimal() and len(text) <= 9 and low <= int(text) <= high else None


def letters(number: int) -> str:
    """0 is A, 25 is Z, 26 is AA: short names for prompts."""
    name = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        name = chr(ord("A") + rest) + name
    return name


def text_lines(trace: Journal, outputs: Mapping[str, RequestOutput], width: int) -> list[Text]:
    """A line for each request: its prompt, its tokens, its output."""
    found = {c.member.id: c for c in courses(trace.batches)}
    colours = Colours.of(trace, trace.batches)
    lines = []
    for name, output in sorted(outputs.items(), key=lambda o: found[o[0]].member.seq if o[0] in found else -1):
        course = found.get(name)
        line = Text(no_wrap=True)
        if course is not None:
            line.append(f" {name} ", style=f"{ink(colours.hex(course.member))} on {colours.hex(course.member)}")
        shown = f' "{plain(output.prompt or "", max(10, (width - 46) // 3))}"'
        if course is not None:
            shown += f" {course.member.asked:g} + {course.outputs} tokens, first in step {course.first_step}"
        line.append(shown)
        line.append(f' → "{plain(output.text, max(10, width - line.cell_len - 5))}"', style="bold")
        if output.error is not None:
            line.append(f" {output.error.message}", style="bold red")
        lines.append(line)
    return lines


# -- the same at many budgets ------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """One run. tokens: those of each step. first_step: for each prompt, the step of its first token, from 1."""

    budget: int
    tokens: list[int]
    first_step: list[int]


class Mute:
    """A runner without a model, for runs of which only the schedule matters: its output is always token 0."""

    def __init__(self, like: Runner) -> None:
        self.vocab_size, self.block_size, self.num_blocks = like.vocab_size, like.block_size, like.num_blocks
        self.max_model_len, self.adapters, self.name = like.max_model_len, like.adapters, "mute"

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        return np.zeros((len(step.picked), 2), np.float32)

    def close(self) -> None:
        return


def measured(setup: Setup, prompts: Sequence[Prompt], budget: int) -> Measured:
    """Run the prompts on a fresh engine, without the model, with at most `budget` tokens in a step."""
    from reflex_runtime.llm.engine.llm_engine import LLMEngine

    tokens: list[int] = []
    first: dict[str, int] = {}

    def watch(event: Event) -> None:
        if isinstance(event, BatchScheduled):
            tokens.append(int(sum(event.batch.grants.values())))
        elif isinstance(event, RequestSettled) or (isinstance(event, RequestProgressed) and event.value is not None):
            first.setdefault(event.ticket.id, len(tokens))

    settings = {**setup.settings, "max_num_batched_tokens": budget}
    drive(LLMEngine(Mute(setup.runner), setup.tokenizer, sinks=[watch], **settings), prompts)
    return Measured(budget, tokens, [first[p.name] for p in prompts])


def knee(runs: Sequence[Measured], floor: int) -> int | None:
    """The smallest budget beyond which a larger one does not save a step, or None. runs: by ascending budget. floor:
    steps without a limit."""
    found = None
    for run in reversed(runs):
        if len(run.tokens) > floor:
            break
        found = run.budget
    return found


def sweep(
    setup: Setup,
    prompts: Sequence[Prompt],
    budgets: Sequence[int],
    progress: Callable[[int, int], None],
    picture: Path | None = None,
) -> Iterator[RenderableType]:
    """Run the prompts at every budget; yields the table and its summary. picture: the prefix of the picture's files."""
    runs = list[Measured]()
    for budget in budgets:
        runs.append(measured(setup, prompts, budget))
        progress(len(runs), len(budgets))
    floor = len(measured(setup, prompts, HIGHEST).tokens)
    found = knee(runs, floor)
    yield sweep_table(runs, found)
    if len(runs) > ROWS:
        yield Text("budgets that are left out take as many steps as the row above them", style="dim")
    if found is None:
        summary = f"no knee up to {budgets[-1]}: {len(runs[-1].tokens)} steps there, {floor} without a limit"
    else:
        summary = f"knee at {found}: a larger budget saves no step ({floor} steps, as without a limit)"
    yield Text(summary)
    if picture is not None:
        from reflex_runtime.observe.picture import saved

        for path in saved(picture, lambda: _sweep_figure(runs, found, summary), "; choose another, or --no-picture"):
            yield Text(f"wrote {path}")


def budgets_of(text: str) -> list[int]:
    """The budgets of LOW..HIGH: all, or at most `BUDGETS`, each larger than the last by about the same factor."""
    found = re.fullmatch(r"([0-9]{1,7})\.\.([0-9]{1,7})", text)
    low, high = (int(found[1]), int(found[2])) if found is not None else (0, 0)
    if not 1 <= low <= high <= HIGHEST:
        raise ConfigError(f"--sweep={one_line(text)}: must be LOW..HIGH within [1, {HIGHEST}], such as 4..64")
    if high - low < BUDGETS:
        return list(range(low, high + 1))
    return sorted({round(low * (high / low) ** (i / (BUDGETS - 1))) for i in range(BUDGETS)})


def sweep_table(runs: Sequence[Measured], found: int | None) -> Table:
    """One row per budget; if they are many, only those at which steps or first tokens change. found: the knee."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = ("budget", "steps", "peak\nstep", "mean\nstep", "budget\nunused", "first token in\nstep p50 / last", "")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == len(columns) - 1 else "right", no_wrap=True, vertical="bottom")
    seen: tuple[float, ...] = ()
    for run in runs:
        first, total = sorted(run.first_step), sum(run.tokens)
        key = (len(run.tokens), percentile(first, 0.5), first[-1])
        if len(runs) > ROWS and key == seen and run.budget not in (found, runs[-1].budget):
            continue
        seen = key
        note = "◀ knee" if run.budget == found else ""
        cells = [f"{run.budget:g}", str(key[0]), str(max(run.tokens)), f"{total / key[0]:.1f}"]
        cells += [f"{1.0 - total / (run.budget * key[0]):.0%}", f"{key[1]:g} / {key[2]}", note]
        table.add_row(*map(Text, cells), style="bold" if note else "")
    return table


def _sweep_figure(runs: Sequence[Measured], found: int | None, title: str) -> Figure:
    """Steps over budget. found: the knee."""
    from reflex_runtime.observe.picture import Figure, MaxNLocator

    budgets, steps = [run.budget for run in runs], [len(run.tokens) for run in runs]
    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.plot(budgets, steps, color=PALETTE[4], marker="o", markersize=3.2, drawstyle="steps-post", gid="steps")
    if found is not None:
        axes.plot(found, steps[budgets.index(found)], "o", color=PALETTE[1], markersize=8, gid="knee")
    if budgets[-1] - budgets[0] >= BUDGETS:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    axes.set(title=title, xlabel="max_num_batched_tokens: the budget of a step, tokens", ylabel="steps",
             ylim=(0.0, 1.12 * max(steps)))  # fmt: skip
    return figure
