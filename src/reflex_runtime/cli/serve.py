"""`reflex serve SOURCE`: serve a robot policy over HTTP, batched by cost. Language models are in `serve_llm`."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from reflex_runtime.cli import serving
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.statistics import DEFAULT_COST
from reflex_runtime.demo import policy_source, told_apart
from reflex_runtime.settings import (
    DEFAULT_POLICY,
    MAX_POLICIES,
    OWN_SETTINGS,
    LLMServeConfig,
    PolicyAsked,
    ServeConfig,
)
from reflex_runtime.settings.declare import Places, one_line
from reflex_runtime.settings.read import POLICIES, own_settings, tables_of
from reflex_runtime.web.replicas import devices_of

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_EXAMPLES = """\
examples:
  reflex serve demo                                 the bundled policy; reflex demo-export DIR writes it as files
  reflex serve ./my-export --max-batch-cost-ms 50   smaller batches, shorter tail
  reflex serve ./my-export --trace batches.jsonl    then: reflex trace batches.jsonl
  reflex serve lerobot:./outputs/pretrained_model   a checkpoint of LeRobot
  reflex serve openpi:./pi05_droid_pytorch          a PyTorch checkpoint of openpi
  reflex serve python:my_robot.policy:make          a model in PyTorch, or anything else that Python can call

Functions (python:my_module:embed), ONNX models (FILE.onnx) and language models (a directory with a config.json) have
options of their own: reflex serve python:my_module:embed --help and reflex serve MODEL_DIR --help show them.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb for a policy."""
    what = "Serve a robot policy over HTTP. Concurrent requests share forward passes, within a cost budget."
    elsewhere = serving.options_of(LLMServeConfig, "language models")
    parser = serving.serve_parser(verbs, run, ServeConfig, what, _EXAMPLES, elsewhere=elsewhere)
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="export directory (docs/exports.md), demo (the bundled policy), lerobot:DIR, openpi:DIR, or "
        "python:package.module:make for a policy of your own (docs/policies.md); may be left out with --policy-a",
    )


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then open the port, then load."""
    config, places = serving.settings(ServeConfig, args, (POLICIES,))
    asked = policies_of(config, args.source, args.config)
    return serving.supervised(config, partial(_plan, config, places, asked), devices_of(config, places))


def _plan(
    config: ServeConfig, places: Places, asked: Sequence[PolicyAsked], changed: Mapping[str, Any]
) -> serving.Served:
    """The server of these policies. changed: settings of this process."""
    from reflex_runtime.robots import app

    config = replace(config, **changed)
    asked = [replace(policy, config=replace(policy.config, **changed)) for policy in asked]
    plans = app.plans_of(config, places, asked)
    serving.check_outputs(config)
    serving.check_listener("gr00t", config.gr00t, config.api_key, "zmq")
    serving.check_listener("oip-grpc", config.oip_grpc, config.api_key, "grpc")
    serving.check_listener("lerobot", config.lerobot, config.api_key, "grpc")
    models = dict.fromkeys(spec.model_id for plan in plans for spec in plan.specs.values())
    sources = [told_apart(source) for policy in asked for source in policy.sources.values()]
    return serving.Served(
        config, partial(app.serving, config, plans), ", ".join(models), ", ".join(sources), _ready,
        [_row(policy) for policy in asked if len(asked) > 1], [(logging.WARNING, text) for text in _warnings(config)],
    )  # fmt: skip


def _warnings(config: ServeConfig) -> Iterator[str]:
    if config.max_batch > 1:
        budget = f"use --max-batch-cost-ms {config.max_batch * DEFAULT_COST * 1e3:g} (about N x 50)"
        yield f"--max-batch={config.max_batch} is ignored: batches are bounded by cost; {budget}"
    for fault in config.inject_fault:
        yield f"FAULT INJECTION IS ON: --inject-fault {fault}"
    if config.inject_latency_ms:
        yield f"FAULT INJECTION IS ON: --inject-latency-ms {config.inject_latency_ms:g}"


def _row(policy: PolicyAsked) -> tuple[str, str]:
    """A policy's row among the settings in force: its sources, its weight and its own settings."""
    parts = [f"{slot} {source}" for slot, source in policy.sources.items()]
    parts += [f"weight {policy.weight:g}"]
    parts += [f"{name} {getattr(policy.config, name)}" for name in policy.places if name in OWN_SETTINGS]
    return f"policy {policy.name}", ", ".join(parts)


def _ready(runtime: Any) -> str:
    return f" ({', '.join(dict.fromkeys(served.spec.inference_mode for served in runtime.policies.values()))})"


# -- which policies: SOURCE, --policy NAME=SOURCE and the tables [policies.NAME] ---------------------------------------


