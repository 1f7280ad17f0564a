"""The promises of the core, over random histories, against the oracle."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .histories import SCENARIOS, Play

EVERY = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_oracle_agrees_on_long_random_histories(scenario: str) -> None:
    for seed in range(25):
        Play(SCENARIOS[scenario], Random(f"{scenario} {seed}").randbytes(500)).run()


@pytest.mark.parametrize("scenario", SCENARIOS)
@EVERY
@given(st.binary(max_size=120))
def test_the_oracle_agrees_on_short_histories(scenario: str, data: bytes) -> None:
    Play(SCENARIOS[scenario], data).run()
