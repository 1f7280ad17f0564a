"""`reflex serve` of policies in PyTorch on a GPU: replicas, memory that runs out, a GPU that is lost. Skipped without
one. What needs no GPU of it is in replicas/test_serving.py and run/test_gpu.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from serving.harness import Server  # noqa: E402
from serving.requests import grey  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

HERE = Path(__file__).resolve().parent
SOURCE = "python:gpu_policies:make"
EXAMPLES = HERE.parents[2] / "examples"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the servers find their policies."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]))


def test_b17_memory_that_runs_out_fails_its_requests_alone() -> None:
    free = int(torch.cuda.mem_get_info()[0]) >> 30
    third = free // 3 + 1  # two fit, three do not
    with Server(SOURCE, "--provider", "cuda", "--max-batch-cost-ms", "4000", supervised=True) as server:
        assert server.act(state=[0.0, 0.0]).status == 200
        alone = server.act(state=[float(2 * free), 0.0])
        assert (alone.status, alone.code) == (500, "processor_failed")
        assert "out of memory" in alone.json["message"]
        answers = server.at_once([{"state": [float(third), 0.0]}] * 8)  # a batch that does not fit is run in parts
        assert [answer.status for answer in answers] == [200] * 8
        assert server.get("/health").json["state"] == "ready"


def test_b17_a_lost_gpu_is_another_processs_again() -> None:
    with Server(SOURCE, "--provider", "cuda", supervised=True) as server:
        assert server.act(state=[0.0, 0.0]).status == 200
        assert server.act(state=[0.0, 2.0]).status >= 500
        server.wait_log("the GPU is lost to this process")
        server.wait_log_while_fewer("ready on", 2)
        assert server.act(state=[0.0, 0.0]).status == 200


@pytest.mark.parametrize("flags", [("--devices", "cuda:0,cuda:0"), ("--provider", "cuda", "--replicas", "2")])
def test_x7_replicas_share_a_gpu_which_the_front_does_not_touch(flags: tuple[str, ...]) -> None:
    source = "python:pytorch_policy:make"
    fields = {"state": [0.0] * 8, "instruction": "open the drawer", "seed": 1, "image": grey()}
    with Server(source, *flags, "--cuda-graphs=1,2", supervised=True) as server:
        found = [server.post(fields, {"X-Reflex-Episode": f"e{i}"}) for i in range(8)]
        assert [answer.status for answer in found] == [200] * 8, found[0].body
        assert len({str(answer.json["actions"]) for answer in found}) == 1
        health = server.get("/health").json
        assert health["state"] == "ready"
