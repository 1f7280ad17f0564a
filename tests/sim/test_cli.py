"""`reflex simulate` as typed."""

from __future__ import annotations

import argparse

import pytest

from reflex_runtime.cli import simulation
from reflex_runtime.core.errors import ConfigError


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    simulation.add_simulate(parser.add_subparsers())
    args = parser.parse_args(["simulate", *argv])
    return int(args.run(args))


@pytest.mark.parametrize("arrivals", ["poisson", "bursty", "diurnal", "heavy"])
def test_every_load_runs_and_the_seed_decides(arrivals: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--arrivals", arrivals, "--duration-s", "3", "--rate", "350", "--seed")
    printed = []
    for seed in ("1", "1", "2"):
        assert call(*argv, seed) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


@pytest.mark.parametrize("think", ["5", "1ms", "exp:5", "around:100,5", "mix:1,300", "half:1,300"])
def test_every_kind_of_thinking_is_understood(think: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--arrivals", "closed", "--think", think, "--duration-s", "3") == 0
    assert "over 8 clients" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--rate", "0"), r"--rate=0: must be in \[0.001, 100000\] 1/s"),
        (("--max-batch-cost-ms", "9"), r"--max-batch-cost-ms=9: must be in \[10, 10000\] ms"),
        (("--batch-timeout-ms", "1001"), r"--batch-timeout-ms=1001: must be in \[0, 1000\] ms"),
        (("--arrivals", "closed", "--think", "soon"), "--think=soon: must be MS, exp:MS"),
        (("--arrivals", "closed", "--think", "exp:1,2"), "--think=exp:1,2"),
        (("--arrivals", "closed", "--think", "exp:0"), "--think=exp:0"),
        (("--arrivals", "closed", "--think", "around:1"), r"with MS in \[0, 3600000\]$"),
        (("--arrivals", "closed", "--think", "arond:1,2"), "did you mean around?"),
    ],
)
def test_b2_wrong_values_name_flag_value_and_range(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        call(*argv)
    assert "\n" not in caught.value.message
