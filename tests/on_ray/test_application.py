"""What `reflex ray` asks of Ray: replicas, what each reserves, and when there are to be more. Nothing is started."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed: make test-ray installs it into its own environment")

from reflex_runtime.cli import main
from reflex_runtime.cli import ray as command
from reflex_runtime.cluster.application import application
from reflex_runtime.cluster.policy import BacklogPolicy
from reflex_runtime.cluster.scaling import BACKLOG, BUSY
from reflex_runtime.demo.exports import export_dir
from reflex_runtime.settings import RayConfig, ServeConfig


def deployed(config: ServeConfig, **flags: Any) -> Any:
    """The deployment that Ray is given. flags: such as --max-replicas, by name."""
    return application(lambda: None, config, RayConfig(**flags))._bound_deployment  # type: ignore[arg-type, return-value]


def test_x7_replicas_max_replicas_and_their_delays_are_rays() -> None:
    """--replicas, --max-replicas, --target-backlog-s, --scale-out-delay-s, --scale-in-delay-s, --scale-in-wait-s."""
    fixed = deployed(ServeConfig(drain_timeout_s=5), replicas=3, scale_in_wait_s=7)
    assert (fixed.num_replicas, fixed._deployment_config.autoscaling_config) == (3, None)
    assert fixed._deployment_config.graceful_shutdown_timeout_s == 12
    scaled = deployed(
        ServeConfig(), replicas=2, max_replicas=8, target_backlog_s=0.5, scale_out_delay_s=3, scale_in_delay_s=99
    )
    asked = scaled._deployment_config.autoscaling_config
    assert (asked.min_replicas, asked.max_replicas) == (2, 8)
    assert (asked.upscale_delay_s, asked.downscale_delay_s) == (3, 99)
    assert asked.policy.policy_kwargs == {"target_backlog_s": 0.5}


def test_x7_replica_cpus_and_replica_gpus_are_what_ray_reserves() -> None:
    """--replica-cpus, --replica-gpus: a replica's device is its own."""
    for config, flags, cpus, gpus in (
        (ServeConfig(threads=4), {}, 4, 0),
        (ServeConfig(provider="cuda"), {}, 1, 1),
        (ServeConfig(provider="cuda"), {"replica_cpus": 0.5, "replica_gpus": 0.25}, 0.5, 0.25),
    ):
        options = deployed(config, **flags).ray_actor_options  # type: ignore[arg-type]
        assert (options["num_cpus"], options["num_gpus"]) == (cpus, gpus)


def test_x7_on_a_cluster_a_replica_needs_no_folder_of_the_one_that_deploys(tmp_path: Path, monkeypatch: Any) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    monkeypatch.chdir(there)
    make = command.deployed({"source": str(export_dir())})._bound_deployment.init_args[0]
    monkeypatch.chdir(here)
    there.rmdir()
    make()
    assert Path.cwd() == here


def test_x7_the_policy_asks_for_what_the_load_needs_and_for_no_change_before_it_is_known() -> None:
    policy = BacklogPolicy(0.2)

    def asked(metrics: Any) -> int:
        context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=4)
        return policy(context)[0]  # type: ignore[arg-type]

    assert asked({}) == asked(None) == 4
    assert asked({BACKLOG: {"a": 0.5, "b": 0.3}, BUSY: {"a": 0.1, "b": 0.1}}) == 4
    assert asked({BACKLOG: {"a": 0.0, "b": 0.0}, BUSY: {"a": 0.1, "b": 0.1}}) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas=2: must be at least --replicas=3"),
        (["--gr00t", "tcp://127.0.0.1:5555"], "--gr00t is of reflex serve alone: its clients cannot be shared out"),
        (["--scale-in-delay-s", "3"], "--scale-in-delay-s needs --max-replicas"),
    ],
)
def test_x7_an_option_that_has_no_effect_is_refused(words: list[str], says: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) if "--gr00t" in words else nullcontext():
        assert main(["ray", str(export_dir()), *words]) == 2
    assert says in capsys.readouterr().err
