"""The processor of tokens: flattens a batch to one step of the model, runs and samples it, and makes each outcome.

`LLMProcessor` has all that a driver needs to generate tokens: the group of its requests, the requests, and the code
that runs a batch. A server runs it under the asyncio driver; `LLMEngine` runs it in the caller's thread.

A step is a transaction. The scheduler reserves blocks before it grants units. The processor changes a sequence only
after the forward pass returned, each sequence separately. Then the scheduler publishes the computed blocks. A request
that fails or is cancelled in between leaves no trace in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from reflex_runtime.core.batch import (
    Batch,
    BatchScheduled,
    Done,
    Event,
    Failed,
    More,
    Outcome,
    RequestPreempted,
    RequestProgressed,
    RequestSettled,
)
from reflex_runtime.core.cost import TokenCost
from reflex_runtime.core.errors import ConfigError, ProcessorError, ReflexError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import PRIORITIES, Request, Ticket
from reflex_runtime.core.token_budget import TimedTokens
from reflex_runtime.ipc.messages import GenerateParams, SamplingParams, ScoredToken, TokenOutput
from reflex_runtime.llm.engine.blocks import BlockPool
from reflex_runtime.llm.engine.logits_processors import Constraints, Matcher
from reflex_runtime.llm.engine.ngram_proposer import Rates
from reflex_runtime.llm.engine.sampler import Logits, explain, sample
from reflex_runtime.llm.engine.sequence import Limits, Sequence
from reflex_runtime.llm.engine.tokenizer import Tokenizer
from reflex_runtime.llm.runners.runner import Runner, Step
from reflex_runtime.observe.metrics import ENGINE, SeriesSet
from reflex_runtime.run.processor import BaseProcessor
from reflex_runtime.settings.declare import option, validate

Lane = tuple[Sequence, int, int]  # see "lanes" below
Written = TokenOutput | ProcessorError
Scored = dict[Sequence, list[ScoredToken]]

SCORED_BYTES = 64 << 20  # most logits of scored prompts in one call of the model
GUESSED_BYTES = 64 << 20  # most logits of guessed tokens in a step: each has a row as long as the vocabulary
_PLAIN = GenerateParams()
_numbers = count()  # of requests: unique in the process


def next_id() -> str:
    """A name for a request, unique in the process."""
    return f"req-{next(_numbers)}"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How steps are formed. Raises ConfigError that names the field, its value and its range.

    max_num_batched_tokens: most tokens in a step, prompts and outputs together; it bounds the memory of a step.
    max_gap_ms: longest gap between two tokens of a sequence; prompts get the time that is left (`TimedTokens`).
        0 is 100 ms, or eight times what a step costs without tokens, up to 2 s; None bounds steps by tokens alone.
    speculate: "ngram" guesses the next tokens from earlier ones, and computes the guesses if that saves time; outputs
        are the same (`ngram_proposer.py`). "off" does not.
    max_num_seqs: most sequences that generate at the same time.
    long_prefill_token_threshold: most tokens of one sequence in a step; 0 is no limit of its own.
    enable_prefix_caching: the common beginning of prompts is computed once.
    max_queue, max_queued_tokens: most waiting requests, and most of their tokens; further requests are refused at once.
    """

    max_num_batched_tokens: int = option(2048, within=(1, 1 << 20))
    max_gap_ms: float | None = option(None, within=(0, 60_000))
    speculate: str = option("off", choices=("off", "ngram"))
    max_num_seqs: int = option(256, within=(1, 1 << 16))
    long_prefill_token_threshold: int = option(0, within=(0, 1 << 20))
    enable_prefix_caching: bool = True
    max_queue: int = option(1000, within=(1, 1_000_000))
    max_queued_tokens: int = option(1_000_000, within=(1, 1 << 40))

    def __post_init__(self) -> None:
        validate(self, "EngineConfig")


