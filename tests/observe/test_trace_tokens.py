"""Traces of tokens: what each member had computed and knew, who waited and why, and that a request's figures add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.core.batch import Event
from reflex_runtime.core.request import Priority
from reflex_runtime.llm import LLMEngine, SamplingParams
from reflex_runtime.observe.journal import BatchLine, Journal, Member, read_journal
from reflex_runtime.observe.journal_writer import JournalWriter
from reflex_runtime.observe.trace_tables import courses, is_decode, is_tokens, who_waited, why_waiting

L3 = {"A": "hello world", "B": "goodbye"}


class Run:
    """An engine on the toy whose events are kept, and reach the writer as late as a test likes."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.now = 0.0
        self.events: list[Event] = []
        self.engine = LLMEngine(**settings, sinks=[self.events.append], clock=lambda: self.now)
        self.writer = JournalWriter(path, [self.engine.processor.group], clock=lambda: 0.0)
        self.path = path

    def add(self, name: str, prompt: str, max_tokens: int = 4, **kw: Any) -> None:
        self.engine.add_request(prompt, SamplingParams.greedy(max_tokens, ignore_eos=True), request_id=name, **kw)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()
            self.now += 0.01

    def finish(self, lag: bool = False) -> Journal:
        while self.engine.unfinished:
            self.step()
            if not lag:
                self.deliver()
        self.deliver()
        assert self.writer.close()
        return read_journal(self.path)

    def deliver(self) -> None:
        for event in self.events:
            self.writer(event)
        self.events.clear()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    return lambda **settings: Run(tmp_path / "t.jsonl", **settings)


def l3(run: Callable[..., Run], **settings: Any) -> Run:
    made = run(**({"max_num_batched_tokens": 8} | settings))
    for name, prompt in L3.items():
        made.add(name, prompt)
    return made


def members(trace: Journal) -> list[dict[str, tuple[Any, ...]]]:
    return [{m.id: (m.computed, m.known, m.cached) for m in b.members} for b in trace.batches]


# -- the format --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [False, True])
def test_l10_members_say_what_was_computed_and_known_before_the_step(run: Callable[..., Run], lag: bool) -> None:
    """Also when the sink sees all events after the run, as one that lags behind does."""
    trace = l3(run).finish(lag)
    assert members(trace) == [
        {"A": (0, 11, None)},
        {"A": (8, 11, None), "B": (0, 7, None)},
        {"A": (11, 12, None), "B": (5, 7, None)},
        {"A": (12, 13, None), "B": (7, 8, None)},
        {"A": (13, 14, None), "B": (8, 9, None)},
        {"B": (9, 10, None)},
    ]
    assert [b.short_of for b in trace.batches] == ["budget", "", "", "", "", ""]
    assert why_waiting(trace.batches[0]) == "budget spent"
    assert [[is_decode(m) for m in b.members] for b in trace.batches] == [
        [False], [False, False], [True, False], [True, True], [True, True], [True]
    ]  # fmt: skip
    assert is_tokens(trace.batches)


def test_l10_what_the_prefix_cache_had_counts_as_computed(run: Callable[..., Run]) -> None:
    made = run()
    made.add("A", "p" * 64 + "aaaa", 1)
    made.step()
    made.add("B", "p" * 64 + "bbbb", 1)
    trace = made.finish()
    assert members(trace) == [{"A": (0, 68, None)}, {"B": (64, 68, 64)}]
    _, b = courses(trace.batches)
    assert (b.scheduled, b.cached, b.conserved) == (4, 64, True)
    raw = [json.loads(line) for line in made.path.read_text().splitlines()]
    assert "cached" not in raw[1]["members"][0]
    assert raw[2]["members"][0]["cached"] == 64
    assert raw[2]["short_of"] == ""


def test_l5_the_trace_of_a_preemption_adds_up(run: Callable[..., Run]) -> None:
    """A small cache: the newest is thrown out, knows what it had said, and computes it again."""
    made = run(block_size=4, num_blocks=8, enable_prefix_caching=False)
    made.add("A", "a" * 10, 10)
    made.add("B", "b" * 10, 10)
    trace = made.finish()
    [thrown] = [b for b in trace.batches if b.left]
    assert thrown.left == [1]
    back = next(m for b in trace.batches for m in b.members if m.id == "B" and b.id > thrown.id)
    said = sum(m.id == "B" for b in trace.batches if b.id < thrown.id for m in b.members)
    assert (back.state, back.computed, back.known, back.units) == ("waiting", 0, 10 + said, 10 + said)
    assert not is_decode(back)
    a, b = courses(trace.batches)
    assert (a.preemptions, b.preemptions) == (0, 1)
    assert b.recomputed == 10 + said - 1
    assert (a.outputs, b.outputs) == (10, 10)
    assert a.conserved
    assert b.conserved
    waiting = who_waited(trace.batches)
    while_away = [x for x in trace.batches if thrown.id <= x.id and all(m.id != "B" for m in x.members)]
    assert while_away
    assert all([(w.member.id, w.state) for w in waiting[x.id]] == [("B", "preempted")] for x in while_away)


def test_requests_that_ended_are_forgotten(run: Callable[..., Run]) -> None:
    made = l3(run)
    made.add("C", "never to run", 4)
    made.engine.abort("C")
    made.step()
    made.deliver()
    assert made.writer._progress._counts
    made.finish()
    assert not made.writer._progress._counts


