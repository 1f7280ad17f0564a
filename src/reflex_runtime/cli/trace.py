"""`reflex trace`: show what a trace holds, as a table in colour and as a picture, so that a bad batch is seen."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from reflex_runtime.cli.trace_table import (
    PLACE,
    ROWS,
    batch_table,
    place_of,
    shows_steps,
    slo_table,
    step_key,
    step_summary,
    step_table,
    summary,
    sweep_table,
    text_lines,
    vary,
)
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.core.events import BatchScheduled, Event
from reflex_runtime.core.request import PRIORITIES, Priority
from reflex_runtime.options import add_options, flag, one_line, option, validate, whole
from reflex_runtime.sources import load
from reflex_runtime.telemetry.colours import plain
from reflex_runtime.telemetry.journal import BatchLine, JournalError
from reflex_runtime.telemetry.journal_reader import Journal, read_journal
from reflex_runtime.telemetry.picture import UNITS, Units, write_pictures

if TYPE_CHECKING:
    from reflex_runtime.llm.sequence import RequestOutput
    from reflex_runtime.llm.virtual import Engines
    from reflex_runtime.sim.slo import Bounds
    from reflex_runtime.sim.tokens import Prompt, StepTime, TokenRuns

NOT_KEPT = "nothing was written; --out PREFIX keeps the trace and draws it"
WIDE = 160  # columns where the output is no terminal and COLUMNS does not say
PATIENCE = 2.0  # seconds after which progress is told
MOST_BUDGETS = 512
HIGHEST = 1 << 20
MOST_SETTINGS = 2048
STEP_MS = "2+0.05"
MOST_PROMPTS = 10_000
LONGEST = 65_536  # tokens of output

_DESCRIPTION = """\
Show a trace of batches, as written by `reflex serve --trace FILE`; or run prompts, step by step, and show that.

One row per batch: when it left, where (slot, partition, stage), why (the reason, and the finer cause), who was in it
with how many units, predicted and measured time, how long those that entered had waited, and how many still queued
behind it. `▸` marks a member that entered from the queue with this batch; the others stayed from an earlier step, and
`…+3` stands for three more. What is the same in every batch stands once above the table, and a column of nothing but
zeros is left out. In under 120 columns `why` is the cause alone and `wait` the longest wait alone.

A trace of tokens has one row per step: each member's share as prefill or decode, how many of its tokens were computed
and known before, who waited and why, preemptions, cache hits, and blocks in use.
"""

_EPILOG = """\
examples:
  reflex trace run.jsonl                         table, summary, run.svg and run.png
  reflex trace run.jsonl.gz --last 50            the last 50 batches
  reflex trace run.jsonl --from 120 --to 180     a window, by batch id
  reflex trace run.jsonl --group a --units ms    slot a; bars are estimated milliseconds

  reflex trace --prompts "hello world" "goodbye" --max-num-batched-tokens 8      watch continuous batching
  reflex trace --prompts "hello world" "goodbye" --sweep 4..64                   steps over budget, and the knee
  reflex trace --prompts @prompts.txt --slo ttft=200ms,gap=40ms                  the best setting within bounds

