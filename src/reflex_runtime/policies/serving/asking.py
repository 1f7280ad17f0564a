"""The way of a request through the served policies, the same on every wire.

A wire makes an `Ask` when a request begins to come, and calls

    enter   at once: whether the request may enter
    ask     with the `Question` it has read: version, place in the queue, pictures decoded, batch, answer
    take    the two at once, where all of the request comes at once
    fail    instead of `ask`, where the request cannot be read
    leave   when the caller has gone

and `Ask.settle` is called once, with the answer or the error (`Ends`). Admission, versions, deadlines and the queue are
here for all of them. Nothing is a coroutine: a task costs more than all of the scheduling.

What comes in one turn of the loop is queued together, and what settles together is answered together, each step for all
of them before the next step: its code and data are then in the processor's caches, which saves a third of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from reflex_runtime.core.errors import Closed, Expired, ReflexError
from reflex_runtime.core.request import Request
from reflex_runtime.placing import identity_of
from reflex_runtime.policies import Observation
from reflex_runtime.policies.serving.ask import Ask
from reflex_runtime.policies.serving.ends import Ends
from reflex_runtime.policies.serving.images import check_names, job_of, observe
from reflex_runtime.policies.serving.preparing import SHARES, Job
from reflex_runtime.policies.serving.question import Question
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.serving.served import ServedPolicy
from reflex_runtime.policies.serving.spans import begin_span, join_span
from reflex_runtime.policies.wires.observations import Reading, Readings
from reflex_runtime.settings.declare import did_you_mean
from reflex_runtime.web.errors import CallerLeft, TooManyRequests, known
from reflex_runtime.web.fields import invalid
from reflex_runtime.web.json import printable


class Asking:
    """Takes requests for one policy of a server, or for the one that each request names.

    config: of the server; `served` has its own. prefix: of the paths that ask this policy, "" where no path names one.
    """

    def __init__(self, runtime: PolicyRuntime, policy: str | None = None, prefix: str = "") -> None:
        """policy: the one that is asked, whatever a request says; None for the default where a request says nothing."""
        self.runtime, self.config, self.prefix = runtime, runtime.config, prefix
        self._fixed = policy is not None
        self._served = runtime.default if policy is None else runtime.policies[policy]
        self._named: dict[tuple[str, bool], Asking] = {}  # others, by policy and whether they are fixed to it
        self._readings: dict[str, Readings] = {}
        self._came: list[tuple[Ask, Question]] = []  # in this turn of the loop
        self._ends = Ends(runtime, self._served or runtime.first)

    @property
    def served(self) -> ServedPolicy:
        """The policy that is asked; 422 where there are several, and none is named."""
        if self._served is None:
            names = ", ".join(self.runtime.policies)
            path = f"/policies/{next(iter(self.runtime.policies))}/act"
            raise invalid("policy", f"policy: missing, and several are served: {names}; name one, or ask {path}")
        return self._served

    @property
    def unnamed(self) -> bool:
        """Whether a request must name its policy."""
        return self._served is None

    def of(self, name: str | None) -> Asking:
        """What takes requests for the policy of this name; itself where there is none. 422 for a wrong one."""
        return self if name is None else self._at(name, self._fixed)

    def one(self, name: str | None) -> Asking:
        """The same for a robot that asks one policy from now on: what its requests name is checked against it."""
        return self._at(self.served.name if name is None else name, True)

    def _at(self, name: str, fixed: bool) -> Asking:
        if self._fixed:
            if name != self.served.name:
                wrong = f"policy: {name[:100]!r} is named, and {self.served.name!r} by the path or the connection"
                raise invalid("policy", printable(wrong))
            return self
        if name not in self.runtime.policies:
            names = ", ".join(self.runtime.policies)
            near = did_you_mean(name[:100], self.runtime.policies)
            wrong = f"policy: {name[:100]!r} is not served, only {names}{near}"
            raise invalid("policy", printable(wrong))
        found = self._named.get((name, fixed))
        if found is None:
            found = self._named[name, fixed] = Asking(self.runtime, name)
            found._fixed = fixed
        return found

    def reading(self, wire: str) -> Reading:
        """Reads the wire's observations for what the policy's slots have now."""
        return self.readings(wire).now

    def readings(self, wire: str) -> Readings:
        """The same for whatever they will have."""
        found = self._readings.get(wire)
        if found is None:
            found = self._readings[wire] = Readings(self.served, wire)
        return found

    def enter(self, ask: Ask) -> bool:
        """The request begins to come. Whether it may enter; otherwise it is settled."""
        ask.entered = True
        self.runtime.active += 1
        if self.runtime.spans is not None:
            begin_span(self.runtime.spans, ask)
        try:
            self._check_open()
        except ReflexError as error:
            self._ends.fail(ask, error)
        return not ask.ended

    def ask(self, ask: Ask, question: Question, received: float | None = None) -> None:
        """The request has been read: place, prepare and queue it, with all others that come in this turn of the loop.

        received: when its last byte was read, else now.
        """
        if ask.ended:
            return
        ask.received = time.monotonic() if received is None else received
        ask.question = question
        if question.request_id:
            ask.request_id = question.request_id
        if ask.hand_on is not None and self._elsewhere(ask, question):
            return
        try:
            asking = self if question.policy is None else self.of(question.policy)
            ask.served = asking.served
        except Exception as error:
            self._ends.fail(ask, error)
            return
        if not asking._came:
            self.runtime.batcher.soon(asking._queue)
        asking._came.append((ask, question))

    def _elsewhere(self, ask: Ask, question: Question) -> bool:
        """Whether another replica serves this caller, and has the request now."""
        home, hand_on = self.runtime.home, ask.hand_on
        ask.hand_on = None  # it has the body
        if home is None or hand_on is None:
            return False
        robot, episode = question.robot_id, question.episode_id
        identity = identity_of(robot, episode)
        if not identity or home.serves(identity, episode or "") or not hand_on(identity, episode or ""):
            return False
        self._ends.end(ask)
        return True

    def take(self, ask: Ask, read: Callable[[], Question], received: float | None = None) -> None:
        """Enter, read and ask at once, where all of the request has come. What `read` raises fails it."""
        if self.enter(ask):
            self.read(ask, read, received)

    def read(self, ask: Ask, read: Callable[[], Question], received: float | None = None) -> None:
        """Read and ask a request that has entered."""
        if ask.ended:
            return
        try:
            question = read()
        except Exception as error:
            self._ends.fail(ask, error)
        else:
            self.ask(ask, question, received)

    def leave(self, ask: Ask) -> None:
        """The caller has gone: take the request back."""
        self._ends.leave(ask)

    def fail(self, ask: Ask, failure: Exception) -> None:
        """Settle the request with an error, unless it is settled."""
        self._ends.fail(ask, failure)

    def _check_open(self) -> None:
        runtime, limit, others = self.runtime, self.config.max_concurrent, self.runtime.active - 1
        if limit and others >= limit:
            raise TooManyRequests(
                f"{others} requests are being answered, at most {limit} may be",
                retry_after=1.0,
                concurrent_requests=others,
                max_concurrent=limit,
            )
        runtime.need_policy()
        if runtime.state == "draining":
            raise Closed("the server is shutting down", retry_after=1.0)

    # -- queueing ------------------------------------------------------------------------------------------------------

    def _queue(self) -> None:
        """Submit what has come: ready to run, or with its pictures to be decoded once it is admitted."""
        came, self._came = self._came, []
        placed = [one for one in came if self._ends.attempt(self._place, *one)]
        made = [(one[0], request) for one in placed if (request := self._ends.attempt(self._prepare, *one)) is not None]
        for one in made:
            self._ends.attempt(self._submit, *one)

    def _place(self, ask: Ask, question: Question) -> bool:
        """Choose the version that answers. False if the request was answered before its turn came."""
        if ask.ended:
            return False
        served = self.served
        placement = ask.placement = served.place(question.episode_id, ask.request_id, ask.client, question.robot_id)
        version = ask.version = served.slots[placement.slot].version
        version.users += 1
        if question.images:
            check_names(question, served.cameras)
        return True

    def _prepare(self, ask: Ask, question: Question) -> Request:
        """What is submitted: the request, or a reservation where pictures are to be decoded."""
        assert ask.version is not None
        policy, priority = ask.version.policy, question.priority
        client = question.robot_id or question.episode_id or ask.client
        limit = _time_limit(ask, question, self.served.config.deadline_ms)
        if not question.images:
            observation = observe(policy, ask.request_id, question, ask.received)
            return policy.request(observation, client=client, priority=priority, time_limit=limit)
        done = partial(self._prepared, ask)
        job = job_of(policy, ask.request_id, question, ask.received, client, SHARES[priority], done)
        return policy.reservation(
            job, ask.request_id, question.episode_id or "", client=client, priority=priority, time_limit=limit
        )

    def _submit(self, ask: Ask, request: Request) -> None:
        if ask.left:  # perhaps since another row of its call failed in this turn
            raise CallerLeft("the caller left")
        job = request.payload if isinstance(request.payload, Job) else None
        ask.ticket = self.runtime.batcher.submit(request, partial(self._ends.settled, ask), ready=job is None)
        if job is not None:
            self.runtime.preparing.add(job)
        if ask.span is not None:
            join_span(self.runtime.spans, ask)

    def _prepared(self, ask: Ask, observation: Observation | None, error: Exception | None) -> None:
        ticket, version = ask.ticket, ask.version
        if ticket is None or version is None:  # it is settled
            return
        made: Request | ReflexError
        if observation is not None:
            admitted = ticket.request
            try:
                made = version.policy.request(observation, client=admitted.client, priority=admitted.priority)
            except Exception as failure:  # else it would wait for ever
                made = known(failure, ask.request_id)
            self.runtime.metrics.prepared(admitted.group, time.monotonic() - ticket.arrived)
        else:
            assert error is not None
            made = known(error, ask.request_id)
        self.runtime.batcher.prepared(ticket, made)

def _time_limit(ask: Ask, question: Question, default_ms: float) -> float | None:
    """Seconds that are left of its deadline, None without one. default_ms: of requests that bring none; 0 is none."""
    limit = default_ms if question.deadline_ms is None else question.deadline_ms
    if not limit:
        return None
    left = limit / 1e3 - (time.monotonic() - ask.started)
    if left <= 0.0:
        raise Expired("its deadline passed while it was read")
    return left
