"""Reflex as an application of Ray Serve, and Ray on this machine alone: what `reflex ray` and deploy/ray use."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Final

from reflex_runtime.cluster.front import KEY_VARIABLE
from reflex_runtime.placing import EPISODE_HEADER
from reflex_runtime.settings import RayConfig, ServeConfig

NAME: Final = "reflex"
_ENVIRONMENT: Final = {  # read when Ray is imported, here and in each of its processes
    "RAY_SERVE_SESSION_ID_HEADER_KEY": EPISODE_HEADER.decode(),
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "reflex_runtime.cluster.front.middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name not in os.environ})

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, HTTPOptions, RequestRouterConfig  # noqa: E402
from ray.serve.schema import LoggingConfig  # noqa: E402

from reflex_runtime.cluster.policy import BacklogPolicy  # noqa: E402
from reflex_runtime.cluster.replica import MakeServer, RayIngress, RayReplica  # noqa: E402
from reflex_runtime.cluster.router import EpisodeRouter  # noqa: E402

log = logging.getLogger("reflex.ray")

UNBOUNDED: Final = 100_000  # requests that Ray gives a replica at a time: the server itself refuses what is too much
LOOKS_BACK: Final = 11.0  # seconds over which Ray averages what replicas report; it wants more than 10
HEALTH_EVERY: Final = 2.0  # seconds
TRIES: Final = 3  # starts of a replica that fail, after which its application has failed
_LOOK: Final = 0.25  # seconds between looks at an application that starts


def application(make: MakeServer, config: ServeConfig, scale: RayConfig) -> serve.Application:
    """The application, for `serve.run` or a cluster's configuration. make: called in the process of each replica."""
    deployment = serve.deployment(serve.ingress(RayIngress())(RayReplica))
    options: dict[str, Any] = {
        "name": NAME,
        "ray_actor_options": _resources(config, scale),
        "max_ongoing_requests": UNBOUNDED,
        "graceful_shutdown_timeout_s": scale.scale_in_wait_s + config.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": HEALTH_EVERY,
        "logging_config": LoggingConfig(enable_access_log=False),
        "max_constructor_retry_count": TRIES,
        "request_router_config": RequestRouterConfig(request_router_class=EpisodeRouter),
    }
    if scale.scales:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=scale.replicas,
            max_replicas=scale.max_replicas,
            upscale_delay_s=scale.scale_out_delay_s,
            downscale_delay_s=scale.scale_in_delay_s,
            look_back_period_s=LOOKS_BACK,
            policy=AutoscalingPolicy(
                policy_function=BacklogPolicy, policy_kwargs={"target_backlog_s": scale.target_backlog_s}
            ),
        )
    else:
        options["num_replicas"] = scale.replicas
    return deployment.options(**options).bind(make)


def _resources(config: ServeConfig, scale: RayConfig) -> dict[str, float]:
    """What Ray reserves for each replica, in one place: its device is its own."""
    gpus = scale.replica_gpus if scale.replica_gpus >= 0 else float(config.provider == "cuda")
    return {"num_cpus": scale.replica_cpus or float(config.threads), "num_gpus": gpus}


def run(
    make: MakeServer,
    config: ServeConfig,
    scale: RayConfig,
    port: int,
    stop: threading.Event,
    on_ready: Callable[[], None],
) -> str:
    """Start Ray on this machine, serve until `stop` is set, and end everything. Returns "" or why it did not start."""
    os.environ.pop(KEY_VARIABLE, None)  # of another server's: no key would fit
    if config.api_key:
        os.environ[KEY_VARIABLE] = hashlib.sha256(config.api_key.encode()).hexdigest()
    ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING, configure_logging=False)
    try:
        serve.start(http_options=HTTPOptions(host=config.host, port=port))
        target = serve.RunTarget(application(make, config, scale), name=NAME, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        why = _started(stop)
        if not why and not stop.is_set():
            on_ready()
            stop.wait()
        return why
    finally:
        log.info("ending Ray and its replicas")
        serve.shutdown()
        ray.shutdown()


def _started(stop: threading.Event) -> str:
    """Wait until every replica is ready. Returns why they are not, "" if they are or `stop` is set."""
    while not stop.is_set():
        found = serve.status().applications[NAME]
        if found.status == "RUNNING":
            return ""
        if found.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            return "; ".join(d.message for d in found.deployments.values() if d.message) or found.message
        stop.wait(_LOOK)
    return ""