exit codes: 0 fine, 1 the trace cannot be read (file and line are named) or no setting meets --slo, 2 bad arguments
"""


@dataclass(frozen=True, slots=True)
class PromptsConfig:
    """Everything `reflex trace --prompts` can be told beside the prompts."""

    model: str = option(
        "", "a Hugging Face directory, or scribe, the bundled one; without it a toy that needs none", metavar="DIR"
    )
    max_tokens: str = option(
        "4", f"tokens of output, of all or of each, exactly: the end of a text does not end it; range 1 to {LONGEST}",
        metavar="N[,N…]",
    )  # fmt: skip
    max_num_batched_tokens: int = option(2048, "the budget: most tokens in a step", low=1, high=1 << 20)
    max_num_seqs: int = option(256, "most sequences generated at a time", low=1, high=1 << 16)
    long_prefill_token_threshold: int = option(
        0, "most tokens one sequence gets in a step; 0 leaves it to the budget", low=0, high=1 << 20
    )
    block_size: int = option(16, "tokens a cache block holds (a model may have its own)", low=1, high=65_536)
    num_blocks: int = option(4096, "blocks of the cache (a model may have its own)", low=1, high=1 << 22)
    prefix_caching: bool = option(True, "compute prompts that begin alike once")
    at: str = option("", "steps made before each prompt arrives, one number each: 0,0,3", metavar="N,N,…")
    priority: str = option("default", "of all prompts, or of each: " + ", ".join(PRIORITIES), metavar="NAME[,NAME…]")
    step_ms: str = option(
        "", f"what a step takes: A ms + B ms a token ({STEP_MS} without --model), or `measured` (with it)",
        metavar="A+B",
    )  # fmt: skip
    sweep: str = option(
        "", "run every budget from LOW to HIGH and show what more of it buys", metavar="LOW..HIGH[:STEP|:xFACTOR]"
    )
    slo: str = option(
        "", "search budget and threshold for bounds on first token and gap: ttft=200ms,gap=40ms", metavar="BOUNDS"
    )

    def __post_init__(self) -> None:
        validate(self)


ONLY_PROMPTS = tuple(f.name for f in fields(PromptsConfig))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb `trace`."""
    parser = subparsers.add_parser(
        "trace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", nargs="?", help="the trace, .jsonl or .jsonl.gz")
    add(
        "-o",
        "--out",
        type=Path,
        metavar="PREFIX",
        help="write PREFIX.svg and PREFIX.png, and PREFIX.jsonl with --prompts (default: FILE without its suffix; with "
        "--prompts nothing is written)",
    )
    add("--last", metavar="N", help="only the last N batches, N >= 1")
    add("--from", dest="first", metavar="ID", help="only batches from this id on")
    add("--to", dest="final", metavar="ID", help="only batches up to this id")
    add("--group", metavar="SLOT", help="only batches of this group (a slot, a tenant or a workload)")
    add(
        "--units",
        default="grants",
        metavar="|".join(UNITS),
        help="height of the bars: units granted (default), estimated milliseconds, or requests",
    )
    add("--no-picture", action="store_true", help="the table only")
    add("--no-color", action="store_true", help="no colours in the table")
    prompts: Any = parser.add_argument_group("prompts, run here and now on the engine of reflex serve")
    prompts.add_argument(
        "--prompts", nargs="+", metavar="TEXT", help="run these prompts and show every step; @FILE has one a line"
    )
    add_options(prompts, PromptsConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show a trace, or what becomes of prompts; returns the exit code."""
    console = _console(args)
    try:
        _check(args)
        if not args.prompts:
            return _show(console, args, args.file)
        if "sweep" in args or "slo" in args:
            return _search(console, args, args.out)
        setup = _setup(args)
        with TemporaryDirectory(prefix="reflex-") as scratch:
            prefix = args.out or Path(scratch, "prompts")
            file = prefix.with_name(prefix.name + ".jsonl")
            return _show(console, args, file, _record(setup, file))
    except JournalError as error:
        print(f"reflex trace: {error}", file=sys.stderr)
        return 1
    except ReflexError as error:
        print(f"reflex trace: {error.message}", file=sys.stderr)
        return 2


# -- arguments ---------------------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    """A file or prompts, and no flags of the other."""
    if args.prompts and args.file is not None:
        raise ConfigError(f"FILE={one_line(args.file)}: a file and --prompts exclude each other")
    if not args.prompts:
        for name in ONLY_PROMPTS:
            if name in args:
                raise ConfigError(f"{flag(name)}={one_line(getattr(args, name))}: only with --prompts")
        if args.file is None:
            raise ConfigError("FILE: is missing; give a trace, or --prompts TEXT …")


def _units(text: str) -> Units:
    for units in UNITS:
        if text == units:
            return units
    raise ConfigError(f"--units={text}: must be one of {', '.join(UNITS)}")


def _select(
    trace: Journal, group: str | None, first: int | None, final: int | None, last: int | None
) -> list[BatchLine]:
    batches = trace.batches
    if group is not None:
        known = sorted({*trace.groups, *(b.group for b in batches)})
        if group not in known:
            raise ConfigError(f"--group={group}: not in this trace, which has {', '.join(known) or 'no groups'}")
        batches = [b for b in batches if b.group == group]
    low, high = first or 0, float("inf") if final is None else final
    found = [b for b in batches if low <= b.id <= high]
    if batches and not found:
        flag, value = ("--from", first) if first is not None else ("--to", final)
        ids = [b.id for b in batches]
        raise ConfigError(f"{flag}={value}: leaves no batch; ids here are in [{min(ids)}, {max(ids)}]")
    return found if last is None else found[-last:]


def _prefix(file: Path) -> Path:
    name = file.name.removesuffix(".gz").removesuffix(".jsonl")
    return file.with_name(name or "trace")


# -- arguments of prompts ----------------------------------------------------------------------------------------------


def _prompts(given: Sequence[str], config: PromptsConfig) -> list[Prompt]:
    from reflex_runtime.ipc.sampling import SamplingParams
    from reflex_runtime.sim.tokens import Prompt

    texts = [text for one in given for text in (_lines(one[1:]) if one.startswith("@") else [one])]
    for text in texts:
        if not text:
            raise ConfigError("--prompts='': must have at least one character")
    if not 1 <= len(texts) <= MOST_PROMPTS:
        raise ConfigError(f"--prompts: {len(texts):,} of them; must be in [1, {MOST_PROMPTS}]")
    count = len(texts)
    params = [SamplingParams.greedy(n, ignore_eos=True) for n in _outputs(config.max_tokens, count)]
    each = zip(texts, params, _arrivals(config.at, count), _priorities(config.priority, count), strict=True)
    return [Prompt(letters(i), *one) for i, one in enumerate(each)]


def _lines(file: str) -> list[str]:
    try:
        return [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line]
    except OSError as error:
        raise ConfigError(f"--prompts=@{one_line(file)}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts=@{one_line(file)}: not UTF-8 at byte {error.start}") from error


def _outputs(text: str, count: int) -> list[int]:
    parts = text.split(",")
    numbers = [int(p) for p in parts if p.strip().isdecimal() and len(p.strip()) <= 9]
    if len(numbers) == len(parts) and len(parts) in (1, count) and all(1 <= n <= LONGEST for n in numbers):
        return (numbers * count)[:count]
    raise ConfigError(
        f"--max-tokens={one_line(text)}: must be a whole number in [1, {LONGEST}], or {count} of them, one for each "
        "prompt"
    )


def _arrivals(text: str, count: int) -> list[int]:
    if not text:
        return [0] * count
    parts = text.split(",")
    if len(parts) == count and all(p.strip().isdecimal() and len(p.strip()) <= 9 for p in parts):
        return [int(p) for p in parts]
    raise ConfigError(
        f"--at={one_line(text)}: must be {count} whole numbers in [0, 999999999], one for each prompt, such as "
        + ",".join(str(i) for i in range(min(count, 4)))
    )


def _priorities(text: str, count: int) -> list[Priority]:
    names = [name.strip() for name in text.split(",")]
    if len(names) in (1, count) and all(name in PRIORITIES for name in names):
        return [Priority[name.upper()] for name in (names * count)[:count]]
    raise ConfigError(
        f"--priority={one_line(text)}: must be one of {', '.join(PRIORITIES)}, or {count} of them, one for each prompt"
    )


def letters(number: int) -> str:
    """0 is A, 25 is Z, 26 is AA: short names for prompts."""
    name = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        name = chr(ord("A") + rest) + name
    return name


def _step_time(text: str) -> StepTime:
    """Read `--step-ms`: A or A+B, milliseconds."""
    from reflex_runtime.sim.tokens import StepTime

    found = re.fullmatch(r"([0-9]*\.?[0-9]+)(?:\+([0-9]*\.?[0-9]+)(?:\*tokens)?)?", text.replace(" ", ""))
    if found is not None:
        fixed, per_token = float(found[1]), float(found[2] or 0.0)
        if fixed + per_token > 0.0 and max(fixed, per_token) <= 60_000.0:
            return StepTime(fixed / 1e3, per_token / 1e3)
    raise ConfigError(
        f"--step-ms={one_line(text)}: must be A, A+B or `measured`: A ms a step, B ms a token, each in [0, 60000] "
        "and not both 0"
    )


def _budgets(text: str) -> list[int]:
    """The budgets of LOW..HIGH, LOW..HIGH:STEP or LOW..HIGH:xFACTOR; the last is HIGH."""
    found = re.fullmatch(r"([0-9]{1,7})\.\.([0-9]{1,7})(?::(?:([0-9]{1,7})|x([0-9]{1,3}(?:\.[0-9]{1,3})?)))?", text)
    if found is not None:
        low, high = int(found[1]), int(found[2])
        step, factor = int(found[3] or 1), float(found[4] or 0.0)
        if 1 <= low <= high <= HIGHEST and step >= 1 and (found[4] is None or factor > 1.0):
            budgets = list(range(low, high + 1, step)) if found[4] is None else _powers(low, high, factor)
            budgets += [high] * (budgets[-1] < high)
            if len(budgets) <= MOST_BUDGETS:
                return budgets
    raise ConfigError(
        f"--sweep={one_line(text)}: must be LOW..HIGH, LOW..HIGH:STEP or LOW..HIGH:xFACTOR within [1, {HIGHEST}], "
        f"of at most {MOST_BUDGETS} budgets, such as 4..64 or 64..4096:x2"
    )


def _powers(low: int, high: int, factor: float) -> list[int]:
    budgets, at = [low], float(low)
    while (at := at * factor) <= high:
        if int(at) > budgets[-1]:
            budgets.append(int(at))
    return budgets


def _bounds(text: str) -> Bounds:
    """Read `ttft=200ms,gap=40ms`; either may be left out."""
    from reflex_runtime.sim.slo import Bounds

    found: dict[str, float] = {}
    for part in text.split(","):
        one = re.fullmatch(r"\s*(ttft|gap)=([0-9]*\.?[0-9]+)(ms|s)\s*", part)
        seconds = float(one[2]) * (1e-3 if one[3] == "ms" else 1.0) if one is not None else 0.0
        if one is None or one[1] in found or not 0.0 < seconds <= 86_400.0:
            raise ConfigError(
                f"--slo={one_line(text)}: must be ttft=TIME,gap=TIME, or one of them, with TIME such as 200ms or "
                "0.2s in (0, 86400] s"
            )
        found[one[1]] = seconds
    return Bounds(**found)


# -- runs of prompts ---------------------------------------------------------------------------------------------------


class _Setup(NamedTuple):
    """What the flags ask for. takes: None measures."""

    engines: Engines
    prompts: list[Prompt]
    takes: StepTime | None


def _setup(args: argparse.Namespace) -> _Setup:
    """Read the flags and load what runs. Raises ConfigError naming flag, value and range."""
    from reflex_runtime.llm.virtual import Engines

    config = load(PromptsConfig, "trace", None, {}, vars(args))
    prompts = _prompts(args.prompts, config)
    told = config.step_ms or ("measured" if config.model else STEP_MS)
    takes = None if told == "measured" else _step_time(told)
    given = {"block_size", "num_blocks"} & vars(args).keys() if config.model else {"block_size", "num_blocks"}
    runner, tokenizer = _load(config.model, **{name: getattr(config, name) for name in sorted(given)})
    settings: dict[str, Any] = {
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "enable_prefix_caching": config.prefix_caching,
        "max_queue": MOST_PROMPTS,
    }
    return _Setup(Engines(runner, tokenizer, takes, settings), prompts, takes)


def _load(model: str, **cache: Any) -> tuple[Any, Any]:
    """Runner and tokenizer: the toy, or what a directory holds. cache: block_size, num_blocks, where asked for."""
    if not model:
        from reflex_runtime.llm.toy import ByteTokenizer, ToyRunner

        return ToyRunner(max_model_len=1 << 20, **cache), ByteTokenizer()
    from reflex_runtime.demo.scribe import model_directory
    from reflex_runtime.llm.load import load as load_model

    return load_model(model_directory(model), **cache)


def _record(setup: _Setup, path: Path) -> dict[str, RequestOutput]:
    """Run the prompts and write the trace; their outputs by name."""
    from reflex_runtime.sim.tokens import drive
    from reflex_runtime.telemetry.journal_writer import JournalWriter

    def note(event: Event) -> None:  # each batch says whose its times are, where they are not the machine's
        if isinstance(event, BatchScheduled) and setup.takes is not None:
            event.batch.notes["modelled"] = str(setup.takes)

    sinks: list[Any] = []
    engine, clock = setup.engines([lambda event: [sink(event) for sink in sinks]])
    try:
        writer = JournalWriter(path, [engine.processor.group], capacity=1 << 20, clock=clock)
    except ConfigError as error:
        raise ConfigError(f"--out={path.with_suffix('')}: {error.message.partition(': ')[2]}") from error
    with writer:
        sinks += [note, writer]
        outputs = drive(engine, setup.prompts)
    if writer.error is not None:
        raise ConfigError(f"--out={path.with_suffix('')}: cannot be written: {writer.error.strerror}")
    return outputs


def _search(console: Console, args: argparse.Namespace, prefix: Path | None) -> int:
    """Sweep the budget, or search for a setting within bounds; returns the exit code. prefix: where to draw it."""
    budgets = _budgets(args.sweep) if "sweep" in args else []
    bounds = _bounds(args.slo) if "slo" in args else None
    for name in ("last", "first", "final", "group"):
        if getattr(args, name) is not None:
            told = {"first": "from", "final": "to"}.get(name, name)
            value = getattr(args, name)
            raise ConfigError(f"--{told}={value}: shows a part of one trace; --sweep and --slo make many runs")
    setup = _setup(args)
    if bounds is not None:
        return _slo(console, setup, budgets, bounds)
    return _sweep(console, setup, budgets, None if args.no_picture else prefix)


def _sweep(console: Console, setup: _Setup, budgets: list[int], prefix: Path | None) -> int:
    from reflex_runtime.sim.sweep import draw_sweep, in_words, sweep
    from reflex_runtime.sim.tokens import StepTime

    with _SearchProgress(console) as progress:
        runs, found = sweep(_mute(setup, StepTime(1.0, 0.0)), budgets, progress)
    console.print(sweep_table(runs, found))
    if len(runs) > ROWS:
        console.print(Text("budgets left out take as many steps as the row above them", style="dim"))
    for line in in_words(found, runs):
        console.print(Text(line), soft_wrap=True)
    if prefix is not None:
        for path in draw_sweep(runs, found, prefix, "; choose another, or --no-picture"):
            console.print(Text(f"wrote {path}"), soft_wrap=True)
    return 0


def _slo(console: Console, setup: _Setup, budgets: list[int], bounds: Bounds) -> int:
    from reflex_runtime.sim.slo import best, budgets_for, grid, refusal, try_all

    lengths = [len(setup.engines.tokenizer.encode(p.text)) for p in setup.prompts]
    takes = setup.takes or _fitted(setup, console)
    settings = grid(budgets or budgets_for(sum(lengths), len(lengths)))
    if len(settings) > MOST_SETTINGS:
        told = f"{len(settings):,} settings of budget and threshold; must be at most {MOST_SETTINGS}"
        raise ConfigError(f"--sweep: {told}")
    with _SearchProgress(console) as progress:
        tried = try_all(_mute(setup, takes), settings, progress)
    chosen = best(tried, bounds)
    console.print(Text(f"{len(tried):,} settings, each run in virtual time; a step takes {takes}"), soft_wrap=True)
    console.print(slo_table(tried, bounds, chosen))
    if chosen is None:
        print(f"reflex trace: --slo: {refusal(tried, bounds)}", file=sys.stderr)
        return 1
    flags = f"--max-num-batched-tokens {chosen.budget} --long-prefill-token-threshold {chosen.threshold}"
    line = f"most throughput within {bounds}: {flags} ({chosen.seconds * 1e3:.1f} ms in all)"
    console.print(Text(line, style="bold"), soft_wrap=True)
    return 0


def _mute(setup: _Setup, takes: StepTime) -> TokenRuns:
    from reflex_runtime.sim.tokens import TokenRuns

    return TokenRuns(setup.engines.mute(takes), setup.prompts)


def _fitted(setup: _Setup, console: Console) -> StepTime:
    from reflex_runtime.sim.tokens import TokenRuns

    with _SearchProgress(console) as progress:
        fitted, steps = TokenRuns(setup.engines, setup.prompts).fit(progress)
    console.print(Text(f"measured over {steps:,} steps of {setup.engines.runner.name}: {fitted}"), soft_wrap=True)
    return fitted


class _SearchProgress:
    """Says how far it is once somebody has waited for a while; where the output is no terminal, nothing."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("")
        self._from = time.monotonic() + PATIENCE
        self._shown = False

    def __enter__(self) -> Callable[[str], None]:
        return self._tell

    def _tell(self, what: str) -> None:
        if time.monotonic() >= self._from:
            self._status.update(what)
            if not self._shown:
                self._status.start()
                self._shown = True

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._status.stop()


# -- output ------------------------------------------------------------------------------------------------------------


def _console(args: argparse.Namespace) -> Console:
    told = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(no_color=args.no_color, highlight=False, width=None if told else WIDE)


def _show(
    console: Console, args: argparse.Namespace, file: Path, outputs: Mapping[str, RequestOutput] | None = None
) -> int:
    """Table, summary and pictures of a trace. outputs: what its prompts came to, where they were run for it."""
    units = _units(args.units)
    limits = (("--last", args.last, 1), ("--from", args.first, 0), ("--to", args.final, 0))
    last, first, final = (None if text is None else whole(name, text, low) for name, text, low in limits)
    if first is not None and final is not None and first > final:
        raise ConfigError(f"--to={final}: must be >= --from, which is {first}")
    trace = read_journal(file)
    batches = _select(trace, args.group, first, final, last)
    pictures: Sequence[Path] = ()
    kept = args.out is not None or not outputs
    if batches and kept and not args.no_picture:
        pictures = write_pictures(trace, batches, args.out or _prefix(file), units)
    _tell(console, trace, batches, last is not None or first is not None, str(file) if kept else "prompts")
    texts = text_lines(trace, outputs, console.width) if outputs else []
    if len(texts) > ROWS:
        texts[ROWS // 2 : -ROWS // 2] = [Text(f"… {len(texts) - ROWS:,} texts left out …", style="dim")]
    for line in texts:
        console.print(line)
    for path in (file, *pictures) if outputs and kept else pictures:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
    if not kept:
        console.print(Text(NOT_KEPT, style="dim"), soft_wrap=True)
    return 0


def _tell(console: Console, trace: Journal, batches: Sequence[BatchLine], everything: bool, told: str) -> None:
    console.print(Text(_origin(trace, told)), style="dim", soft_wrap=True)
    if not batches:
        console.print("no batches")
        return
    same = [
        f"{name} {plain(value, 200)}"
        for name, value in zip(PLACE, place_of(batches[0]), strict=True)
        if value and not vary(batches, name)
    ]
    steps = shows_steps(batches)
    if same and not steps:
        console.print(Text(f"every batch: {', '.join(same)}"), style="dim", soft_wrap=True)
    table: Any = step_table if steps else batch_table
    if everything or len(batches) <= ROWS:
        console.print(table(trace, batches, batches, console.width))
    else:
        half = ROWS // 2
        console.print(table(trace, batches, [*batches[:half], *batches[-half:]], console.width, gap_after=half))
        console.print(Text("--last N, or --from ID --to ID, shows those left out", style="dim"))
    if steps:
        console.print(Text(step_key(trace, batches), style="dim"))
    for line in (step_summary if steps else summary)(trace, batches):
        console.print(line, soft_wrap=True)


def _origin(trace: Journal, file: str) -> str:
    header = trace.header
    groups = []
    for name, info in header.groups.items():
        budget = info.budget
        told = "no budget" if budget is None else f"budget {budget:g} {info.unit}"
        groups.append(f"{plain(name)}: {told}, at most {info.max_size} requests")
    return "; ".join([f"{file}: started {header.started_at}, reflex {header.reflex_version}", *groups])
