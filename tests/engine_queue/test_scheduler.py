"""The thread's queue by itself, with runs that are plain generators: turns, checkpoints inside an event, ends."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from engine_queue.rig import until

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.events import Finished, Token
from mlxgen.owner import OwnerThread
from mlxgen.runs import MAX_UNREAD_EVENTS, Run


@pytest.fixture
def thread():
    thread = OwnerThread("under-test")
    yield thread
    thread.close()
    assert not thread._thread.is_alive()


class Work:
    """A run of `num_events` events with `num_steps` checkpoints in each. Says in `log` what it does; `hooks` are called
    after a step."""

    def __init__(self, name, log, *, priority=0, num_events=3, num_steps=1, cancel=None) -> None:
        self.name, self.log, self.num_events, self.num_steps = name, log, num_events, num_steps
        self.hooks = {}
        self.run = Run(priority=priority, **({} if cancel is None else {"cancel": cancel}))
        token = self.run.new_token()
        self.run.start = lambda: self.events(token)

    def events(self, token):
        try:
            for index in range(self.num_events):
                for step in range(self.num_steps):
                    token.checkpoint()
                    self.log.append(f"{self.name}{index}.{step}")
                    self.hooks.get((index, step), lambda: None)()
                yield Token(index, index, "")
            finish = Finished("length", None, "")
        except Cancelled as stop:
            finish = Finished("cancelled", stop.reason, "")
        yield finish
        self.log.append(f"{self.name} saved")

    def result(self):
        assert self.run.wait_end(30)
        if self.run.box.error is not None:
            raise self.run.box.error
        return self.run.box.finished


def test_equals_run_one_after_the_other_and_the_urgent_first(thread) -> None:
    log = []
    first = Work("a", log, num_events=2)
    others = [Work("b", log, num_events=1), Work("c", log, num_events=1, priority=1), Work("d", log, num_events=1)]
    first.hooks[0, 0] = lambda: [thread.add(work.run) for work in others]
    thread.add(first.run)
    for work in [first, *others]:
        assert work.result().finish_reason == "length"
    assert [entry for entry in log if "saved" not in entry] == ["a0.0", "c0.0", "a1.0", "b0.0", "d0.0"]


def test_an_urgent_run_takes_over_at_a_checkpoint_in_the_middle_of_an_event(thread) -> None:
    """One picture's way through the tower is one event of many units."""
    log = []
    slow = Work("s", log, num_events=2, num_steps=4)
    urgent = Work("u", log, priority=1, num_events=2)
    equal = Work("e", log, num_events=1)
    slow.hooks[0, 1] = lambda: [thread.add(equal.run), thread.add(urgent.run)]
    thread.add(slow.run)
    for work in (slow, urgent, equal):
        work.result()
    assert log == [
        *("s0.0", "s0.1", "u0.0", "u1.0", "u saved", "s0.2", "s0.3"),
        *("s1.0", "s1.1", "s1.2", "s1.3", "s saved", "e0.0", "e saved"),
    ]


def test_within_each_other_and_not_without_end(thread) -> None:
    log = []
    works = [Work(f"{number}:", log, priority=number, num_events=1, num_steps=2) for number in range(20)]
    for lower, higher in pairwise(works):
        lower.hooks[0, 0] = lambda higher=higher: thread.add(higher.run)
    thread.add(works[0].run)
    for work in works:
        assert work.result().finish_reason == "length"
    starts = [entry for entry in log if entry.endswith(":0.0")]
    assert starts == [f"{number}:0.0" for number in range(20)]
    # The first eight wait in the middle of their event; after that an urgent one waits for the event's end.
    assert log[:10] == [*(f"{number}:0.0" for number in range(9)), "8:0.1"]


def test_what_is_interrupted_can_still_be_stopped(thread) -> None:
    log = []
    slow = Work("s", log, num_steps=3)
    urgent = Work("u", log, priority=1, num_events=5)
    slow.hooks[0, 0] = lambda: thread.add(urgent.run)
    urgent.hooks[1, 0] = lambda: slow.run.cancel("requested")
    thread.add(slow.run)
    assert slow.result() == Finished("cancelled", "requested", "")
    assert urgent.result().finish_reason == "length"
    assert log == ["s0.0", "u0.0", "u1.0", "s saved", "u2.0", "u3.0", "u4.0", "u saved"]


def test_a_waiting_run_is_cancelled_at_a_checkpoint_of_the_running_one(thread) -> None:
    log = []
    slow = Work("s", log, num_events=1, num_steps=3)
    waiting = Work("w", log)
    slow.hooks[0, 0] = lambda: thread.add(waiting.run)
    slow.hooks[0, 1] = lambda: waiting.run.cancel("requested")
    thread.add(slow.run)
    slow.result()
    assert waiting.result().finish_reason == "cancelled"
    assert log == ["s0.0", "s0.1", "w saved", "s0.2", "s saved"]


