"""The reference pages are complete: a setting, a metric or an error code that has no row or heading fails here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.feeds.runtime.health import DROPS, OUTPUT_DROPS, RuntimeSnapshot
from reflex_runtime.ipc import client as ipc_errors
from reflex_runtime.observe import metrics
from reflex_runtime.observe.metrics import SeriesRow
from reflex_runtime.settings import FeedsConfig, LLMServeConfig, ServeConfig
from reflex_runtime.settings.declare import described, flag, headed
from reflex_runtime.web import errors as web_errors

DOCS = Path(__file__).parent.parent / "docs"
# Never in an answer of the server.
ABSTRACT = {"rejected", "dropped", "journal_unreadable"}
DEFINED_IN = (web_errors, ipc_errors)  # imported here, so that all of their errors are known
ABSTRACT |= {"source_lost", "sink_failed", "stage_failed", "worker_start_failed"}


def _nothing() -> RuntimeSnapshot:
    return RuntimeSnapshot(state="new", uptime=0.0, feeds={}, coordinators={})


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


# -- settings.md -------------------------------------------------------------------------------------------------------


def _value(field: Any, kind: Any) -> str:
    """The default of an option, and what it may be."""
    value, meta = field.default, field.metadata
    if meta["choices"]:
        return ", ".join(f"**`{choice}`**" if choice == value else f"`{choice}`" for choice in meta["choices"])
    if kind in (bool, bool | None):
        return "on or off" if value is None else "on" if value else "off"
    if meta["repeat"]:
        return "repeats"
    text = f"{value:.10g}" if isinstance(value, float) else str(value)
    default = "–" if value in ("", None) else f"`{text}` {meta['unit']}".strip()
    return default if meta["low"] is None else f"{default}, {meta['low']:g} to {meta['high']:.10g}"


def _row(field: Any, kind: Any) -> str:
    value = _value(field, kind)
    return f"- `{flag(field.name)}`{'' if value == '–' else f' ({value})'}: {described(field)}"


def settings_list(kind: type[Any] = ServeConfig) -> str:
    """The options of settings.md, feeds.md or language-models.md, from the fields themselves. To renew a page, paste
    what this returns. Options that are those of `reflex serve EXPORT` in all they say are named at the end alone."""
    hints = get_type_hints(kind)
    elsewhere = set() if kind is ServeConfig else set(settings_list().splitlines())
    parts, same = [], []
    for heading, options in headed(kind).items():
        told = [_row(field, hints[field.name]) for field in options]
        same += [f"`{flag(field.name)}`" for field, row in zip(options, told, strict=True) if row in elsewhere]
        if own := [row for row in told if row not in elsewhere]:
            parts.append("\n".join([f"**{heading.capitalize()}**\n", *own]))
    if same:
        parts.append("As in [Settings](settings.md): " + ", ".join(same))
    return "\n\n".join(parts)


def test_settings_md_has_every_setting_as_it_is() -> None:
    assert settings_list() in page("settings.md"), "the options are now:\n" + settings_list()


def test_feeds_md_has_every_setting_as_it_is() -> None:
    assert settings_list(FeedsConfig) in page("feeds.md"), "the options are now:\n" + settings_list(FeedsConfig)


def test_language_models_md_has_every_setting_as_it_is() -> None:
    options = settings_list(LLMServeConfig)
    assert options in page("language-models.md"), "the options are now:\n" + options


def test_feeds_md_has_every_reason_for_which_a_frame_is_dropped() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page("feeds.md"), re.MULTILINE))
    assert {reason: rows.get(reason) for reason in DROPS} == DROPS


def test_feeds_results_md_has_every_reason_for_which_a_result_is_dropped() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page("feeds-results.md"), re.MULTILINE))
    assert {reason: rows.get(reason) for reason in OUTPUT_DROPS} == OUTPUT_DROPS


# -- metrics.md --------------------------------------------------------------------------------------------------------


def series_list(*groups: str) -> str:
    """Series of metrics.md, from their rows. To renew the page, paste what this returns."""
    found = []
    for row in [row for group in groups for row in getattr(metrics, group)]:
        assert isinstance(row, SeriesRow)
        labels = " by " + ", ".join(f"`{label}`" for label in row.labels) if row.labels else ""
        found.append(f"- `{row.name}`{labels}: {row.help}{'' if row.kind != 'histogram' else ' (histogram)'}")
    return "\n".join(found)


GROUPS = (
    ("POLICIES",), ("FUNCTIONS",), ("SPANS",), ("FEEDS", "OUTPUTS"), ("COORDINATORS",), ("FEEDS_AT_COORDINATORS",),
    ("ENGINE", "STREAMS", "MODEL_SERVER"), ("GENERATE_BATCHER", "WORKERS"),
)  # fmt: skip


def test_metrics_md_has_every_series_as_it_is() -> None:
    lists = [series_list(*groups) for groups in GROUPS]
    text = page("metrics.md")
    assert [one for one in lists if one not in text] == []
    groups = {name for name, value in vars(metrics).items() if name.isupper() and isinstance(value, tuple)}
    held = {name for name in groups if isinstance(getattr(metrics, name)[0], SeriesRow)}
    assert held == {name for groups in GROUPS for name in groups}


# -- errors.md ---------------------------------------------------------------------------------------------------------


def _classes(kind: type[ReflexError] = ReflexError) -> list[type[ReflexError]]:
    found = [kind]
    for sub in kind.__subclasses__():
        found += _classes(sub)
    return [k for k in found if k.__module__.startswith("reflex_runtime.")]


def test_errors_md_has_every_code_with_its_statuses_and_whether_a_retry_is_safe() -> None:
    text = page("errors.md")
    sections = dict(re.findall(r"^### `(\w+)`(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    classes: dict[str, list[type[ReflexError]]] = {}
    for kind in _classes():
        if kind.code not in ABSTRACT:
            classes.setdefault(kind.code, []).append(kind)
    assert set(sections) == set(classes)
    for code, kinds in classes.items():
        told = sections[code].strip().splitlines()[0]
        for kind in kinds:
            assert str(kind.http_status) in told, (code, kind)
        safe = {kind.retry_safe for kind in kinds if kind.code == code}
        if safe == {True}:
            assert "retry safe" in told, code
        elif safe == {False}:
            assert "retry not safe" in told, code
        else:
            assert "`retry_safe`" in told, code  # it depends: the body says it


def test_errors_md_has_the_codes_of_the_contract() -> None:
    text = page("errors.md")
    listed = (
        "queue_full client_at_capacity too_many_requests deadline_unreachable deadline_exceeded superseded "
        "processor_failed processor_hung shutting_down degraded slo_violated not_ready unauthorized invalid_json "
        "invalid_request too_large not_found method_not_allowed"
    )
    for code in listed.split():
        assert f"### `{code}`" in text