def policies_of(config: ServeConfig, source: str | None, file: Path | None = None) -> list[PolicyAsked]:
    """Every policy, that of SOURCE first. Raises ConfigError if options contradict each other."""
    tables = tables_of(file, POLICIES)
    plain = source is not None or bool(config.policy_a or config.policy_b)
    named = _named(config.policy)
    if plain and DEFAULT_POLICY in named:
        raise ConfigError(f"--policy={DEFAULT_POLICY}=…: SOURCE has this name already; leave one of them out")
    names = list(dict.fromkeys([*([DEFAULT_POLICY] if plain else []), *named, *tables])) or [DEFAULT_POLICY]
    if len(names) > MAX_POLICIES:
        raise ConfigError(f"--policy: {len(names)} policies are named, at most {MAX_POLICIES} are served")
    found = []
    for name in names:
        if not _NAME.fullmatch(name):
            what = "must be 1 to 32 letters, digits, - and _, not begin with - or _"
            raise ConfigError(f"--policy={one_line(name)}=…: the name {what}")
        where = "" if names == [DEFAULT_POLICY] else f"policy {name}: "
        base = config
        if not (plain and name == DEFAULT_POLICY):
            base = replace(config, policy_a="", policy_b="", shadow_policy="")
        own, mine, places = own_settings(file, POLICIES, name, tables.get(name, {}), base, OWN_SETTINGS)
        mine = replace(mine, inject_fault=_faults(config.inject_fault, name, names))
        given = source if plain and name == DEFAULT_POLICY else named.get(name) or own.source or None
        asked = PolicyAsked(name, {}, mine, places, own.weight, where)
        with asked.named():
            found.append(replace(asked, sources=slots_of(mine, given)))
    return found


def _named(texts: Sequence[str]) -> dict[str, str]:
    """The sources of --policy, by name."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not (equals and name and source):
            raise ConfigError(f"--policy={one_line(text)}: must be NAME=SOURCE, such as arm=./my-export")
        if name in found:
            raise ConfigError(f"--policy={one_line(text)}: {name} is named twice")
        found[name] = source
    return found


def _faults(texts: Sequence[str], name: str, names: Sequence[str]) -> tuple[str, ...]:
    """The injected faults of one policy; with several policies a slot is written NAME.SLOT."""
    if len(names) == 1:
        return tuple(texts)
    for text in texts:
        policy = text.partition(".")[0] if "." in text.partition(":")[0] else ""
        if policy not in names:
            raise ConfigError(f"--inject-fault={one_line(text)}: must begin with NAME.SLOT; names: {', '.join(names)}")
    return tuple(text.partition(".")[2] for text in texts if text.startswith(f"{name}."))


def slots_of(config: ServeConfig, source: str | None) -> dict[str, str]:
    """The source of every slot, served ones first. Raises ConfigError if options contradict each other."""
    from reflex_runtime.robots.sources.load import directory_of

    a, b, shadow = map(policy_source, (config.policy_a, config.policy_b, config.shadow_policy))
    if bool(a) != bool(b):
        missing, given = ("--policy-b", "--policy-a") if a else ("--policy-a", "--policy-b")
        raise ConfigError(f"{given} needs {missing}: serve two policies with both, or one policy as SOURCE")
    if b and shadow:
        raise ConfigError("--shadow-policy: not with --policy-b; serve a and b, or one policy and its shadow")
    if not a and source is None:
        raise ConfigError(
            "SOURCE is missing: demo or scribe, which are bundled, DIR, FILE.onnx or python:MODULE:NAME; or --policy-a "
            "DIR --policy-b DIR"
        )
    if a and source is not None and not _same(source, a):
        raise ConfigError(f"SOURCE={source}: must be that of --policy-a={a}, or left out")
    for flag, given in (("--policy-a", a), ("--policy-b", b), ("--shadow-policy", shadow)):
        if given and not os.path.isdir(directory_of(given)):
            raise ConfigError(f"{flag}={one_line(given)}: no such directory, expected an export (docs/exports.md)")
    if b and config.rtc is None:
        raise ConfigError(
            "two policies need --no-rtc, or --rtc with --rtc-per-episode: to continue a chunk of one policy with the "
            "other would be a jump"
        )
    if b and config.rtc and not config.rtc_per_episode:
        raise ConfigError("--rtc with two policies needs --rtc-per-episode: no policy may continue the other's chunk")
    found = {"a": a, "b": b} if b else {"prod": policy_source(source or "")}
    return found | ({"shadow": shadow} if shadow else {})


def _same(one: str, other: str) -> bool:
    """Whether two sources are the same, even if their paths are written differently."""
    from reflex_runtime.robots.sources.load import directory_of

    return one == other or directory_of(one).resolve() == directory_of(other).resolve()
