"""The chart of `README.md` is drawn from the benchmark's rows, and the page beside it has the same figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench import functions
from bench.functions_chart import CASE, chart, ratios
from bench.report import row as measured

from reflex_runtime.observe.picture import drawn

ROOT = Path(__file__).parent.parent.parent
KEPT: dict[str, Any] = json.loads((ROOT / "bench" / "functions.json").read_text())
SLOW = "2 ms + 0.1 ms an item"


def row(what: str, value: float, callers: int = 8) -> dict[str, Any]:
    return {"case": f"{SLOW}, {callers} callers", "what": what, "value": value, "low": value / 2, "high": value * 2}


def test_of_several_settings_the_one_with_most_answers_counts_for_every_figure() -> None:
    rows = [row("answers a second over LitServe, 0 ms", 3.0), row("p99 over LitServe, 0 ms", 0.1)]
    rows += [row("answers a second over LitServe, 5 ms", 2.0), row("p99 over LitServe, 5 ms", 0.9)]
    rows += [row("answers a second, reflex", 1000.0), row("CPU a request over mosec", 2.0)]
    found = ratios(rows)
    assert {lane: {key: r["value"] for key, r in of.items()} for lane, of in found.items()} == {
        (SLOW, "LitServe"): {("answers a second", "8"): 2.0, ("p99", "8"): 0.9}
    }


def test_the_committed_chart_has_every_median_and_the_date() -> None:
    svg = (ROOT / "docs" / "images" / "compare.svg").read_text()
    found = ratios(KEPT["rows"])
    medians = [f"{r['value']:.2f}" for of in found.values() for (_, n), r in of.items() if n != "1"]
    texts = re.findall(r">([^<>]+)</text>", svg)
    assert sorted(text for text in texts if re.fullmatch(r"\d\.\d\d", text)) == sorted(medians)
    assert len(medians) == 2 * 3 * 3 * 2  # functions, servers, callers, figures
    assert KEPT["date"] in svg
    assert drawn(chart(found, "today"), format="svg").count(b"today") == 1


def test_the_page_has_the_medians_of_answers_and_their_spreads() -> None:
    page = (ROOT / "docs" / "compare-functions.md").read_text()
    missing = []
    for (function, other), of in ratios(KEPT["rows"]).items():
        for (what, callers), r in of.items():
            low, high = (f"{r[key]:.2f}" if r[key] < 10 else f"{r[key]:.1f}" for key in ("low", "high"))
            if what == "answers a second" and f"{r['value']:.2f} × ({low}…{high})" not in page:
                missing.append((function, other, callers))
    assert missing == []
    assert {CASE.match(r["case"])[2] for r in KEPT["rows"]} == {"1", "8", "32", "128"}  # type: ignore[index]


def test_a_run_in_parts_replaces_rows_of_its_cases_alone(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    for case, value in (("a", 1.0), ("b", 3.0), ("a", 5.0)):
        functions._keep([measured(case, "x", [value], "s")], file)
    kept = json.loads(file.read_text())
    assert [(r["case"], r["rounds"]) for r in kept["rows"]] == [("b", [3.0]), ("a", [5.0])]
    assert kept["machine"]["cores"]
