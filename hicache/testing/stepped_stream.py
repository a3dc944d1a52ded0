"""A stream on which copies end when the test says so."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hicache.transfer.streams import Fence, OnDone, SlotWork, StreamClosedError, Streams, call_on_done


class SteppedCopyError(Exception):
    """What a copy that ``step_partial`` cut short ends with."""


@dataclass(slots=True, eq=False)
class _Pending:
    work: SlotWork
    on_done: OnDone


class SteppedStream:
    """Holds every copy until it is stepped; bytes move in the thread that steps.

    *Thread*: submit from any thread; step and close from one.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        self._failures: deque[BaseException] = deque()
        self._is_closed = False

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, work: SlotWork, on_done: OnDone) -> Fence | None:
        if self._is_closed:
            call_on_done(on_done, 0, StreamClosedError("the stepped stream is closed"))
        else:
            self._pending.append(_Pending(work, on_done))
        return None

    def step(self, n: int = 1) -> int:
        """Carry out and end the next ``n`` copies, or all there are; how many that was."""
        num_done = 0
        while num_done < n and self._pending:
            self._end_next(self._pending[0].work.num_slots, None)
            num_done += 1
        return num_done

    def step_all(self) -> int:
        """Step until nothing is pending, copies that arrive meanwhile included."""
        num_done = 0
        while self._pending:
            num_done += self.step()
        return num_done

    def step_partial(self, num_slots: int) -> int:
        """Carry out the first ``num_slots`` slots of the next copy, then end it with a failure.

        Returns how many copies ended (0 when none is pending). A copy with no more slots than that
        ends well.
        """
        if not self._pending:
            return 0
        wanted = self._pending[0].work.num_slots
        short = SteppedCopyError(f"stopped after {num_slots} of {wanted} slots")
        self._end_next(min(num_slots, wanted), short if num_slots < wanted else None)
        return 1

    def fail_next(self, error: BaseException) -> None:
        """Let the next copy that is stepped end with ``error``, no slot moved. May be called ahead."""
        self._failures.append(error)

    def close(self) -> None:
        self._is_closed = True
        while self._pending:
            call_on_done(
                self._pending.popleft().on_done, 0, StreamClosedError("the stepped stream was closed")
            )

    def _end_next(self, num_slots: int, error: BaseException | None) -> None:
        item = self._pending.popleft()
        if self._failures:
            call_on_done(item.on_done, 0, self._failures.popleft())
            return
        try:
            item.work.run(0, num_slots)
        except Exception as fault:  # noqa: BLE001  as on any stream: the copy ends with it
            call_on_done(item.on_done, 0, fault)
        else:
            call_on_done(item.on_done, num_slots, error)


def stepped_streams() -> tuple[Streams, SteppedStream, SteppedStream, SteppedStream]:
    """A bundle of three, and the three by name: to host, to device, local."""
    to_host, to_device, local = SteppedStream(), SteppedStream(), SteppedStream()
    return Streams(to_host, to_device, local), to_host, to_device, local
