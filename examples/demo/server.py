"""What both runs share: a server, a progress bar, and the picture of batches."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedWriter, TextIOWrapper
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.files import create
from reflex_runtime.observe.journal import BatchLine, read_journal
from reflex_runtime.observe.picture import write_pictures

Window = Callable[[Sequence[BatchLine]], Sequence[BatchLine]]

_READY = re.compile(r"ready on (http://\S+)")


@contextlib.contextmanager
def serving(export: Path, trace: Path, log: Path, options: list[str]) -> Iterator[str]:
    """A `reflex serve` process on a free port; gives its URL, and drains it on the way out."""
    command = [sys.executable, "-m", "reflex_runtime", "serve", str(export), "--port", "0", "--trace", str(trace)]
    with TextIOWrapper(BufferedWriter(create(log)), encoding="utf-8") as kept:
        process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            assert process.stderr is not None
            yield _wait_ready(process.stderr, kept, log)
        finally:
            process.terminate()
            assert process.stderr is not None
            kept.writelines(process.stderr)  # ends when the process does
            process.stderr.close()
            process.wait()


def _wait_ready(stderr: Any, kept: Any, log: Path) -> str:
    for line in stderr:
        kept.write(line)
        if (found := _READY.search(line)) is not None:
            return found[1].rstrip(",")
    raise ConfigError(f"the server did not start; {log} says why")


@contextlib.contextmanager
def progress(
    console: Console, total: int, name: str = "robots at work"
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A bar over episodes, with the chunks answered so far; quiet when the console is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("episodes · {task.fields[chunks]} chunks"),
        TimeElapsedColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("starting the server and the simulators", total=total, chunks=0)
        chunks = 0

        def on_progress(event: Mapping[str, Any]) -> None:
            nonlocal chunks
            if event["event"] == "act":
                chunks += event["status"] == 200
                bar.update(task, chunks=chunks, description=name)
            elif event["event"] == "episode_end":
                bar.advance(task)

        yield on_progress


def draw(console: Console, trace: Path, prefix: Path, window: Window | None = None) -> None:
    """What batching did, from the trace, and a picture of a window of it, by default the busiest."""
    found = read_journal(trace)
    causes = Counter(batch.cause for batch in found.batches)
    steps = Counter(batch.size for batch in found.batches)
    alone = sum(batch.size for batch in found.batches)
    console.print(f"{len(found.batches)} calls of the model where one robot at a time would have taken {alone}")
    console.print("calls by number of robots: " + ", ".join(f"{size}: {n}" for size, n in sorted(steps.items())))
    console.print("why they left: " + ", ".join(f"{cause} {n}" for cause, n in causes.most_common()))
    written = write_pictures(found, (window or busiest)(found.batches), prefix)
    pictures = ", ".join(str(path) for path in written)
    console.print(f"trace {trace} (reflex trace {trace} --no-picture), pictures: {pictures}")


def busiest(batches: Sequence[BatchLine], width: int = 80) -> Sequence[BatchLine]:
    """The run of `width` batches with the most members: simulators start one by one, and end so."""
    running = [0, *accumulate(batch.size for batch in batches)]
    last = max(0, len(batches) - width)
    first = max(range(last + 1), key=lambda i: running[min(i + width, len(batches))] - running[i])
    return batches[first : first + width]
