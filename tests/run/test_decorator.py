"""`@batched`: a function over a list that anybody calls with one item."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from math import inf, nan
from typing import Any

import pytest

from reflex_runtime.core.batch import BatchFinished, BatchScheduled, RequestQueued, RequestRejected, RequestSettled
from reflex_runtime.core.errors import (
    Closed,
    ConfigError,
    CutShort,
    Drained,
    Expired,
    ProcessorError,
    ProcessorHung,
    QueueFull,
    ResultCountMismatch,
    WaitTimeout,
)
from reflex_runtime.core.request import Priority
from reflex_runtime.run.batched import BatchedFunction, batched
from reflex_runtime.run.processor import FunctionProcessor
from run.helpers import PATIENCE, Log, run


class Slow:
    """A batched function that waits for a gate. calls: the items of every call."""

    def __init__(self, **options: Any) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.calls: list[list[Any]] = []

        @batched(**options)
        def double(items: list[int]) -> list[int]:
            """Twice each item."""
            self.calls.append(list(items))
            self.entered.set()
            assert self.gate.wait(PATIENCE)
            return [2 * item for item in items]

        self.double: BatchedFunction[int, int] = double
        self._asked = threading.Semaphore(0)
        submit = double._driver.device.submit

        def counted(*args: Any) -> Any:
            try:
                return submit(*args)
            finally:
                self._asked.release()

        double._driver.device.submit = counted  # type: ignore[method-assign]

    def asked(self, n: int) -> None:
        """Returns once n more items have been asked for."""
        for _ in range(n):
            assert self._asked.acquire(timeout=PATIENCE)

    def busy(self) -> None:
        assert self.entered.wait(PATIENCE)
        self.entered.clear()


def test_it_looks_like_the_function_it_wraps() -> None:
    slow = Slow()
    assert slow.double.__name__ == "double"  # type: ignore[attr-defined]
    assert slow.double.__doc__ == "Twice each item."


def test_a_call_blocks_and_returns_the_result_of_its_item() -> None:
    slow = Slow()
    slow.gate.set()
    assert slow.double(21) == 42
    assert slow.calls == [[21]]
    assert slow.double.close()


def test_threads_share_calls_and_each_gets_its_own_answer() -> None:
    slow = Slow(max_batch_size=16)
    with ThreadPoolExecutor(33) as pool:
        first = pool.submit(slow.double, 1000)
        slow.busy()
        rest = [pool.submit(slow.double, i) for i in range(32)]
        slow.asked(33)
        slow.gate.set()
        assert first.result() == 2000
        assert [f.result() for f in rest] == [2 * i for i in range(32)]
    assert [len(call) for call in slow.calls] == [1, 16, 16]
    assert slow.double.close()


def test_every_caller_of_a_very_large_call_is_answered() -> None:
    slow = Slow(max_batch_size=128)
    with ThreadPoolExecutor(129) as pool:
        first = pool.submit(slow.double, 1000)
        slow.busy()
        rest = [pool.submit(slow.double, i) for i in range(128)]
        slow.asked(129)
        slow.gate.set()
        late = wait([first, *rest], PATIENCE).not_done
        assert slow.double.close()  # answers whatever is left
        assert not late
        assert [f.result() for f in rest] == [2 * i for i in range(128)]
    assert [len(call) for call in slow.calls] == [1, 128]


def test_coroutines_share_calls_without_blocking_their_loop() -> None:
    slow = Slow()

    async def main() -> None:
        first = asyncio.create_task(slow.double.aio(1))
        await asyncio.to_thread(slow.busy)
        rest = [asyncio.create_task(slow.double.aio(i)) for i in range(2, 6)]
        await asyncio.sleep(0)
        assert not first.done()  # and the loop runs
        slow.gate.set()
        assert await asyncio.gather(first, *rest) == [2, 4, 6, 8, 10]

    run(main())
    assert slow.calls == [[1], [2, 3, 4, 5]]
    assert slow.double.close()


def test_one_bad_item_does_not_fail_its_neighbours() -> None:
    @batched()
    def invert(items: list[float]) -> list[float]:
        return [1 / item for item in items]

    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(invert, item) for item in (1.0, 2.0, 0.0, 4.0)]
        errors = [f.exception() for f in results]
    assert [f.result() for f, e in zip(results, errors, strict=True) if e is None] == [1.0, 0.5, 0.25]
    assert isinstance(errors[2], ProcessorError)
    assert isinstance(errors[2].__cause__, ZeroDivisionError)
    assert invert.close()


@pytest.mark.parametrize("raises", [False, True], ids=["no result", "the call fails"])
def test_an_item_without_a_result_is_let_go_at_once(raises: bool) -> None:
    """Not when cycles are collected."""

    class Item:
        pass

    @batched()
    def fails(items: list[Item]) -> list[ValueError]:
        if raises:
            raise ValueError
        return [ValueError()] * len(items)

    def ask(item: Item) -> None:
        with pytest.raises(ProcessorError):
            fails(item)

    item = Item()
    let_go = weakref.ref(item)
    gc.disable()
    try:
        ask(item)
        assert fails.close()
        del item
        assert let_go() is None
    finally:
        gc.enable()


def test_b19_a_wrong_number_of_results_is_a_clear_error() -> None:
    @batched()
    def lossy(items: list[int]) -> list[int]:
        return []

    with pytest.raises(ResultCountMismatch):
        lossy(1)
    assert lossy.close()


@pytest.mark.parametrize("death", [SystemExit, KeyboardInterrupt])
def test_b19_a_function_that_ends_its_thread_fails_the_item_alone(death: type[BaseException]) -> None:
    threads = set()

    @batched()
    def leaves(items: list[int]) -> list[int]:
        threads.add(threading.current_thread())
        if 1 in items:
            raise death
        return items

    for _ in range(3):
        with pytest.raises(ProcessorError, match=f"^{death.__name__}$") as caught:
            leaves(1)
        assert type(caught.value.__cause__) is death
        assert leaves(2) == 2
    assert len(threads) == 1
    assert leaves.close()


def test_a_timeout_of_the_function_is_not_a_timeout_of_the_caller() -> None:
    @batched()
    def remote(items: list[int]) -> list[int]:
        raise TimeoutError("upstream")

    with pytest.raises(ProcessorError, match="upstream"):
        remote(1, timeout=PATIENCE)
    assert remote.close()


def test_a_caller_that_stops_waiting_is_not_computed() -> None:
    slow = Slow()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(slow.double, 1)
        slow.busy()
        with pytest.raises(WaitTimeout):
            slow.double(2, timeout=0.010)
        slow.gate.set()
        assert first.result() == 2
    assert slow.double(3) == 6
    assert slow.calls == [[1], [3]]
    assert slow.double.close()


def test_b16_a_thread_interrupted_before_it_waits_holds_up_no_other() -> None:
    """Its answer is never waited for: the threads that are answered after it must not wait until it runs."""
    slow = Slow()
    driver = slow.double._driver
    admit = driver.admit

    def interrupted(*args: Any) -> Any:
        admit(*args)
        raise KeyboardInterrupt

    driver.admit = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        slow.double(1)
    driver.admit = admit  # type: ignore[method-assign]
    assert slow.entered.wait(PATIENCE)
    slow.gate.set()
    assert slow.double.close()
    assert driver.relay.woken is None


def test_b16_a_cancelled_coroutine_is_not_computed() -> None:
    slow = Slow()

    async def main() -> None:
        first = asyncio.create_task(slow.double.aio(1))
        await asyncio.to_thread(slow.busy)
        leaving = asyncio.create_task(slow.double.aio(2))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        slow.gate.set()
        assert await first == 2

    run(main())
    assert slow.double(3) == 6
    assert slow.calls == [[1], [3]]
    assert slow.double.close()


def test_beyond_its_capacity_it_refuses() -> None:
    slow = Slow(capacity=1)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(slow.double, 1)
        slow.busy()
        second = pool.submit(slow.double, 2)
        slow.asked(2)
        with pytest.raises(QueueFull):
            slow.double(3)
        slow.gate.set()
        assert (first.result(), second.result()) == (2, 4)
    assert slow.double.close()


def test_a_function_that_calls_itself_is_told_so() -> None:
    @batched()
    def recursive(items: list[int]) -> list[int]:
        return [recursive(item) for item in items]

    with pytest.raises(ConfigError, match="itself"):
        recursive(1, timeout=PATIENCE)
    assert recursive.close()


def test_b20_close_finishes_the_queue_and_refuses_what_comes_later() -> None:
    slow = Slow(max_batch_size=2, max_latency=60.0)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(slow.double, i) for i in range(3)]
        slow.busy()
        slow.asked(3)
        closing = pool.submit(slow.double.close)
        slow.gate.set()
        assert [f.result() for f in asked] == [0, 2, 4]
        assert closing.result()
    with pytest.raises(Closed):
        slow.double(9)


def test_b20_close_without_drain_answers_the_queue() -> None:
    slow = Slow(max_batch_size=1)
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(slow.double, 1)
        slow.busy()
        queued = pool.submit(slow.double, 2)
        slow.asked(2)
        closing = pool.submit(slow.double.close, False)
        assert isinstance(queued.exception(PATIENCE), Drained)
        slow.gate.set()
        assert running.result() == 2
        assert closing.result()


def test_b20_close_does_not_leave_callers_with_a_function_that_hangs() -> None:
    slow = Slow(max_batch_size=1)
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(slow.double, 1)
        slow.busy()
        queued = pool.submit(slow.double, 2)
        slow.asked(2)
        assert not slow.double.close(timeout=0.05)
        assert isinstance(running.exception(PATIENCE), CutShort)
        assert isinstance(queued.exception(PATIENCE), Drained)
        slow.gate.set()


def test_closing_one_that_never_ran() -> None:
    slow = Slow()
    assert slow.double.close()
    with pytest.raises(Closed):
        slow.double(1)


def test_an_urgent_item_goes_first() -> None:
    slow = Slow(max_batch_size=1)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(slow.double, 1)]
        slow.busy()
        asked.append(pool.submit(slow.double, 2))
        slow.asked(2)
        asked.append(pool.submit(slow.double, 3, priority=Priority.URGENT))
        slow.asked(1)
        slow.gate.set()
        assert [f.result() for f in asked] == [2, 4, 6]
    assert slow.calls == [[1], [3], [2]]
    assert slow.double.close()


def test_b17_an_item_past_its_time_limit_ends_while_the_function_still_runs_and_is_not_computed() -> None:
    slow = Slow()

    async def from_a_coroutine() -> None:
        with pytest.raises(Expired):
            await slow.double.aio(3, time_limit=0.010)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(slow.double, 1, time_limit=PATIENCE)
        slow.busy()
        with pytest.raises(Expired):
            slow.double(2, time_limit=0.010)
        with pytest.raises(Expired):
            slow.double(2, time_limit=0.010, timeout=PATIENCE)
        run(from_a_coroutine())
        assert not first.done()
        slow.gate.set()
        assert first.result() == 2
    assert slow.calls == [[1]]
    assert slow.double.close()


def test_a_timeout_before_the_time_limit_is_the_callers() -> None:
    slow = Slow()
    with pytest.raises(WaitTimeout):
        slow.double(1, timeout=0.010, time_limit=PATIENCE)
    slow.gate.set()
    assert slow.double.close()


def test_a_sink_is_told_every_event_in_order() -> None:
    slow, log = Slow(), Log()
    slow.gate.set()
    slow.double.add_sink(log)
    assert slow.double(1) == 2
    assert slow.double.close()
    with pytest.raises(Closed):
        slow.double(2)
    kinds = [type(event) for event in log.seen]
    assert kinds == [RequestQueued, BatchScheduled, BatchFinished, RequestSettled, RequestRejected]


def test_an_answer_for_a_loop_that_is_closed_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    loop = asyncio.new_event_loop()
    task = loop.create_task(slow.double.aio(1))
    loop.run_until_complete(asyncio.wait_for(asyncio.sleep(0), PATIENCE))
    slow.busy()
    loop.close()
    slow.gate.set()
    assert slow.double(2) == 4
    assert slow.double.close()
    assert not [record for record in caplog.records if record.name.startswith("reflex")]
    assert not task.done()
    task._log_destroy_pending = False  # type: ignore[attr-defined]


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_it_works_without_parentheses() -> None:
    @batched
    def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    assert double(21) == 42
    assert double.close()


class Holder:
    """Functions that belong to a class, and one that is bound when there is an object."""

    def __init__(self) -> None:
        self.add: BatchedFunction[int, int] = batched()(self._add)
        self.by = 5

    def _add(self, items: list[int]) -> list[int]:
        return [item + self.by for item in items]

    @staticmethod
    @batched()
    def negate(items: list[int]) -> list[int]:
        return [-item for item in items]


def test_bound_methods_static_methods_and_callable_objects_are_functions() -> None:
    class Doubles:
        def __call__(self, items: list[int]) -> list[int]:
            return [2 * item for item in items]

    holder, doubles = Holder(), batched(Doubles())
    assert (holder.add(1), Holder.negate(3), holder.negate(4), doubles(4)) == (6, -3, -4, 8)
    for function in (holder.add, Holder.negate, doubles):
        assert function.close()


async def _coroutine(items: list[int]) -> list[int]:
    return items


async def _async_generator(items: list[int]) -> Any:
    yield items


def _generator(items: list[int]) -> Any:
    yield from items


class _GeneratorCall:
    def __call__(self, items: list[int]) -> Any:
        yield from items


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_async_generator, "_async_generator is a generator function; it must return a list"),
        (_generator, "_generator is a generator function; it must return a list"),
        (_GeneratorCall(), "_GeneratorCall is a generator function"),
        (classmethod(lambda cls, items: items), "<lambda> is a class method; write a static method"),
        (lambda cls, items: items, "<lambda> is a class method; write a static method"),
        (lambda: [1], r"<lambda>\(\): must take one argument, the list of items"),
        (lambda a, b: [], r"<lambda>\(a, b\): must take one argument"),
        (lambda *, items: [], "must take one argument"),
        ("7", "str: must be a function"),
    ],
)
def test_what_is_no_function_over_a_list_is_refused_where_it_is_written(function: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        batched()(function)
    with pytest.raises(TypeError, match=says):
        FunctionProcessor(function)


def test_options_are_keywords() -> None:
    for given in ((8,), (lambda items: items, 8)):
        with pytest.raises(TypeError, match="options are keywords, such as max_batch_size=8"):
            batched(*given)  # type: ignore[call-overload]


class Table(list[int]):
    """As tables of pandas, polars and pyarrow: its length is that of its rows, and it iterates over its columns."""

    columns = ("a",)


def test_a_function_processor_takes_what_a_thread_can_call() -> None:
    with pytest.raises(TypeError, match="_coroutine is an async function, and a FunctionProcessor runs on a thread"):
        FunctionProcessor(_coroutine)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Holder._add is a method.*pass it as `object.method`"):
        FunctionProcessor(Holder._add)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("results", "kind"),
    [
        (None, "None"), ({1: 2}, "dict"), ("x", "str"), (b"x", "bytes"), ({1}, "set"), (iter([1]), "list_iterator"),
        (Table([1]), "Table"),
    ],
)
def test_b19_a_result_that_is_no_list_is_a_clear_error(results: Any, kind: str) -> None:
    @batched()
    def odd(items: list[int]) -> Any:
        return results

    with pytest.raises(ResultCountMismatch, match=f"odd returned (a )?{kind}; it must return a list with one result"):
        odd(1)
    assert odd.close()


def test_b19_a_coroutine_as_result_is_a_clear_error() -> None:
    with_coroutine = batched(lambda items: _coroutine(items))  # type: ignore[arg-type, return-value]
    with pytest.raises(ResultCountMismatch, match="returned a coroutine"):
        with_coroutine(1)
    assert with_coroutine.close()


def test_arrays_and_tuples_are_lists_of_results() -> None:
    import numpy as np

    for made in (np.array, tuple):
        function = batched(lambda items, made=made: made(items))  # type: ignore[misc, arg-type]
        assert function(3) == 3
        assert function.close()


def test_the_time_limit_is_never_an_item() -> None:
    slow = Slow()
    call: Any = slow.double
    with pytest.raises(TypeError, match="positional argument"):
        call(1, 2)
    with pytest.raises(ConfigError, match="timeout=-1: must be >= 0 seconds"):
        call(1, timeout=-1)
    with pytest.raises(ConfigError, match="time_limit=-1: must be >= 0 seconds"):
        call(1, time_limit=-1)
    with pytest.raises(ConfigError, match=r"priority='urgent': must be one of Priority\.URGENT"):
        call(1, priority="urgent")
    assert slow.calls == []
    assert slow.double.close()


def test_a_blocking_call_inside_a_running_loop_is_refused_and_its_thread_may_still_call() -> None:
    slow = Slow()
    slow.gate.set()

    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"would block the running event loop: await double.aio\(item\)"):
            slow.double(1)
        assert await slow.double.aio(1) == 2
        assert await asyncio.to_thread(slow.double, 2) == 4

    run(main())
    assert slow.calls == [[1], [2]]
    assert slow.double.close()


def test_a_function_that_closes_itself_still_answers_its_call() -> None:
    @batched
    def last(items: list[int]) -> list[int]:
        last.close()
        for thread in threading.enumerate():  # it could give this call up
            if thread.name == "last-timekeeper":
                thread.join(PATIENCE)
        return [2 * item for item in items]

    assert last(2, timeout=PATIENCE) == 4
    with pytest.raises(Closed):
        last(3)


# -- the watchdog ------------------------------------------------------------------------------------------------------


def test_a_call_that_hangs_is_given_up_and_the_next_items_run_on_another_thread() -> None:
    slow = Slow(watchdog=0.05)
    with pytest.raises(ProcessorHung, match=r"within 0\.05 s"):
        slow.double(1)
    slow.double._driver.device.watchdog = PATIENCE
    slow.gate.set()
    assert slow.double(2) == 4
    assert slow.calls == [[1], [2]]
    assert slow.double.close()


def test_coroutines_are_told_of_a_call_that_hangs_too() -> None:
    slow = Slow(watchdog=0.05)

    async def main() -> None:
        with pytest.raises(ProcessorHung):
            await slow.double.aio(1)
        slow.double._driver.device.watchdog = PATIENCE
        slow.gate.set()
        assert await slow.double.aio(2) == 4

    run(main())
    assert slow.double.close()


def test_a_call_within_the_watchdog_is_not_given_up_though_its_caller_waited_longer() -> None:
    slow = Slow(watchdog=PATIENCE, max_batch_size=1)
    driver = slow.double._driver
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(slow.double, 1)
        slow.busy()
        second = pool.submit(slow.double, 2)
        slow.asked(2)
        assert driver.look() > driver.device.clock()  # what runs has its time yet
        slow.gate.set()
        assert (first.result(), second.result()) == (2, 4)
    assert slow.double.close()


def test_zero_switches_the_watchdog_off_and_nonsense_is_refused() -> None:
    slow = Slow(watchdog=0)
    assert slow.double._driver.device.watchdog == inf
    for wrong in (-1.0, inf, nan):
        with pytest.raises(ConfigError, match="watchdog="):
            batched(watchdog=wrong)


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        *(("max_batch_size", value, "(a whole number )?in \\[1, 1000000\\]") for value in (0, -1, 2.5, inf, True, "8")),
        *(("capacity", value, "(a whole number )?in \\[1, 1000000\\]") for value in (0, 0.5, inf)),
        *(("max_latency", value, "(a number )?in \\[0, 60\\] seconds") for value in (-1, inf, nan, True, "1", 60.1)),
        *(("watchdog", value, "(a number )?in \\[0, 86400\\] seconds") for value in (-1, inf, nan, None)),
    ],
)
def test_a_wrong_value_is_refused_in_the_words_of_the_caller(name: str, value: Any, must: str) -> None:
    with pytest.raises(ConfigError, match=rf"^@batched\.{name}={re.escape(repr(value))}: must be {must}$"):
        batched(**{name: value})


def test_options_beside_the_function_count() -> None:
    sizes: list[int] = []

    def double(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return [2 * item for item in items]

    doubled: Any = batched(double, capacity=1, watchdog=0.0)  # type: ignore[call-overload]
    assert doubled(3) == 6
    with pytest.raises(ConfigError, match="capacity=0"):
        batched(double, capacity=0)  # type: ignore[call-overload]
    doubled.close()


def test_a_thread_that_could_not_start_is_started_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = threading.Thread.start, [RuntimeError("can't start new thread")]

    def fails_once(self: threading.Thread) -> None:
        if self.name.endswith("timekeeper") and failures:
            raise failures.pop()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fails_once)
    same = batched(lambda items: items)
    with pytest.raises(RuntimeError, match="new thread"):
        same(1)
    assert same(1) == 1
    same.close()


def test_an_editor_shows_the_options() -> None:
    assert list(inspect.signature(batched).parameters) == list(type(batched).__slots__)


def named(items: list[int]) -> list[int]:
    return items


named = batched(named)  # type: ignore[assignment]


class Named:
    @batched
    def run(self, items: list[int]) -> list[int]:
        return items


def test_a_batched_function_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(named)) is named
    assert copy.deepcopy(named) is named
    assert pickle.loads(pickle.dumps(Named().run))(3) == 3
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(batched(lambda items: items))
    named.close()  # type: ignore[attr-defined]


# -- words of errors ---------------------------------------------------------------------------------------------------


def test_errors_name_the_function_and_no_server() -> None:
    slow = Slow(max_batch_size=1, capacity=1)
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(slow.double, 1)
        assert slow.entered.wait(PATIENCE)
        queued = threads.submit(slow.double, 2)
        slow.asked(2)
        with pytest.raises(QueueFull, match=r"^double: as many items as its capacity wait already"):
            slow.double(3)
        with pytest.raises(QueueFull, match=r"^double: as many items as its capacity wait already"):
            run(slow.double.aio(3))
        slow.double.close(drain=False, timeout=0.0)
        assert str(queued.exception(PATIENCE)) == "double: it was closed before this item ran"
        slow.gate.set()
        assert running.exception(PATIENCE) is None or isinstance(running.exception(), CutShort)
    with pytest.raises(Closed, match=r"^double: it was closed, or hung twice, and takes no more items"):
        slow.double(4)


def test_a_wrong_number_of_results_names_the_function() -> None:
    @batched
    def odd(items: list[int]) -> list[int]:
        return [1, 2, 3]

    with pytest.raises(ResultCountMismatch, match="odd returned 3 results for 1 item;"):
        odd(1)


def test_wrong_options_are_named() -> None:
    with pytest.raises(TypeError, match=r"^@batched: max_batchsize: no such option; did you mean max_batch_size\?"):
        batched(max_batchsize=3)  # type: ignore[call-overload]

    @batched
    def double(items: list[int]) -> list[int]:
        return items

    with pytest.raises(ConfigError, match=r"^double: timeout='a': must be >= 0 seconds"):
        double(1, timeout="a")  # type: ignore[arg-type]


def test_what_is_no_sink_and_what_is_no_truth_value_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^@batched\.repeatable='no': must be True or False$"):
        batched(repeatable="no")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=r"^add_sink\(3\): must be a function of one event$"):
        batched(lambda items: items).add_sink(3)  # type: ignore[arg-type]


def test_a_function_that_hangs_is_named() -> None:
    held = threading.Event()

    @batched(watchdog=0.05)
    def stuck(items: list[int]) -> list[int]:
        held.wait(PATIENCE)
        return items

    with pytest.raises(ProcessorHung, match=r"^stuck: the processor did not come back within 0\.05 s$"):
        stuck(1)
    held.set()

    @batched(watchdog=0.05)
    async def asleep(items: list[int]) -> list[int]:
        await asyncio.Event().wait()
        return items

    with pytest.raises(ProcessorHung, match=r"^asleep: the function did not come back within 0\.05 s$"):
        asyncio.run(asleep(1))
