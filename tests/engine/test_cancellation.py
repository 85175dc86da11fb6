from __future__ import annotations

import math
import os
import signal
import threading
import time

import pytest

from mlxgen.cancellation import NEVER, Cancelled, CancelToken, cancel_on_interrupt
from mlxgen.errors import InvalidValueError


def test_a_fresh_token_lets_pass_and_a_cancelled_one_keeps_raising() -> None:
    token = CancelToken()
    token.checkpoint()
    token.cancel("requested")
    for _ in range(3):
        with pytest.raises(Cancelled) as stop:
            token.checkpoint()
        assert stop.value.reason == "requested"


def test_the_first_reason_wins() -> None:
    token = CancelToken()
    token.cancel("interrupt")
    token.cancel("terminate")
    assert token.reason == "interrupt"


def test_except_exception_does_not_eat_a_cancellation() -> None:
    token = CancelToken()
    token.cancel()
    with pytest.raises(Cancelled):
        try:
            token.checkpoint()
        except Exception:
            pytest.fail("an except Exception caught Cancelled")


def test_a_deadline_cancels_by_itself_and_stays() -> None:
    token = CancelToken.after(0.02)
    assert token.reason is None
    time.sleep(0.03)
    assert token.reason == "deadline"
    token.cancel("requested")
    assert token.reason == "deadline"
    assert CancelToken.after(0).reason == "deadline"
    assert CancelToken.after(-1).reason == "deadline"


def test_a_child_is_cancelled_with_its_parent_but_not_the_other_way_round() -> None:
    parent = CancelToken()
    child = CancelToken(parent=parent)
    child.cancel("disconnect")
    assert parent.reason is None
    other = CancelToken(parent=parent)
    parent.cancel("shutdown")
    assert other.reason == "shutdown"
    assert child.reason == "disconnect"


def test_never_cannot_be_cancelled() -> None:
    with pytest.raises(InvalidValueError, match="NEVER"):
        NEVER.cancel()
    NEVER.checkpoint()
    assert NEVER.reason is None


@pytest.mark.parametrize("make", [lambda: CancelToken.after(math.nan), lambda: CancelToken(deadline=math.nan)])
def test_nan_is_refused(make) -> None:
    with pytest.raises(InvalidValueError, match="NaN"):
        make()


def test_cancel_from_another_thread_is_seen() -> None:
    token = CancelToken()
    thread = threading.Thread(target=token.cancel, args=("disconnect",))
    thread.start()
    thread.join()
    assert token.reason == "disconnect"


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGINT, "interrupt"), (signal.SIGTERM, "terminate"), (signal.SIGHUP, "hangup")],
)
def test_a_signal_sets_the_token_and_the_second_raises(number, reason) -> None:
    before = signal.getsignal(number)
    with cancel_on_interrupt() as token:
        os.kill(os.getpid(), number)
        assert token.reason == reason
        expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
        with pytest.raises(expected) as stop:
            os.kill(os.getpid(), number)
        if expected is SystemExit:
            assert stop.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_cancel_on_interrupt_is_for_the_main_thread() -> None:
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            with cancel_on_interrupt():
                pass
        except InvalidValueError as error:
            caught.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_a_checkpoint_is_cheap() -> None:
    token = CancelToken(deadline=time.monotonic() + 100, parent=CancelToken())
    began = time.perf_counter()
    for _ in range(10_000):
        token.checkpoint()
    assert (time.perf_counter() - began) / 10_000 < 20e-6
