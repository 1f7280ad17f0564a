"""From logits to tokens: what is likely comes often, what is asked for is kept, neighbours do not matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.ipc.messages import SamplingParams, ScoredToken
from reflex_runtime.llm.engine.sampler import explain, likeliest, sample, uniform
from reflex_runtime.llm.engine.sequence import Sequence
from reflex_runtime.llm.engine.toy import ByteTokenizer
from thinned import thinned

VOCAB = 300


def sequence(n: int = 0, **params: Any) -> Sequence:
    found = Sequence([1], SamplingParams(**params), ByteTokenizer())
    found.tokens += [0] * n
    return found


def rows(n: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(0.0, 2.0, (n, VOCAB)).astype(np.float32)


def chosen(logits: Any, sequences: list[Sequence]) -> list[int]:
    return [c.token_id for c in sample(logits, sequences) if isinstance(c, ScoredToken)]


def frequencies(logits: Any, draws: int = 4000, **params: Any) -> Any:
    several = [sequence(n, seed=5, **params) for n in range(draws)]
    return np.bincount(chosen(np.repeat(logits, draws, axis=0), several), minlength=VOCAB) / draws


def softmax(row: Any) -> Any:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def test_l8_temperature_0_takes_the_likeliest() -> None:
    logits = rows(20)
    assert chosen(logits, [sequence(temperature=0.0)] * 20) == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"logprobs": 3}, {"logit_bias": ((7, 50.0),)}, {"bad": True}], ids=str
)
def test_l8_rows_of_a_larger_array_are_those_rows(params: dict[str, Any]) -> None:
    """Also beside a row that is not asked for and not finite."""
    logits, wanted = rows(20), [3, 17, 5, 5, 11]
    logits[4], logits[11] = np.nan, np.inf if params.pop("bad", False) else logits[11]
    several = [sequence(n, seed=5, **params) for n in range(5)]
    alone = sample(logits[wanted], several)
    for best in (None, logits.argmax(axis=1)):
        found = sample(logits, several, wanted, best)
        assert [str(one) for one in found] == [str(one) for one in alone]


@pytest.mark.parametrize("temperature", thinned([0.5, 1.0, 1.7], [1.7]))
def test_l8_tokens_come_as_often_as_they_are_likely(temperature: float) -> None:
    logits = rows(1)
    expected = softmax(logits[0] / np.float32(temperature))
    assert np.abs(frequencies(logits, temperature=temperature) - expected).max() < 0.03
    assert 0.5 * np.abs(frequencies(logits, temperature=temperature) - expected).sum() < 0.12


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 1e-45, 1e-38, 1e-30])
def test_l8_next_to_no_temperature_takes_the_likeliest(temperature: float) -> None:
    logits = rows(20)
    assert chosen(logits, [sequence(temperature=temperature)] * 20) == logits.argmax(axis=1).tolist()
    assert chosen(logits, [sequence(temperature=temperature, top_p=0.9)] * 20) == logits.argmax(axis=1).tolist()


def test_l8_top_k_keeps_the_k_likeliest() -> None:
    logits = rows(1)
    seen = frequencies(logits, top_k=5)
    best = np.argsort(-logits[0])[:5]
    assert set(np.flatnonzero(seen)) == set(best)
    assert np.abs(seen[best] - softmax(logits[0][best])).max() < 0.03
    assert chosen(logits, [sequence(top_k=1)]) == [int(best[0])]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.9999])
def test_l8_top_p_keeps_the_fewest_that_are_likely_enough_together(top_p: float) -> None:
    logits = rows(1) * 0.3 if top_p > 0.9 else rows(1)  # so flat that a few do not suffice
    odds = softmax(logits[0])
    order = np.argsort(-odds)
    kept = order[: int(np.searchsorted(np.cumsum(odds[order]), top_p)) + 1]
    seen = frequencies(logits, top_p=top_p)
    assert set(np.flatnonzero(seen)) <= set(kept)
    assert np.count_nonzero(seen) > 0.9 * len(kept) or top_p == 0.9  # there the last of them are rare
    assert np.abs(seen[kept] - odds[kept] / odds[kept].sum()).max() < 0.03


def test_l8_top_p_counts_within_top_k() -> None:
    logits = rows(1)
    best = np.argsort(-logits[0])[:10]
    odds = softmax(logits[0][best])
    kept = best[: int(np.searchsorted(np.cumsum(odds), 0.5)) + 1]
    assert set(np.flatnonzero(frequencies(logits, top_k=10, top_p=0.5))) == set(kept)


def test_l5_a_draw_depends_on_its_seed_and_place_alone() -> None:
    logits = rows(8)
    mixed = [sequence(3, seed=i, top_p=0.9) if i % 2 else sequence(temperature=0.0) for i in range(8)]
    together = chosen(logits, mixed)
    assert together == [chosen(logits[i : i + 1], [s])[0] for i, s in enumerate(mixed)]
    assert together == chosen(logits, mixed)  # a step that is repeated draws the same


def test_draws_of_a_sequence_are_even_and_differ_by_place_and_seed() -> None:
    draws = [uniform(1, i) for i in range(5000)]
    assert all(0.0 <= u < 1.0 for u in draws)
    assert np.abs(np.histogram(draws, 10, (0.0, 1.0))[0] - 500).max() < 100
    assert uniform(1, 0) != uniform(2, 0)


def test_l8_logprobs_are_the_models_own_whatever_the_temperature() -> None:
    logits = rows(1)
    own = np.log(softmax(logits[0]))
    for temperature in (0.0, 1.7):
        choice = sample(logits, [sequence(temperature=temperature, seed=1, logprobs=3)])[0]
        assert isinstance(choice, ScoredToken)
        assert choice.logprob == pytest.approx(own[choice.token_id], abs=1e-5)
        assert [i for i, _ in choice.top] == np.argsort(-own)[:3].tolist()
        assert [x for _, x in choice.top] == pytest.approx(np.sort(own)[::-1][:3].tolist(), abs=1e-5)
    assert sample(logits, [sequence(temperature=0.0, logprobs=0)])[0] == ScoredToken(
        int(own.argmax()),
        pytest.approx(float(own.max()), abs=1e-5),
        (),  # type: ignore[arg-type]
    )
    assert sample(logits, [sequence(temperature=0.0)])[0] == ScoredToken(int(own.argmax()))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_b18_a_row_that_is_not_finite_is_that_sequences_fault_alone(bad: float) -> None:
    logits = rows(3)
    logits[1, 7] = bad
    first, second, third = sample(logits, [sequence(seed=1), sequence(seed=1), sequence(temperature=0.0)])
    assert isinstance(second, ProcessorError)
    assert (first, third) == tuple(sample(logits[[0, 2]], [sequence(seed=1), sequence(temperature=0.0)]))


def test_tokens_ruled_out_by_minus_infinity_never_come() -> None:
    logits = rows(1)
    logits[0, 10:] = -np.inf
    assert set(np.flatnonzero(frequencies(logits))) <= set(range(10))
    assert isinstance(sample(np.full((1, VOCAB), -np.inf, np.float32), [sequence()])[0], ProcessorError)


@pytest.mark.parametrize("size", [3, 100, 5000, 40_003])
def test_l8_the_likeliest_are_found_without_sorting_all(size: int) -> None:
    rng = np.random.default_rng(size)
    made = rng.normal(size=size), rng.integers(0, 4, size), np.zeros(size), np.arange(size), np.full(size, -np.inf)
    for row in made:
        numbers = row.astype(np.float32)
        expected = sorted(range(size), key=lambda i: (-numbers[i], i))
        for count in (1, 2, 20):
            assert likeliest(numbers, count).tolist() == expected[:count]


def test_l8_what_is_said_of_a_token_is_exact_to_a_millionth() -> None:
    rows = np.random.default_rng(1).normal(size=(4, 50_000)).astype(np.float32) * 6
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    for i, token in enumerate([7, 8, 9, 10]):
        choice = explain(rows[i], token, 5)
        assert choice.logprob == pytest.approx(wide[i, 7 + i], abs=1e-6)
        assert [logprob for _, logprob in choice.top] == pytest.approx(np.sort(wide[i])[::-1][:5], abs=1e-6)


def test_a_token_that_cannot_be_is_told_in_a_number_that_json_has() -> None:
    told = explain(np.array([0.0, -np.inf], np.float32), 1, 2)
    assert (told.logprob, told.top) == (-9999.0, ((0, 0.0), (1, -9999.0)))