class LLMProcessor(BaseProcessor):
    """Generates tokens. `group` is for the scheduler, `request` makes requests, the driver calls the rest.

    `stop` closes the runner, too. pool: the blocks of the runner's cache.
    """

    repeatable = True
    name = "default"  # of its group

    def __init__(self, runner: Runner, tokenizer: Tokenizer, config: EngineConfig | None = None) -> None:
        self.runner, self.tokenizer, self.config = runner, tokenizer, config or EngineConfig()
        self.pool = BlockPool(runner.num_blocks, runner.block_size, self.config.enable_prefix_caching)
        self.limits = Limits(runner.vocab_size, runner.max_model_len, runner.num_blocks, runner.block_size)
        self.constraints = Constraints(tokenizer.vocabulary)
        self.rates = Rates()
        self.drafted = self.accepted = 0  # guessed tokens that steps computed, and those of them that were right
        self._beside = ThreadPoolExecutor(1, "reflex-constraints")  # its thread starts with the first one

    @property
    def group(self) -> GroupConfig:
        """The group of its requests: tokens as units, blocks as memory, a batch whenever the device is free."""
        config = self.config
        threshold, gap = config.long_prefill_token_threshold or inf, config.max_gap_ms
        if gap is None and config.speculate != "off":
            gap = inf  # bounds nothing, but `TimedTokens` learns how long steps take
        guessed = float(max(1, GUESSED_BYTES // (4 * self.runner.vocab_size)))
        by_time = partial(TimedTokens, threshold, gap / 1e3 if gap else None, guessed)
        return GroupConfig(
            name=self.name,
            flush=FlushPolicy.every_step(config.max_num_batched_tokens, config.max_num_seqs),
            cost=partial(TokenCost, threshold) if gap is None else by_time,
            capacity=config.max_queue,
            max_queued_units=float(config.max_queued_tokens),
            resources=self.pool,
        )

    def request(
        self,
        prompt: str | Seq[int],
        params: SamplingParams,
        matcher: Matcher | None = None,
    ) -> Request:
        """A request for this processor. params: `GenerateParams` also set client, priority, limits. matcher: of its
        constraint, if that is already compiled; it is copied, so that several requests may share it.

        Raises TooLarge, with the limit, for a request that can never run; ConfigError for a wrong prompt or parameter.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        asked = params if isinstance(params, GenerateParams) else _PLAIN
        self.limits.check(ids, params.max_tokens - asked.prompt_only)
        self.limits.check_sampling(params)
        if params.constraint is not None:
            matcher = self.constraints.compile(params.constraint) if matcher is None else matcher.copy()
        tokenizer, rates = self.tokenizer, self.rates if self.config.speculate != "off" else None
        sequence = Sequence(ids, params, tokenizer, tokenizer.eos_token_ids, matcher, rates)
        sequence.traceparent = asked.traceparent
        sequence.adapter = self._number_of(asked.adapter)
        if asked.prompt_logprobs is not None:
            sequence.score(asked.prompt_logprobs)
        return Request(
            sequence,
            id=asked.request_id or asked.stream_id or next_id(),
            group=self.name,
            client=asked.client,
            priority=PRIORITIES[asked.priority],
            time_limit=None if asked.timeout_ms is None else asked.timeout_ms / 1e3,
            wants=float(len(ids)),
            streams=True,
            max_gap=None if asked.max_gap_ms is None else asked.max_gap_ms / 1e3,
        )

    def _number_of(self, adapter: str) -> int:
        if not adapter:
            return 0
        if adapter not in self.runner.adapters:
            there = ", ".join(self.runner.adapters) or "none"
            raise ConfigError(f"adapter={adapter!r}: no such adapter is loaded; there is {there}")
        return self.runner.adapters.index(adapter) + 1

    def run(self, batch: Batch) -> list[Outcome]:
        """One step of every sequence in the batch. Notes the number of blocks in use, for the trace."""
        held = self.pool.num_blocks - self.pool.free_blocks
        batch.notes |= {"blocks_used": held, "num_blocks": self.pool.num_blocks}
        lanes = [
            (sequence := ticket.request.payload, sequence.num_computed_tokens, int(units))
            for ticket, units in batch.grants.items()
        ]
        scored: Scored = {}
        scores = any(sequence.scores_from is not None for sequence, _, _ in lanes)
        last = self._scored_before(lanes, scored) if scores else lanes
        ends = [sequence for sequence, past, n in last if past + n >= sequence.num_tokens]
        matchers = [sequence.shaping.matcher for sequence in ends if sequence.shaping and sequence.shaping.matcher]
        prepared = self._beside.submit(lambda: [matcher.prepare() for matcher in matchers]) if matchers else None
        logits = self.runner.forward(flatten(last))
        if prepared is not None:
            prepared.result()
        if scores:
            score(last, logits, scored)
        written = self._write(last, logits)
        for sequence, found in scored.items():
            sequence.scored(found)
        return [_outcome(sequence, n, written.get(sequence, ())) for sequence, _, n in lanes]

    def _scored_before(self, lanes: Seq[Lane], scored: Scored) -> list[Lane]:
        """Score the beginnings of long prompts in calls of their own, so that no call has too many rows of logits;
        returns what is left of each lane. scored: gets the scored tokens."""
        most = max(1, SCORED_BYTES // (4 * self.runner.vocab_size))
        kept, left = max(1, most // sum(s.scores_from is not None for s, _, _ in lanes)), list[Lane]()
        for sequence, past, n in lanes:
            while sequence.scores_from is not None and num_rows(sequence, past, n) > kept:
                piece = [(sequence, past, min(n - kept, n - num_rows(sequence, past, n) + most))]
                score(piece, self.runner.forward(flatten(piece)), scored)
                past, n = past + piece[0][2], n - piece[0][2]
            left.append((sequence, past, n))
        return left

    def _write(self, lanes: Seq[Lane], logits: Logits) -> dict[Sequence, list[Written]]:
        """Sample the next tokens of each sequence whose known tokens are all computed. Each token is sampled as without
        guesses; if it equals the guess, the next row has the logits after it, and one more is sampled."""
        going: list[tuple[Sequence, int, int]] = []  # the row of its last known token, and how many guesses follow
        end = 0
        for sequence, past, n in lanes:
            end += num_rows(sequence, past, n)
            guesses = past + n - len(sequence.tokens)
            if guesses >= 0:
                going.append((sequence, end - 1 - guesses, guesses))
                self.drafted += guesses
        written: dict[Sequence, list[Written]] = {sequence: [] for sequence, _, _ in going}
        place, best = 0, logits.argmax(axis=1)
        while going:
            outputs = _sampled([one[0] for one in going], logits, [one[1] + place for one in going], best)
            right = []
            for one, output in zip(going, outputs, strict=True):
                sequence, _, guesses = one
                written[sequence].append(output)
                if place == guesses or isinstance(output, ProcessorError) or output.finish is not None:
                    continue
                if output.token_id == sequence.draft[place]:
                    self.accepted += 1
                    right.append(one)
            going = right
            place += 1
        return written

    def stop(self) -> None:
        self._beside.shutdown()
        self.runner.close()


def _sampled(
    sequences: Seq[Sequence], logits: Logits, rows: Seq[int], best: npt.NDArray[np.intp]
) -> list[Written]:
    """Append the next token of each sequence, sampled from its row; or return its error. best: see `sample`."""
    written: list[Written] = []
    for sequence, choice in zip(sequences, sample(logits, sequences, rows, best), strict=True):
        if isinstance(choice, ProcessorError):
            written.append(choice)
            continue
        try:
            written.append(sequence.append(choice))
        except ProcessorError as error:
            written.append(error)
        except Exception as error:  # this token cannot be decoded to text; the other sequences go on
            written.append(ProcessorError(f"token {choice.token_id} cannot be decoded: {error}"))
    return written


def _outcome(sequence: Sequence, n: int, written: Seq[Written]) -> Outcome:
    """The outcome of the step for one sequence. written: its new tokens, the last of which may be an error; empty if
    only a chunk of its prompt was computed."""
    if sequence.cached_tokens is None:
        sequence.cached_tokens = sequence.num_computed_tokens
    if not written:
        sequence.computed(n)
        return More(None, float(sequence.num_tokens - sequence.num_computed_tokens))
    last, earlier = written[-1], tuple(written[:-1])
    if isinstance(last, ProcessorError):
        return Failed(last, earlier)
    right = len(sequence.tokens) - 1 - sequence.num_computed_tokens  # all but the last token are computed
    sequence.num_computed_tokens += right
    if last.finish is not None:
        return Done(last, earlier, float(n - right))
    if sequence.lookup is None:
        return More(last)
    return More(last, 1.0, None, earlier, float(n - right), sequence.guess())


# -- lanes -------------------------------------------------------------------------------------------------------------
#
# A lane is a sequence, how many of its tokens are in the cache, and how many more a call computes: known tokens, and
# after them those of its draft. It has a row of logits for its last known token, if the call computes that, and for
# each token of the draft; if its prompt is scored (`Sequence.scores_from`), for each token of the prompt, too.


def flatten(lanes: Seq[Lane]) -> Step:
    """The next `n` tokens of each lane, one lane after the other, as the input of a runner."""
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    begins, blocks, block_begins = [0], [], [0]  # type: tuple[list[int], list[int], list[int]]
    adapters = [sequence.adapter for sequence, _, _ in lanes]
    for sequence, past, n in lanes:
        if n == 1:
            ids.append(sequence.tokens[past])
            positions.append(past)
        else:
            ids += sequence.tokens[past : past + n]
            ids += sequence.draft[: max(0, past + n - sequence.num_tokens)]
            positions += range(past, past + n)
        end = len(ids)
        begins.append(end)
        rows += range(end - num_rows(sequence, past, n), end)
        blocks += sequence.blocks
        block_begins.append(len(blocks))
    return Step(
        np.array(ids, np.int64),
        np.array(positions, np.int64),
        np.array([past for _, past, _ in lanes], np.int32),
        np.array(begins, np.int32),
        np.array(blocks, np.int32),
        np.array(block_begins, np.int32),
        np.array(rows or [0], np.int64),  # a runner computes at least one row
        np.array(adapters, np.int32) if any(adapters) else None,
    )


def num_rows(sequence: Sequence, past: int, n: int) -> int:
    """Rows of logits of a lane: those of its last tokens."""
    first, end = len(sequence.tokens) - 1, past + n
    if sequence.scores_from is not None:
        first = min(first, sequence.scores_from)
    return 0 if end <= first else end - (past if past > first else first)


def score(lanes: Seq[Lane], logits: Logits, scored: Scored) -> None:
    """Add the prompt tokens that a call scored to `scored`. logits: the call's rows."""
    begin = 0
    for sequence, past, n in lanes:
        count = num_rows(sequence, past, n)
        if sequence.scores_from is not None and count:
            first = past + n - count + 1  # a row predicts the token at the next position
            tokens = sequence.tokens[first : min(first + count, sequence.num_prompt_tokens)]
            rows = logits[begin : begin + len(tokens)]
            found = [explain(*each, sequence.alternatives) for each in zip(rows, tokens, strict=True)]
            scored.setdefault(sequence, []).extend(found)
        begin += count


# -- its series --------------------------------------------------------------------------------------------------------


SHORT_OF = ("budget", "places", "memory", "share", "room")
INVARIANTS = ("budget", "conservation", "blocks")


_OF_TICKETS = (RequestPreempted, RequestProgressed, RequestSettled)


@dataclass(slots=True)
class _Lane:
    """The state of a request from its first step on. known: number of its tokens. last: time of the latest output
    token, None before the first. running: whether it holds a place in the batch."""

    known: int
    last: float | None = None
    running: bool = True


class EngineSeries:
    """A sink that updates the series of one engine in `registry`.

    waiting: returns the number of waiting requests; called at each scrape.
    """

    events = frozenset({BatchScheduled, *_OF_TICKETS})

    def __init__(self, processor: LLMProcessor, waiting: Callable[[], int], registry: CollectorRegistry) -> None:
        self._config, self._group = processor.config, processor.name
        self._processor = processor
        self._lanes: dict[Ticket, _Lane] = {}
        self._running = 0
        self._short_of = ""
        of = SeriesSet(ENGINE, registry)
        of.gauge("reflex_num_requests_waiting").set_function(waiting)
        for reason in SHORT_OF:
            why = of.gauge("reflex_num_requests_waiting_by_reason", reason)
            why.set_function(partial(self._waits_for, reason, waiting))
        of.gauge("reflex_num_requests_running").set_function(lambda: self._running)
        of.gauge("reflex_kv_cache_usage_perc").set_function(lambda: processor.pool.usage)
        self._preemptions = of.counter("reflex_num_preemptions_total")
        self._asked = of.counter("reflex_prefix_cache_queries_total")
        self._hits = of.counter("reflex_prefix_cache_hits_total")
        self._drafted = of.counter("reflex_spec_decode_num_draft_tokens_total")
        self._accepted = of.counter("reflex_spec_decode_num_accepted_tokens_total")
        self._prompts = of.counter("reflex_prompt_tokens_total")
        self._outputs = of.counter("reflex_generation_tokens_total")
        self._ends = partial(of.counter, "reflex_request_success_total")
        self._violations = {name: of.counter("reflex_invariant_violations_total", name) for name in INVARIANTS}
        self._tokens = of.histogram("reflex_iteration_tokens_total")
        self._first = of.histogram("reflex_time_to_first_token_seconds")
        self._gap = of.histogram("reflex_inter_token_latency_seconds")
        self._queue = of.histogram("reflex_request_queue_time_seconds")
        self._e2e = of.histogram("reflex_e2e_request_latency_seconds")

    def __call__(self, event: Event) -> None:
        if isinstance(event, BatchScheduled):
            if event.batch.group == self._group:
                self._scheduled(event)
        elif not isinstance(event, _OF_TICKETS) or event.ticket.request.group != self._group:
            return  # a request of another group
        elif isinstance(event, RequestProgressed):
            if event.value is not None:
                self._token(self._lanes[event.ticket], event.ticket, event.at)
        elif isinstance(event, RequestSettled):
            self._settled(event.ticket, event.at)
        else:
            self._preemptions.inc()
            self._lanes[event.ticket].running = False
            self._running -= 1

    def _waits_for(self, reason: str, waiting: Callable[[], int]) -> float:
        return float(waiting()) if reason == self._short_of else 0.0

    def _scheduled(self, event: BatchScheduled) -> None:
        batch = event.batch
        self._guessed()
        self._short_of = batch.short_of
        tokens = sum(batch.grants.values())
        self._tokens.observe(tokens)
        self._violations["budget"].inc(tokens > self._config.max_num_batched_tokens)
        for ticket in batch.admitted:
            lane = self._lanes.get(ticket)
            if lane is None:
                lane = self._lanes[ticket] = _Lane(ticket.request.payload.num_prompt_tokens)
                self._queue.observe(event.at - ticket.arrived)
            lane.running = True
            self._running += 1
            self._asked.inc(lane.known)
            self._hits.inc(batch.cached.get(ticket, 0.0))

    def _token(self, lane: _Lane, ticket: Ticket, now: float) -> None:
        if lane.last is None:
            self._first.observe(now - ticket.arrived)
            self._prompts.inc(ticket.request.payload.num_prompt_tokens)
        else:
            self._gap.observe(now - lane.last)
        lane.last = now
        lane.known += 1
        self._outputs.inc()

    def _guessed(self) -> None:
        self._drafted.value, self._accepted.value = float(self._processor.drafted), float(self._processor.accepted)

    def _settled(self, ticket: Ticket, now: float) -> None:
        self._guessed()
        lane = self._lanes.pop(ticket, None)
        if lane is not None:
            self._running -= lane.running
        outcome = ticket.outcome
        if not isinstance(outcome, Done):
            error = outcome.error
            self._ends(error.code if isinstance(error, ReflexError) else "failed").inc()
            return
        if lane is not None:
            self._token(lane, ticket, now)
        self._ends(outcome.value.finish).inc()
        self._e2e.observe(now - ticket.arrived)
        for name, holds in invariants(ticket).items():
            self._violations[name].inc(not holds)


def invariants(ticket: Ticket) -> dict[str, bool]:
    """Whether an answered request was granted exactly the tokens that it needed, and its blocks were released."""
    sequence: Sequence = ticket.request.payload
    needed = sequence.num_prompt_tokens + sequence.num_output_tokens - 1
    return {
        "conservation": ticket.granted - ticket.recomputed - ticket.unused == needed - ticket.cached,
        "blocks": not sequence.blocks,
    }
