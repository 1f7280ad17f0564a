"""The prefix cache: what may be shared, for how long, and how much of it is kept."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.robots import DecomposedPolicy, load_policy
from reflex_runtime.robots.policy.decomposed import DENOISE, PREFIX
from reflex_runtime.robots.policy.episodes import ENTRY_OVERHEAD, PrefixCache, PrefixKey, PrefixTensors, digest
from robots.tiny import Bench, asked, picture, value, write_export


def prefix(nbytes: int = 100) -> PrefixTensors:
    return PrefixTensors({"keys": np.zeros(nbytes, np.uint8)})


def key(episode: str = "e", instruction: str = "open", content: str = "A", slot: str = "prod") -> PrefixKey:
    return PrefixKey(slot, episode, instruction.encode(), content.encode())


COST = 100 + ENTRY_OVERHEAD


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_export(tmp_path, "decomposed")


def decomposed(root: Path, **options: Any) -> DecomposedPolicy:
    policy = load_policy(root, **options)
    assert isinstance(policy, DecomposedPolicy)
    return policy


def test_e1_identical_content_is_a_hit() -> None:
    cache = PrefixCache(10 * COST)
    kept = prefix()
    assert cache.lookup(key()) == ("miss", None)
    cache.insert(key(), kept)
    assert cache.lookup(key()) == ("hit", kept)
    assert (cache.hits, cache.misses) == (1, 1)


@pytest.mark.parametrize("other", [key(episode="f"), key(instruction="close"), key(slot="b"), key(content="B")])
@pytest.mark.parametrize("max_age_chunks", [0, 5])
def test_e1_nothing_crosses_episode_slot_or_instruction(other: PrefixKey, max_age_chunks: int) -> None:
    cache = PrefixCache(10 * COST, max_age_chunks)
    cache.insert(key(), prefix())
    stale = max_age_chunks and other == key(content="B")
    assert cache.lookup(other)[0] == ("hit_stale" if stale else "miss")


def test_e1_the_bound_is_in_bytes_and_the_longest_unused_goes() -> None:
    cache = PrefixCache(3 * COST)
    for content in "ABC":
        cache.insert(key(content=content), prefix())
    cache.lookup(key(content="A"))
    cache.insert(key(content="D"), prefix())
    assert [cache.lookup(key(content=c))[0] for c in "ABCD"] == ["hit", "miss", "hit", "hit"]
    cache.insert(key(content="big"), prefix(2 * COST))
    assert cache.snapshot()["bytes"] <= 3 * COST
    assert cache.snapshot()["entries"] == 1
    assert cache.evictions == 1 + 3


def test_e1_what_exceeds_the_bound_alone_is_not_kept() -> None:
    cache = PrefixCache(COST)
    cache.insert(key(content="A"), prefix())
    cache.insert(key(content="B"), prefix(101))
    assert cache.lookup(key(content="A"))[0] == "hit"
    assert cache.lookup(key(content="B"))[0] == "miss"


def test_e1_replacing_an_entry_counts_it_once() -> None:
    cache = PrefixCache(10 * COST)
    cache.insert(key(), prefix())
    cache.insert(key(), prefix(50))
    assert (cache.snapshot()["entries"], cache.snapshot()["bytes"]) == (1, 50 + ENTRY_OVERHEAD)


def test_e1_tiny_entries_are_bounded_too() -> None:
    cache = PrefixCache(10 * COST)
    for i in range(100):
        cache.insert(key(content=str(i)), prefix(0))
    assert cache.snapshot()["entries"] <= 10 * COST // ENTRY_OVERHEAD


def test_e1_reuse_across_pictures_is_bounded_and_reported() -> None:
    cache = PrefixCache(10 * COST, max_age_chunks=2)
    kept = prefix()
    cache.insert(key(content="A"), kept)
    assert [cache.lookup(key(content=c))[0] for c in "BCD"] == ["hit_stale", "hit_stale", "miss"]
    assert cache.lookup(key(content="A")) == ("hit", kept)  # the picture it was made from is never stale
    cache.insert(key(content="D"), prefix())
    assert cache.lookup(key(content="E"))[0] == "hit_stale"
    assert (cache.hits, cache.stale_hits, cache.misses) == (1, 3, 1)


def test_e1_stale_reuse_ends_with_the_entry() -> None:
    cache = PrefixCache(COST, max_age_chunks=5)
    cache.insert(key(content="A"), prefix())
    cache.insert(key(episode="f"), prefix())
    assert cache.lookup(key(content="B"))[0] == "miss"


def test_e1_forgetting_an_episode() -> None:
    cache = PrefixCache(10 * COST)
    for episode in ("e", "f"):
        cache.insert(key(episode=episode), prefix())
    cache.forget("prod", "e")
    assert [cache.lookup(key(episode=e))[0] for e in "ef"] == ["miss", "hit"]
    assert cache.snapshot()["bytes"] == COST


def test_e1_digest_sees_shape_type_and_content() -> None:
    zeros = np.zeros((2, 3), np.uint8)
    others = [zeros.reshape(3, 2), zeros.astype(np.int8), zeros + 1, np.zeros((2, 4), np.uint8)]
    assert len({digest(a) for a in [zeros, *others]}) == 5
    assert digest(zeros[:, ::-1]) == digest(zeros)
    assert digest(zeros, zeros) != digest(zeros)


def test_e1_lookups_and_inserts_from_two_threads_keep_the_books() -> None:
    cache = PrefixCache(5 * COST, max_age_chunks=1)
    rounds = 3000

    def insert() -> None:
        for i in range(rounds):
            cache.insert(key(episode=str(i % 3), content=str(i % 20)), prefix())

    thread = threading.Thread(target=insert)
    thread.start()
    for i in range(rounds):
        use, found = cache.lookup(key(episode=str(i % 3), content=str(i % 20)))
        assert (found is None) == (use == "miss")
    thread.join()
    books = cache.snapshot()
    assert books["bytes"] == books["entries"] * COST <= 5 * COST
    assert books["hits"] + books["stale_hits"] + books["misses"] == rounds


# -- in the policy ----------------------------------------------------------------------------------------------------


def test_e1_the_policy_reports_hit_and_miss(root: Path) -> None:
    policy = decomposed(root)
    bench = Bench(policy)
    uses = [bench.answer(asked(policy, i)).cache for i in (0, 0, 1, 0)]
    assert uses == ["miss", "hit", "miss", "hit"]


def test_e1_a_new_picture_is_always_looked_at(root: Path) -> None:
    policy = decomposed(root)
    bench = Bench(policy)
    bench.answer(asked(policy, 0))
    other = asked(policy, 0, images={"image": picture(99)})
    assert other.stage == PREFIX
    assert bench.answer(other).cache == "miss"


def test_e1_a_new_instruction_is_always_read(root: Path) -> None:
    policy = decomposed(root)
    Bench(policy).answer(asked(policy, 0, instruction="close the gate"))
    assert asked(policy, 0, instruction="close the gate").stage == DENOISE
    # Both are unknown words to the tokenizer, hence the same ids: the text itself is in the key.
    assert asked(policy, 0, instruction="close the fence").stage == PREFIX


def test_e1_stale_reuse_in_the_policy(root: Path) -> None:
    policy = decomposed(root, max_age_chunks=1)
    bench = Bench(policy)
    uses = [bench.answer(asked(policy, 0, images={"image": picture(n)})).cache for n in (1, 2, 3)]
    assert uses == ["miss", "hit_stale", "miss"]


def test_e1_the_bounds_reach_the_cache(root: Path) -> None:
    policy = load_policy(root, "b", cache_bytes=5000, max_age_chunks=3)
    assert isinstance(policy, DecomposedPolicy)
    assert policy.cache is not None
    assert (policy.cache.max_bytes, policy.cache.max_age_chunks) == (5000, 3)
    key = asked(policy, 0).payload.prefix_key
    assert (key.slot, key.episode) == ("b", "episode-0")


def test_e1_without_an_episode_nothing_is_shared(root: Path) -> None:
    policy = decomposed(root)
    bench = Bench(policy)
    for episode in (None, ""):
        assert [bench.answer(asked(policy, 0, episode_id=episode)).cache for _ in range(2)] == ["off", "off"]
    assert policy.cache is not None
    assert policy.cache.snapshot()["entries"] == 0


def test_e1_a_cache_of_no_bytes_is_off(root: Path) -> None:
    policy = decomposed(root, cache_bytes=0)
    bench = Bench(policy)
    assert [bench.answer(asked(policy, 0)).cache for _ in range(2)] == ["off", "off"]


def test_e1_a_claimed_entry_survives_its_eviction(root: Path) -> None:
    policy = decomposed(root)
    bench = Bench(policy)
    fresh = bench.answer(asked(policy, 0))
    claimed = bench.submit(asked(policy, 0))
    assert claimed.stage == DENOISE
    assert policy.cache is not None
    policy.cache.forget("prod", "episode-0")
    assert policy.cache.snapshot()["entries"] == 0
    bench.drain()
    assert value(claimed).cache == "hit"
    assert np.array_equal(value(claimed).actions, fresh.actions)


def test_e1_entries_do_not_keep_their_whole_batch_in_memory(root: Path) -> None:
    policy = decomposed(root)
    bench = Bench(policy)
    for i in range(3):
        bench.submit(asked(policy, i))
    bench.drain()
    request = asked(policy, 1)
    for tensor in request.payload.prefix.tensors.values():
        assert tensor.base is None


def test_e1_state_read_by_the_prefix_is_part_of_the_content(tmp_path: Path) -> None:
    from onnx import helper

    from robots.tiny import write_graph

    def change(settings: dict[str, Any]) -> None:
        settings["decomposed"] |= {"expert_takes_state": False, "past_kv_tensor_names": ["values"]}

    root = write_export(tmp_path, "decomposed", change)
    see = [
        helper.make_node("Cast", ["rgb"], ["pixels"], to=1),
        helper.make_node("ReduceMean", ["pixels"], ["grey"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("Cast", ["ids"], ["numbers"], to=1),
        helper.make_node("ReduceSum", ["numbers", "one"], ["words"], keepdims=0),
        helper.make_node("ReduceSum", ["pose", "one"], ["place"], keepdims=0),
        helper.make_node("Add", ["grey", "words"], ["a"]),
        helper.make_node("Add", ["a", "place"], ["b"]),
        helper.make_node("Unsqueeze", ["b", "one"], ["narrow"]),
        helper.make_node("Mul", ["narrow", "value_weights"], ["values"]),
    ]
    write_graph(root / "vlm_prefix.onnx", see, ["rgb", "ids", "pose"], ["values"])
    step = [
        helper.make_node("ReduceSum", ["values", "one"], ["v"], keepdims=0),
        helper.make_node("Add", ["v", "t"], ["vt"]),
        helper.make_node("Unsqueeze", ["vt", "one_two"], ["term"]),
        helper.make_node("Add", ["x", "term"], ["chunk"]),
    ]
    write_graph(root / "expert_denoise.onnx", step, ["x", "t", "values"], ["chunk"])
    policy = load_policy(root)
    assert policy.spec.prefix_takes_state
    bench = Bench(policy)
    bench.answer(asked(policy, 0))
    assert asked(policy, 0).stage == DENOISE
    assert asked(policy, 0, state=[0.5, 0.5]).stage == PREFIX
