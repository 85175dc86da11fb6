"""Run a blocking call that can't be interrupted (network, foreign code) so that a stop doesn't wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from mlxgen.cancellation import CancelToken

T = TypeVar("T")
_POLL_S: Final = 0.05
_ENDED: Final = object()


def call_in_background(call: Callable[[], T], *, cancel: CancelToken) -> T:
    """The result (or exception) of `call`, run on a daemon thread; a stop is noticed within 0.05 s.

    On a stop the thread is left to its own timeouts and its result is dropped: `call` must not touch MLX, nor
    anything that another thread will use.
    """
    (result,) = stream_in_background(lambda: iter((call(),)), cancel=cancel)
    return result


def stream_in_background(start: Callable[[], Iterator[T]], *, cancel: CancelToken) -> Iterator[T]:
    """The items of `start()`, pulled on a daemon thread at most four ahead; a stop is noticed within 0.05 s.

    One checkpoint before each item. When the consumer leaves (stop, error, `close()`), the thread ends at its next
    item or its own timeout. Same rules for `start` as in `call_in_background`.
    """
    items: queue.Queue[object] = queue.Queue(maxsize=4)
    gone = threading.Event()

    def put(item: object) -> bool:
        while not gone.is_set():
            try:
                items.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def pull() -> None:
        try:
            for item in start():
                if not put(item):
                    return
            put(_ENDED)
        except BaseException as error:
            put(_Failure(error))

    cancel.checkpoint()
    threading.Thread(target=pull, name="mlxgen-background", daemon=True).start()
    try:
        while True:
            cancel.checkpoint()
            try:
                item = items.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if item is _ENDED:
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item  # type: ignore[misc]
    finally:
        gone.set()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error