def test_a_member_whose_beginning_was_not_seen_says_nothing(run: Callable[..., Run]) -> None:
    made = l3(run)
    made.step(2)
    made.events.clear()  # the sink was attached late
    trace = made.finish()
    assert members(trace)[0] == {"A": (None, None, None), "B": (None, None, None)}
    assert not is_tokens(trace.batches)


def test_what_is_none_is_not_written_and_read_as_unknown(run: Callable[..., Run]) -> None:
    made = l3(run)
    made.finish()
    lines = [json.loads(line) for line in made.path.read_text().splitlines()]
    for line in lines[1:-1]:
        for member in line["members"]:
            assert None not in member.values()
            for key in ("computed", "known"):
                del member[key]
    made.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = read_journal(made.path)
    assert members(read)[0] == {"A": (None, None, None)}
    assert [w.member.id for w in who_waited(read.batches)[1]] == ["B"]


@pytest.mark.parametrize(
    ("units", "computed", "known", "decode"),
    [
        (1, 11, 12, True),
        (1, 8, 9, False),  # the last token of a prompt in chunks of 8
        (1, 3, 14, False),  # a token of what is computed again after a preemption
        (2, 12, 14, False),
        (1, None, None, False),
    ],
)
def test_a_decode_computes_the_newest_token_and_no_other(
    units: float, computed: float | None, known: float | None, decode: bool
) -> None:
    asked = 9 if known == 9 else 11
    m = Member(0, "A", "", units, asked, "resident", 0.0, None, "more", computed, known)
    assert is_decode(m) is decode


# -- who waited --------------------------------------------------------------------------------------------------------


def waiting(trace: Journal) -> list[dict[str, str]]:
    found = who_waited(trace.batches)
    return [{w.member.id: w.state for w in found[b.id]} for b in trace.batches]


def test_l10_who_waited_follows_from_the_trace_alone(run: Callable[..., Run]) -> None:
    assert waiting(l3(run).finish()) == [{"B": "queued"}, {}, {}, {}, {}, {}]


def test_who_comes_later_does_not_wait_before(run: Callable[..., Run]) -> None:
    made = run(max_num_seqs=1)
    made.add("A", "a", 3)
    made.step(1)
    made.add("B", "b", 1)
    assert waiting(made.finish()) == [{}, {"B": "queued"}, {"B": "queued"}, {}]


def test_residents_that_are_granted_nothing_wait_too(run: Callable[..., Run]) -> None:
    made = run(max_num_batched_tokens=2)
    made.add("A", "a", 3)
    made.add("C", "a long one", 1)
    made.step()
    made.add("B", "b", 2, priority=Priority.URGENT)
    found = waiting(made.finish())
    assert found[:3] == [{}, {"C": "resident"}, {"C": "resident"}]


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"max_num_seqs": 1}, "no place (max_num_seqs)"), ({"num_blocks": 1}, "no blocks free")],
)
def test_why_they_waited_is_told_in_words(run: Callable[..., Run], settings: dict[str, int], why: str) -> None:
    made = run(**settings)
    made.add("A", "first", 2)
    made.add("B", "second", 2)
    trace = made.finish()
    assert [why_waiting(b) for b in trace.batches] == [why, why, "", ""]


def test_a_displaced_resident_is_told_as_preempted(run: Callable[..., Run]) -> None:
    made = run(max_num_seqs=1)
    made.add("slow", "background work", 6, priority=Priority.BACKGROUND)
    made.step(2)
    made.add("now", "urgent", 2, priority=Priority.URGENT)
    found = waiting(made.finish())
    assert {"slow": "preempted"} in found


def test_groups_wait_apart() -> None:
    def batch(number: int, group: str, *members: Member) -> BatchLine:
        return BatchLine(
            id=number, group=group, reason="timeout", cause="step", at=0.01 * number, finished=0.01 * number + 0.01,
            elapsed=0.01, expected=None, cost=1.0, unit="tokens", size=len(members), queued=0, members=list(members),
        )  # fmt: skip

    def member(seq: int, age: float) -> Member:
        return Member(seq, f"r{seq}", "", 1.0, 1.0, "waiting", age, None, "done", 0.0, 1.0)

    batches = [batch(1, "a", member(0, 0.0)), batch(2, "b", member(1, 0.01)), batch(3, "a", member(2, 0.02))]
    found = who_waited(batches)
    assert [[w.member.seq for w in found[i]] for i in (1, 2, 3)] == [[2], [], []]
    assert who_waited(batches, ids=(3,)) == {3: ()}


# -- how each went -----------------------------------------------------------------------------------------------------


def test_l4_every_request_adds_up_and_its_times_are_those_of_its_steps(run: Callable[..., Run]) -> None:
    a, b = courses(l3(run).finish().batches)
    assert (a.scheduled, a.outputs, a.first_step, a.ended) == (14, 4, 2, "done")
    assert (b.scheduled, b.outputs, b.first_step, b.ended) == (10, 4, 3, "done")
    assert a.conserved
    assert b.conserved
    assert a.first_token == pytest.approx(0.01)  # the clock of the test moves between steps, not in them
    assert a.gaps == pytest.approx([0.01] * 3)
    b.outputs += 1
    assert not b.conserved
