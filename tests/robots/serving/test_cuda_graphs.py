"""`--cuda-graphs` before there is a GPU: how sizes are written, and what becomes of them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import reflex_runtime.robots.versions.slots
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.robots import Export, Policy, load_policy
from reflex_runtime.robots.policy.spec import DeviceOptions
from reflex_runtime.settings import ServeConfig
from serving.harness import STATE
from serving.in_process import nothing, one_policy

from .test_startup import said

WRONG = ["1,two", "0", "4097", "1,2,4097", "4,2", "2,2", "1,", ",", "-1", "1.5", " 1", "9" * 30]


@pytest.mark.parametrize("sizes", WRONG)
def test_b24_wrong_sizes_name_flag_value_and_range(
    sizes: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, str(tiny), f"--cuda-graphs={sizes}")
    assert line.endswith(f"--cuda-graphs={sizes}: must be ascending whole numbers in [1, 4096], such as 1,2,4,8")


def test_b24_sizes_may_be_left_out(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--cuda-graphs=1,2,4,8,16,32: CPU" in said(capsys, str(tiny), "--cuda-graphs")
    assert "--cuda-graphs=1,2,4,8,16,32: CPU" in said(capsys, str(tiny), "--cuda-graphs", "--threads", "2")
    file = tmp_path / "reflex.toml"
    file.write_text("[serve]\ncuda-graphs = 8\n")
    assert "--cuda-graphs=8: CPU" in said(capsys, str(tiny), "--config", str(file))
    assert ServeConfig().captured_sizes == ()
    assert ServeConfig(cuda_graphs="1,2,4096").captured_sizes == (1, 2, 4096)


def test_b24_the_policy_gets_the_sizes_and_warms_up_where_batches_run(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, threading.Thread] = {}

    def load(export: Export, *, device: DeviceOptions, **others: Any) -> Policy:
        policy = load_policy(export, **others)
        policy.captured_sizes = device.captured_sizes  # as if this were a GPU
        for name in ("warm_up", "run"):
            monkeypatch.setattr(policy, name, watched(name, getattr(policy, name)))
        return policy

    def watched(name: str, method: Any) -> Any:
        def call(*args: Any) -> Any:
            threads[name] = threading.current_thread()
            return method(*args)

        return call

    async def main() -> None:
        runtime = one_policy(ServeConfig(cuda_graphs="1,3"), {"prod": Export.load(tiny)})
        await runtime.start()
        assert runtime.state == "ready", runtime.error
        assert runtime.first.policy.describe()["captured_sizes"] == [1, 3]
        model = runtime.batcher.scheduler.cost_model("prod")
        assert isinstance(model, TimeCost)
        assert model.sizes == (1, 3)
        threads.pop("run")
        observation = runtime.first.policy.prepare(state=STATE, request_id="one")
        await runtime.batcher.run(runtime.first.policy.request(observation))
        await runtime.stop(asyncio.get_running_loop().time(), nothing)

    monkeypatch.setattr(reflex_runtime.robots.versions.slots, "load_policy", load)
    asyncio.run(main())
    assert threads["warm_up"] is threads["run"]
