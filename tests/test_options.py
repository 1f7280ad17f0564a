"""Every option of every command: it has an effect, or it says that it has none (H10). Generated from the settings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from reflex_runtime.cli import main
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.engine.prompts import PromptsConfig
from reflex_runtime.settings import FeedsConfig, FunctionsConfig, LLMServeConfig, ServeConfig
from reflex_runtime.settings.declare import check_needs, flag
from reflex_runtime.settings.read import load, read
from reflex_runtime.sim.options import SimulateConfig
from serving.exports import write_tiny

KINDS: tuple[type[Any], ...] = (
    ServeConfig, LLMServeConfig, FeedsConfig, FunctionsConfig, SimulateConfig, PromptsConfig,
)  # fmt: skip
OPTIONS = [(kind, field) for kind in KINDS for field in fields(kind)]
TEXTS = {"ramp": "5,100", "ramp_every": "2m", "slo": "p99=150ms", "guard": "p99=150ms", "cuda_graphs": "1,2", "at": "0"}
TEXTS |= {"replicas": "auto", "fail": "0@1-2"}
TEXTS |= {"think": "5", "max_tokens": "5", "sweep": "4..8", "provider": "cuda"}
TEXTS |= {"cors": "http://localhost:3000", "gr00t": "tcp://127.0.0.1:5555"}
TEXTS |= {"lerobot": "127.0.0.1:8080", "oip_grpc": "127.0.0.1:8001", "otel": "http://localhost:4318"}
OFF = {"max_consecutive_crashes": 0, "policy": "greedy"}  # a value without the effect that others need


def test_there_are_no_more_settings_than_somebody_uses() -> None:
    """One that is added takes the place of another: 154 of them were cut to this."""
    assert len({field.name for _, field in OPTIONS}) <= 140


def another(kind: type[Any], field: Field[Any]) -> Any:
    """A value that a setting may have, other than its default."""
    meta = field.metadata
    if get_type_hints(kind)[field.name] in (bool, bool | None):
        return not field.default
    if meta["choices"]:
        return next(choice for choice in meta["choices"] if choice != field.default)
    if field.default is None and meta["high"] is not None:
        return meta["high"]
    if meta["low"] is not None:
        return meta["high"] if field.default == meta["low"] else type(field.default)((meta["low"] + field.default) / 2)
    text = TEXTS.get(field.name, "word" if meta["repeat"] else "text")
    return (text,) if meta["repeat"] else text


def company(kind: type[Any], name: str) -> dict[str, Any]:
    """The settings that a setting needs, and those that they need."""
    found: dict[str, Any] = {}
    by_name = {field.name: field for field in fields(kind)}
    need, _, value = by_name[name].metadata["needs"].partition("|")[0].partition("=")
    if need in by_name:
        found |= {need: value or another(kind, by_name[need])} | company(kind, need)
    return found


class EveryFact(dict[str, str]):
    """No fact holds, whatever it is called."""

    def __contains__(self, fact: object) -> bool:
        return True

    def __missing__(self, fact: str) -> str:
        return "it is not so"


def given(kind: type[Any], flags: dict[str, Any], missing: Any = None, only: str = "") -> None:
    """Give settings as flags, one of them (`only`) from the environment if its value is a text that begins with $."""
    environ = {"REFLEX_" + name.upper(): value[1:] for name, value in flags.items() if str(value).startswith("$")}
    told = {name: value for name, value in flags.items() if not str(value).startswith("$")}
    config, places = read(kind, "x", None, environ, told)
    check_needs(config, {only: places[only]} if only else places, missing)


def refusal(kind: type[Any], flags: dict[str, Any], missing: Any = None, only: str = "") -> ConfigError | None:
    try:
        given(kind, flags, missing, only)
    except ConfigError as error:
        return error
    return None


def test_h10_an_option_that_needs_nothing_is_taken_alone_and_another_with_what_it_needs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = [refusal(kind, {field.name: another(kind, field)} | company(kind, field.name)) for kind, field in OPTIONS]
    assert [str(error) for error in found if error is not None] == []
    assert not caplog.records


def without_what_they_need() -> Iterator[tuple[type[Any], str, Any, dict[str, Any]]]:
    """(kind, an option, its value, settings in which it lacks what it needs or has no effect)."""
    for kind, field in OPTIONS:
        name, value, needs = field.name, another(kind, field), field.metadata["needs"]
        if needs:
            yield kind, name, value, {k: v for k, v in OFF.items() if k in needs and f"{k}={v}" not in needs}
        for word in filter(None, field.metadata["unless"].split("|")):
            other, _, wanted = word.partition("=")
            bad = next(f for f in fields(kind) if f.name == other)
            found = {other: wanted or another(kind, bad)} | company(kind, name) | company(kind, other)
            yield kind, name, value, found


def test_h10_an_option_without_what_it_needs_is_refused_on_the_command_line_and_warned_of_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = []
    for kind, name, value, others in without_what_they_need():
        error = refusal(kind, {name: value} | others, EveryFact(), only=name)
        if error is None or error.details["field"] != name:
            wrong.append(f"{kind.__name__}.{name}: {error}")
        elif not str(error).startswith((f"{flag(name)} needs ", f"{flag(name)} has no effect with ")):
            wrong.append(str(error))
        if kind in KINDS[:4]:  # the others do not read the environment
            caplog.clear()
            text = value[0] if isinstance(value, tuple) else value
            given(kind, others | {name: f"${text}"}, EveryFact(), only=name)
            found = [record.getMessage() for record in caplog.records]
            if len(found) != 1 or not found[0].startswith(f"REFLEX_{name.upper()} has no effect: it "):
                wrong.append(f"{kind.__name__}.{name} from the environment: {found}")
    assert wrong == []


def test_h10_off_is_off_and_needs_nothing() -> None:
    given(ServeConfig, {"rtc_per_episode": False, "record_no_gzip": False})


def test_h10_what_a_needed_setting_needs_is_needed_too() -> None:
    with pytest.raises(ConfigError, match="--prefix-max-age-chunks needs a decomposed export: because"):
        given(ServeConfig, {"prefix_max_age_chunks": 3}, {"a decomposed export": "because"})
    with pytest.raises(ConfigError, match="--prefix-max-age-chunks needs --prefix-cache-mb"):
        given(ServeConfig, {"prefix_max_age_chunks": 3, "prefix_cache_mb": 0})


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What should have been refused must not serve for ever; and the file of a key need not be there."""
    monkeypatch.setattr("reflex_runtime.settings.server._key_in", lambda file, name: name)
    monkeypatch.setattr("reflex_runtime.web.supervisor.bind", None)
    monkeypatch.setattr("reflex_runtime.feeds.session.FeedsSession", None)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command refuses."""
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


SERVE = [
    ("--split 80", "--policy-b"),
    ("--shadow-sample 0.5", "--shadow-policy"),
    ("--slo-mode 503", "--slo"),
    ("--rtc-schedule ONES", "--rtc"),
    ("--rtc-horizon 5", "--rtc"),
    ("--rtc-per-episode", "--rtc"),
    ("--ramp 5,100", "--policy-b"),
    ("--ramp-every 5m", "--ramp or --guard"),
    ("--record-images full", "--record"),
    ("--record-no-gzip", "--record"),
    ("--record-max-mb 5", "--record"),
    ("--prefix-cache-mb 64", "a decomposed export: {export} is monolithic"),
    ("--prefix-max-age-chunks 2", "a decomposed export: {export} is monolithic"),
    ("--default-prompt go", "a policy that takes an instruction: {export} takes none"),
    ("--gr00t-config n1.5", "--gr00t"),
    ("--probe-cooldown-s 5 --max-consecutive-crashes 0", "--max-consecutive-crashes"),
]
FEEDS = [
    ("a.mp4", "--max-age-ms 5", "a live feed"),
    ("a.mp4", "--restarts 5", "a live feed"),
    ("a.mp4", "--read-timeout-s 9", "a camera"),
    ("shapes:", "--realtime", "a file"),
    ("shapes:", "--loop", "a file"),
    ("shapes:", "--host 127.0.0.1", "--port"),
]


def test_h10_reflex_serve_refuses_an_option_without_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = write_tiny(tmp_path / "tiny")
    lines = [said(capsys, "serve", str(export), "--no-supervise", *words.split()) for words, _ in SERVE]  # here
    assert lines == [
        f"reflex serve: {words.split()[0]} needs {needed.format(export=export)}" for words, needed in SERVE
    ]


def test_h10_reflex_feeds_refuses_an_option_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.mp4").touch()
    for feed, arguments, needed in FEEDS:
        words = arguments.split()
        line = said(capsys, "feeds", f"a={feed}", "--onnx", "shapes", *words)
        assert line.startswith(f"reflex feeds: {words[0]} needs {needed}"), line


def test_h10_reflex_simulate_refuses_an_option_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "simulate", "--think", "3").endswith("--think needs --arrivals=closed")
    words = "--arrivals", "closed", "--rate", "5"
    assert said(capsys, "simulate", *words).endswith("--rate has no effect with --arrivals=closed")


# -- names that are none -----------------------------------------------------------------------------------------------


def test_h10_a_variable_that_is_no_setting_is_warned_of_with_the_nearest_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for variable, says in (
        ("REFLEX_MAX_QEUE", "REFLEX_MAX_QEUE: no such setting; did you mean REFLEX_MAX_QUEUE?"),
        ("REFLEX_max_queue", "REFLEX_max_queue: no such setting; did you mean REFLEX_MAX_QUEUE?"),
        ("REFLEX_SKIP_2POLICY_MEMORY_CHEK", "did you mean REFLEX_SKIP_2POLICY_MEMORY_CHECK?"),
        ("REFLEX_ZZZ", "REFLEX_ZZZ: no such setting"),
    ):
        caplog.clear()
        load(ServeConfig, "serve", None, {variable: "5"}, {})
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage().endswith(says)


def test_h10_a_variable_of_another_command_and_what_is_not_ours_is_no_misspelling(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = {"REFLEX_MAX_NUM_SEQS": "4", "REFLEX_SKIP_2POLICY_MEMORY_CHECK": "1"}
    assert load(ServeConfig, "serve", None, ours | {"PATH": "/bin", "reflex_max_queue": "x"}, {}) == ServeConfig()
    assert not caplog.records


def test_what_an_orchestrator_says_of_a_service_called_reflex_is_no_setting(caplog: pytest.LogCaptureFixture) -> None:
    told = {
        "REFLEX_PORT": "tcp://10.0.0.9:8000",
        "REFLEX_SERVICE_HOST": "10.0.0.9",
        "REFLEX_SERVICE_PORT": "8000",
        "REFLEX_SERVICE_PORT_HTTP": "8000",
        "REFLEX_PORT_8000_TCP": "tcp://10.0.0.9:8000",
        "REFLEX_PORT_8000_TCP_ADDR": "10.0.0.9",
        "REFLEX_PORT_8000_TCP_PROTO": "tcp",
        "REFLEX_STAGING_PORT": "udp://10.0.0.9:8000",
        "REFLEX_STAGING_SERVICE_HOST": "10.0.0.9",
    }
    assert load(ServeConfig, "serve", None, told, {}) == ServeConfig()
    assert load(LLMServeConfig, "serve", None, told, {}) == LLMServeConfig()
    assert not caplog.records
    assert load(ServeConfig, "serve", None, {"REFLEX_PORT": "8001"}, {}).port == 8001
    with pytest.raises(ConfigError, match="REFLEX_PORT=http: must be a whole number"):
        load(ServeConfig, "serve", None, {"REFLEX_PORT": "http"}, {})


def test_a_misspelt_key_of_the_file_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "reflex.toml"
    file.write_text("[serve]\nmax-qeue = 5\n")
    with pytest.raises(ConfigError, match=r"\[serve\] max-qeue: no such setting; did you mean max_queue\?"):
        load(ServeConfig, "serve", file, {}, {})
