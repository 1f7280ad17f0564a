"""The application of a policy server: its routes, and those of each policy below a path that names it.

Every answer carries `X-Request-Id`; every non-2xx body has `error`, `message`, `request_id` and `retry_safe`.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from itertools import groupby
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.openapi import POLICIES, document
from reflex_runtime.robots.policy.base import PolicySource
from reflex_runtime.robots.policy.spec import WIRES, PolicySpec
from reflex_runtime.robots.serving.endpoints import Endpoints
from reflex_runtime.robots.serving.handler import RequestHandler
from reflex_runtime.robots.serving.runtime import PolicyPlan, PolicyRuntime
from reflex_runtime.robots.sources.export_directory import Export
from reflex_runtime.robots.sources.load import check_two_policies, read_source, weight_of
from reflex_runtime.robots.versions.ramp import Objective, Ramp, RampGuard
from reflex_runtime.robots.versions.slots import check_alike, device_of, faults_of
from reflex_runtime.run.onnx_session import CPU, CUDA, PROVIDERS, check_provider
from reflex_runtime.settings import DEFAULT_POLICY, PolicyAsked, ServeConfig
from reflex_runtime.settings.declare import Places, check_needs, did_you_mean, one_line
from reflex_runtime.settings.read import environment, read
from reflex_runtime.web.access import Keys
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import PLAIN
from reflex_runtime.web.oip import ROOT
from reflex_runtime.web.openapi import document_routes
from reflex_runtime.web.request import HttpRequest, Route, named_in
from reflex_runtime.web.supervisor import Parent

log = logging.getLogger("reflex.server")


def application(runtime: PolicyRuntime) -> App:
    """The application around one `PolicyRuntime`."""
    config, handler = runtime.config, RequestHandler(runtime)
    named = {name: PolicyRoutes(RequestHandler(runtime, name, POLICIES + name)) for name in runtime.policies}
    plain = PolicyRoutes(handler, list(named.values()) if len(named) > 1 else ())

    def find(path: str) -> Route | None:
        if not path.startswith(POLICIES):
            return plain.find(path)
        name, slash, rest = path[len(POLICIES) :].partition("/")
        return named[name].find(slash + rest or "/") if name in named else None

    plain.by_path |= {route.path: route for route in runtime.pages}
    app = App(config, plain.by_path, PLAIN, find, missing=partial(_missing, runtime))
    for wire in WIRES.values():
        if wire.listener and getattr(config, wire.setting):
            listener = _module(wire.listener).listener(app, handler)
            app.listeners.append(listener)
            runtime.listening[wire.setting] = listener.address
            log.info("clients of %s: %s", wire.clients, listener.address)
    return app


def _module(name: str) -> Any:
    """The module of a wire; imported when needed, because some need optional packages."""
    return import_module(f"reflex_runtime.robots.wires.{name}")


def _missing(runtime: PolicyRuntime, path: str) -> str:
    """The message for a path that has no route."""
    name = path.removeprefix(POLICIES).partition("/")[0]
    if path.startswith(POLICIES) and name not in runtime.policies:
        names = ", ".join(runtime.policies)
        return f"policy {name[:100]!r} is not served, only {names}{did_you_mean(name[:100], runtime.policies)}"
    return f"no such path: {path[:200]}; /docs has all paths"


class PolicyRoutes:
    """The routes of one policy: those that a server of this policy alone has, below the path that names it."""

    def __init__(self, handler: RequestHandler, below: Sequence[PolicyRoutes] = ()) -> None:
        """below: the routes of each policy, where these are of a server of several."""
        self._handler, self._below = handler, below
        self._document: tuple[Mapping[str, Mapping[str, PolicySpec]], bytes] = ({}, b"")  # of these policies
        routes = [
            *(route for wire in WIRES.values() if wire.routes for route in _module(wire.routes).routes(handler)),
            *Endpoints(handler, several=bool(below)).routes,
            *document_routes(self._described),
        ]
        self.by_path = {route.path: route for route in routes}
        for route in routes:
            if route.socket is not None:  # openpi's clients connect where a browser begins
                self.by_path[route.path] = replace(self.by_path[route.path], socket=route.socket)
        self._named = named_in(routes)

    def find(self, path: str) -> Route | None:
        """The route of a path."""
        return self.by_path.get(path) or self._named(path)

    def _described(self, request: HttpRequest) -> bytes:
        """The document of its routes, made again after an exchange."""
        runtime, prefix, config = self._handler.runtime, self._handler.prefix, self._handler.config
        policies = [self._handler.served] if prefix else runtime.policies.values()
        specs = {served.name: served.specs for served in policies}
        if self._document[0] != specs:
            self._document = specs, document(self.described, specs, Keys(config.api_key, config.admin_key))
        return self._document[1]

    @property
    def described(self) -> list[Route]:
        """All its routes; of a server of several policies its own, and those of each policy."""
        if self._below:
            routes = self.by_path.values()
            own = [r for r in routes if r.open or r.own_pages or r.path == "/config" or r.path.startswith(ROOT)]
            return own + [route for below in self._below for route in below.described]
        return [replace(route, path=self._handler.prefix + route.path) for route in self.by_path.values()]


def create(source: str | None = None, **settings: str) -> App:
    """The application of one policy for any ASGI server, such as `uvicorn --factory`. See `create_app`."""
    return create_app(source, **settings)[0]


def create_app(source: str | None = None, **settings: str) -> tuple[App, PolicyRuntime]:
    """An application and its runtime, for programs that add a route, such as a wire of their own.

    source: as SOURCE of `reflex serve`; else REFLEX_SOURCE. settings: its options; others come from the environment
    (REFLEX_MAX_QUEUE=64). ConfigError for faults that show before anything is loaded.
    """
    for name in settings.keys() - {field.name for field in fields(ServeConfig)}:
        raise ConfigError(f"{name}={settings[name]}: no such setting")
    config, places = read(ServeConfig, "serve", None, environment(), settings)
    source = source or os.environ.get("REFLEX_SOURCE", "")
    if not source:
        raise ConfigError("REFLEX_SOURCE is missing: the directory of an export")
    asked = PolicyAsked(DEFAULT_POLICY, {"prod": source}, config, places, 1.0, "")
    app, runtime = serving(config, plans_of(config, places, [asked]), None)
    runtime.on_lost = partial(signal.raise_signal, signal.SIGTERM)  # whatever runs it drains and starts it again
    runtime.attach(app, config.drain_timeout_s)
    return app, runtime


def serving(
    config: ServeConfig, plans: Sequence[PolicyPlan], parent: Parent | None
) -> tuple[App, PolicyRuntime]:
    """The application of these policies and its host."""
    runtime = PolicyRuntime(config, plans, parent)
    return application(runtime), runtime


# -- plans: their errors come before anything is loaded ----------------------------------------------------------------


def plans_of(config: ServeConfig, places: Places, asked: Sequence[PolicyAsked]) -> list[PolicyPlan]:
    """The plans of these policies; ConfigError for faults that show before anything is loaded."""
    check_memory(asked)
    plans = []
    for policy in asked:
        with policy.named():
            device = device_of(policy.config)
            specs = {slot: read_source(source, device) for slot, source in policy.sources.items()}
            plans.append(PolicyPlan(policy.name, policy.config, specs, policy.weight, policy.where))
    check_needs(config, places, _unmet([spec for plan in plans for spec in plan.specs.values()]))
    for policy, plan in zip(asked, plans, strict=True):
        check_needs(policy.config, policy.places, _unmet(list(plan.specs.values())))
        with policy.named():
            _check_device(policy.config, plan.specs)
            _check(policy.config, plan.specs)
    return plans


def _unmet(specs: Sequence[PolicySource]) -> dict[str, str]:
    """The needs of settings that these policies do not meet, with the reason; see `check_needs`."""
    named = ", ".join(spec.source for spec in specs)
    needs = {
        "a decomposed export": (any(spec.staged for spec in specs), "is monolithic"),
        "a policy that takes an instruction": (any(spec.takes_text for spec in specs), "takes none"),
        "a model in PyTorch": (not all(isinstance(spec, Export) for spec in specs), "is an ONNX export"),
    }
    return {need: f"{named} {why}" for need, (met, why) in needs.items() if not met}


def check_memory(asked: Sequence[PolicyAsked]) -> None:
    """ConfigError unless all policies fit the memory, by the sizes of their files: none has been read yet."""

    def provider_of(policy: PolicyAsked) -> str:
        return PROVIDERS.get(policy.config.provider, policy.config.provider)

    for provider, group in groupby(sorted(asked, key=provider_of), provider_of):
        sizes = [[weight_of(source) for source in policy.sources.values()] for policy in group]
        needs = [len(slots) * max(slot.model_bytes for slot in slots) for slots in sizes]
        if sum(map(len, sizes)) > 1:
            largest = max(range(len(sizes)), key=needs.__getitem__)
            slots, beside = sizes[largest], sum(needs) - needs[largest]
            check_two_policies(slots, environment(), provider, policies=len(slots), beside=beside)


def _check_device(config: ServeConfig, specs: Mapping[str, PolicySource]) -> None:
    provider = PROVIDERS.get(config.provider, config.provider)
    try:
        # Torch may have CUDA where ONNX Runtime has not.
        if provider not in (CPU, CUDA) or any(isinstance(spec, Export) for spec in specs.values()):
            check_provider(provider)
    except ConfigError as error:
        raise ConfigError(f"--provider={one_line(config.provider)}: {error.message.partition(': ')[2]}") from None
    if config.cuda_graphs and provider != CUDA:
        raise ConfigError(
            f"--cuda-graphs={config.cuda_graphs}: {provider} has no graphs to capture; leave the option out"
        )


def _check(config: ServeConfig, specs: Mapping[str, PolicySource]) -> None:
    """Check the settings of one policy that are more than a range, and its sources."""
    if config.slo:
        Objective.parse(config.slo)
    if config.guard:
        RampGuard.parse(config.guard)
    Ramp.every_of(config.ramp_every)
    if config.ramp:
        Ramp.shares_of(config.ramp)
    faults_of(config.inject_fault, tuple(specs), "--inject-fault")
    check_alike(specs)
    for spec in specs.values():
        spec.check()
        for flag, given in (("--rtc", config.rtc), ("--adaptive-steps", config.adaptive_steps)):
            if given and not spec.staged:
                why = "only decomposed policies denoise step by step"
                raise ConfigError(f"{flag}: {spec.source} is monolithic, and {why}; leave {flag} out")
