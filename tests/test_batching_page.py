"""docs/batching.md runs as it stands: its snippets in order, each line of output as its comment says, and its trace."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from reflex_runtime import read_journal
from reflex_runtime.cli import main

PAGE = Path(__file__).parent.parent / "docs" / "batching.md"
SNIPPETS = re.findall(r"^```python\n(.+?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_every_snippet_prints_what_it_says_and_the_trace_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for snippet in SNIPPETS:
        # Of a line that prints, or that runs what prints.
        said = re.findall(r"^ *(?:with |async |print|asyncio\.run).*?\)  # (.+)$", snippet, re.MULTILINE)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(snippet, PAGE.name, "exec"), names)
        assert printed.getvalue().splitlines() == said, snippet
    assert sum(len(batch.members) for batch in read_journal("batches.jsonl").batches) == 40
    assert main(["trace", "batches.jsonl", "--no-picture"]) == 0
    assert "batches" in capsys.readouterr().out


def test_the_page_starts_with_a_function_of_three_lines() -> None:
    first = [line for line in SNIPPETS[0].splitlines() if line and not line.startswith("from ")]
    assert len(first) == 3