def test_a_run_nobody_reads_stops_and_the_others_go_on(thread) -> None:
    log = []
    unread = Work("u", log, priority=1, num_events=1000)
    thread.add(unread.run)
    until(lambda: unread.run.box.full)
    other = Work("o", log, num_events=3)
    thread.add(other.run)
    assert other.result().finish_reason == "length"
    assert sum(entry.startswith("u") for entry in log) == MAX_UNREAD_EVENTS
    for number in range(3):
        assert unread.run.box.next() == Token(number, number, "")
    until(lambda: unread.run.box.full)
    until(lambda: not unread.run.running)
    assert sum(entry.startswith("u") for entry in log) == MAX_UNREAD_EVENTS + 3
    unread.run.box.open_wide()
    assert unread.result().finish_reason == "length"


@pytest.mark.parametrize("how", ["deadline", "somebody else"])
def test_a_caller_s_token_is_noticed_while_nothing_runs(thread, how) -> None:
    """It is a plain attribute (or the time) and wakes nobody."""
    token = CancelToken.after(0.3) if how == "deadline" else CancelToken()
    log = []
    unread = Work("u", log, num_events=1000, cancel=token)
    thread.add(unread.run)
    until(lambda: unread.run.box.full)
    until(lambda: not unread.run.running)
    if how != "deadline":
        token.cancel("hangup")
    assert unread.result().cancel_reason == ("deadline" if how == "deadline" else "hangup")


def test_an_error_reaches_its_consumer_only(thread) -> None:
    log = []
    failing, other = Work("f", log), Work("o", log)

    def fail() -> None:
        thread.add(other.run)
        raise LookupError("in a run")

    failing.hooks[1, 0] = fail
    thread.add(failing.run)
    assert failing.run.box.next() == Token(0, 0, "")
    with pytest.raises(LookupError, match="in a run"):
        failing.result()
    for _ in range(2):
        with pytest.raises(LookupError, match="in a run"):
            while failing.run.box.next() is not None:
                pass
    assert other.result().finish_reason == "length"


def test_closing_stops_what_runs_waits_and_is_interrupted() -> None:
    thread = OwnerThread("closing")
    log = []
    slow = Work("s", log, num_events=1, num_steps=50)
    urgent = Work("u", log, priority=1, num_events=10**6)
    urgent.run.box.open_wide()
    waiting, unread = Work("w", log), Work("r", log, num_events=1000)
    slow.hooks[0, 1] = lambda: [thread.add(work.run) for work in (unread, waiting, urgent)]
    thread.add(slow.run)
    until(lambda: "u5.0" in log)
    thread.close()
    assert not thread._thread.is_alive()
    for work in (slow, urgent, waiting, unread):
        assert work.run.box.ended
        assert work.run.box.finished == Finished("cancelled", "shutdown", "")
        assert f"{work.name} saved" in log
    assert not thread.add(Work("late", log).run)
    thread.close()


def test_it_isn_t_ended_under_somebody_s_run_and_keeps_nothing_of_those_that_are_over(thread) -> None:
    import gc
    import weakref

    log = []
    work = Work("a", log, num_events=1000)
    thread.add(work.run)
    thread.close_if_unused()
    assert thread._thread.is_alive()
    work.run.cancel("requested")
    work.result()
    gone = weakref.ref(work)
    del work
    gc.collect()
    assert gone() is None
    thread.close_if_unused()
    assert not thread._thread.is_alive()


def test_its_own_thread_doesn_t_wait_for_itself(thread) -> None:
    from mlxgen.errors import InvalidValueError

    log, problems = [], []
    work = Work("a", log)

    def wait() -> None:
        try:
            work.run.wait_end()
        except InvalidValueError as error:
            problems.append(str(error))

    work.hooks[1, 0] = wait
    thread.add(work.run)
    assert work.result().finish_reason == "length"
    assert "wait for itself" in problems[0]


def test_waking_from_finalizers_and_signals_takes_no_lock(thread) -> None:
    """`cancel`, `pause` and `resume` come from the garbage collector too, in any thread, whatever that one holds."""
    work = Work("a", [], num_events=1000)
    thread.add(work.run)
    until(lambda: work.run.box.full)
    with thread._gate, work.run.box._lock:
        caller = threading.Thread(target=lambda: (work.run.pause(), work.run.resume(), work.run.cancel("disconnect")))
        caller.start()
        caller.join(10)
        assert not caller.is_alive()
    assert work.result().cancel_reason == "disconnect"
