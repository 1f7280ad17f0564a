"""`reflex trace --prompts`: run prompts in this process, and hand every step to whoever draws, sweeps or searches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflex_runtime.config import add_options, load, one_line, option, validate
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.events import BatchScheduled, Event
from reflex_runtime.core.request import Priority

if TYPE_CHECKING:
    from reflex_runtime.cli.trace_runs import Prompt, Setup
    from reflex_runtime.llm.sequence import RequestOutput

STEP_MS = "2+0.05"
MOST_PROMPTS = 10_000
LONGEST = 65_536  # tokens of output
PRIORITIES = tuple(p.name.lower() for p in Priority)


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


def add_arguments(parser: Any) -> None:
    """The flags of a run of prompts."""
    parser.add_argument(
        "--prompts", nargs="+", metavar="TEXT", help="run these prompts and show every step; @FILE has one a line"
    )
    add_options(parser, PromptsConfig)


def setup_of(args: argparse.Namespace) -> tuple[PromptsConfig, Setup]:
    """Read the flags and load what runs. Raises ConfigError naming flag, value and range."""
    from reflex_runtime.cli.trace_runs import Setup, StepTime, load_runner

    config = load(PromptsConfig, "trace", None, {}, vars(args))
    prompts = _prompts(args.prompts, config)
    told = config.step_ms or ("measured" if config.model else STEP_MS)
    takes = None if told == "measured" else StepTime.parse(told)
    given = {"block_size", "num_blocks"} & vars(args).keys() if config.model else {"block_size", "num_blocks"}
    runner, tokenizer = load_runner(config.model, **{name: getattr(config, name) for name in sorted(given)})
    settings: dict[str, Any] = {
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "enable_prefix_caching": config.prefix_caching,
        "max_queue": MOST_PROMPTS,
    }
    return config, Setup(runner, tokenizer, prompts, takes, settings)


def record(setup: Setup, path: Path) -> dict[str, RequestOutput]:
    """Run the prompts and write the trace; their outputs by name."""
    from reflex_runtime.telemetry.trace import TraceWriter

    sinks: list[Any] = []
    engine, clock = setup.engine([lambda event: [sink(event) for sink in sinks]])
    try:
        writer = TraceWriter(path, [engine.processor.group], capacity=1 << 20, clock=clock)
    except ConfigError as error:
        raise ConfigError(f"--out={path.with_suffix('')}: {error.message.partition(': ')[2]}") from error
    with writer:
        sinks += [_modelled(setup), writer]
        outputs = setup.drive(engine)
    if writer.error is not None:
        raise ConfigError(f"--out={path.with_suffix('')}: cannot be written: {writer.error.strerror}")
    return outputs


def _modelled(setup: Setup) -> Any:
    """Adds to each batch whose its times are, where they are not the machine's."""

    def note(event: Event) -> None:
        if isinstance(event, BatchScheduled) and setup.takes is not None:
            event.batch.notes["modelled"] = str(setup.takes)

    return note


# -- arguments ---------------------------------------------------------------------------------------------------------


def _prompts(given: Sequence[str], config: PromptsConfig) -> list[Prompt]:
    from reflex_runtime.cli.trace_runs import Prompt

    texts = [text for one in given for text in (_lines(one[1:]) if one.startswith("@") else [one])]
    for text in texts:
        if not text:
            raise ConfigError("--prompts='': must have at least one character")
    if not 1 <= len(texts) <= MOST_PROMPTS:
        raise ConfigError(f"--prompts: {len(texts):,} of them; must be in [1, {MOST_PROMPTS}]")
    count = len(texts)
    outputs, arrives = _outputs(config.max_tokens, count), _arrivals(config.at, count)
    each = zip(texts, outputs, arrives, _priorities(config.priority, count), strict=True)
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
