from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from hicache.testing.stepped_stream import SteppedCopyError, SteppedStream
from hicache.testing.transfer_rig import PATIENCE_S, engine_threads
from hicache.transfer.streams import CpuStream, Stream, StreamClosedError, Streams


class Work:
    """Remembers which slots it was run for."""

    def __init__(self, num_slots: int = 4, error: BaseException | None = None) -> None:
        self.num_slots = num_slots
        self.error = error
        self.ran: list[int] = []

    def run(self, first: int, last: int) -> None:
        if self.error is not None:
            raise self.error
        self.ran += range(first, last)


class ClosingWork(Work):
    """Closes its own stream half way, once what comes after it was submitted."""

    def __init__(self, stream: CpuStream) -> None:
        super().__init__()
        self.stream = stream
        self.let_go = threading.Event()

    def run(self, first: int, last: int) -> None:
        assert self.let_go.wait(PATIENCE_S)
        self.stream.close()
        super().run(first, last)


class Ends:
    """Collects what ``on_done`` was told, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int, BaseException | None]] = []
        self._changed = threading.Condition()

    def of(self, name: str) -> Callable[[int, BaseException | None], None]:
        def on_done(done_slots: int, error: BaseException | None) -> None:
            with self._changed:
                self.all.append((name, done_slots, error))
                self._changed.notify_all()

        return on_done

    def wait_for(self, count: int) -> list[tuple[str, int, BaseException | None]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.all) >= count, PATIENCE_S)
            return list(self.all)


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    with CpuStream("test") as stream:
        yield stream


@pytest.fixture
def stepped() -> SteppedStream:
    return SteppedStream()


# ---- CpuStream ---------------------------------------------------------------------------------------------------


def test_copies_end_in_the_order_of_submission(stream: CpuStream, ends: Ends) -> None:
    works = [Work(num_slots) for num_slots in range(20)]
    for number, work in enumerate(works):
        stream.submit(work, ends.of(str(number)))
    assert ends.wait_for(20) == [(str(number), number, None) for number in range(20)]
    assert all(work.ran == list(range(work.num_slots)) for work in works)
    assert stream.num_pending == 0


@pytest.mark.parametrize("error", [ValueError("bad"), MemoryError(), SystemExit(1)], ids=repr)
def test_an_exception_goes_to_its_copy_and_the_worker_lives(
    stream: CpuStream, ends: Ends, error: BaseException
) -> None:
    stream.submit(Work(error=error), ends.of("bad"))
    stream.submit(Work(), ends.of("good"))
    assert ends.wait_for(2) == [("bad", 0, error), ("good", 4, None)]


def test_a_report_that_raises_is_logged_and_the_worker_lives(
    stream: CpuStream, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(_done_slots: int, _error: BaseException | None) -> None:
        raise ValueError("cannot report")

    with caplog.at_level(logging.ERROR):
        stream.submit(Work(), raises)
        stream.submit(Work(), ends.of("next"))
        assert ends.wait_for(1) == [("next", 4, None)]
    assert "could not be reported" in caplog.text


def test_close_finishes_the_copy_under_way_and_ends_the_others_as_closed(ends: Ends) -> None:
    stream = CpuStream("test")
    running, waiting = ClosingWork(stream), Work()
    stream.submit(running, ends.of("running"))
    stream.submit(waiting, ends.of("waiting"))
    running.let_go.set()
    (first, second) = ends.wait_for(2)
    stream.close()
    assert first == ("running", 4, None)
    assert second[:2] == ("waiting", 0)
    assert isinstance(second[2], StreamClosedError)
    assert waiting.ran == []


def test_submitting_to_a_closed_stream_ends_the_copy_at_once(ends: Ends) -> None:
    stream = CpuStream("test")
    stream.close()
    stream.close()
    stream.submit(Work(), ends.of("late"))
    assert isinstance(ends.all[0][2], StreamClosedError)
    assert stream.num_pending == 0


def test_closing_a_bundle_leaves_no_thread() -> None:
    before = engine_threads()
    streams = Streams.on_cpu()
    assert len(engine_threads() - before) == 3
    streams.close()
    assert engine_threads() == before
    assert streams.num_pending == 0


# ---- SteppedStream -----------------------------------------------------------------------------------------------


def test_a_stepped_stream_is_a_stream() -> None:
    stream: Stream = SteppedStream()
    assert stream.num_pending == 0


def test_nothing_moves_before_it_is_stepped(stepped: SteppedStream, ends: Ends) -> None:
    work = Work()
    stepped.submit(work, ends.of("a"))
    assert (work.ran, ends.all, stepped.num_pending) == ([], [], 1)
    assert stepped.step() == 1
    assert (work.ran, ends.all, stepped.num_pending) == ([0, 1, 2, 3], [("a", 4, None)], 0)


def test_step_takes_no_more_than_there_are(stepped: SteppedStream, ends: Ends) -> None:
    for name in "abc":
        stepped.submit(Work(), ends.of(name))
    assert stepped.step(2) == 2
    assert stepped.step(5) == 1
    assert stepped.step() == 0
    assert [name for name, _, _ in ends.all] == ["a", "b", "c"]


def test_a_partial_step_moves_the_leading_slots_and_fails(stepped: SteppedStream, ends: Ends) -> None:
    work = Work()
    stepped.submit(work, ends.of("a"))
    assert stepped.step_partial(3) == 1
    ((_, done_slots, error),) = ends.all
    assert (work.ran, done_slots) == ([0, 1, 2], 3)
    assert isinstance(error, SteppedCopyError)
    assert stepped.step_partial(1) == 0


def test_a_partial_step_of_all_slots_ends_well(stepped: SteppedStream, ends: Ends) -> None:
    stepped.submit(Work(), ends.of("a"))
    stepped.step_partial(9)
    assert ends.all == [("a", 4, None)]


def test_a_failure_told_ahead_takes_the_next_copy_and_no_other(stepped: SteppedStream, ends: Ends) -> None:
    failed, fine = Work(), Work()
    error = ValueError("told")
    stepped.fail_next(error)
    stepped.submit(failed, ends.of("a"))
    stepped.submit(fine, ends.of("b"))
    stepped.step_all()
    assert ends.all == [("a", 0, error), ("b", 4, None)]
    assert (failed.ran, fine.ran) == ([], [0, 1, 2, 3])


def test_a_copy_that_raises_ends_with_what_it_raised(stepped: SteppedStream, ends: Ends) -> None:
    error = ValueError("bad")
    stepped.submit(Work(error=error), ends.of("a"))
    stepped.step()
    assert ends.all == [("a", 0, error)]


def test_step_all_includes_copies_that_an_end_begins(stepped: SteppedStream, ends: Ends) -> None:
    def go_on(_done_slots: int, _error: BaseException | None) -> None:
        stepped.submit(Work(), ends.of("second"))

    stepped.submit(Work(), go_on)
    assert stepped.step_all() == 2
    assert ends.all == [("second", 4, None)]


def test_a_closed_stepped_stream_ends_everything_as_closed(stepped: SteppedStream, ends: Ends) -> None:
    stepped.submit(Work(), ends.of("before"))
    stepped.close()
    stepped.submit(Work(), ends.of("after"))
    assert [(name, type(error)) for name, _, error in ends.all] == [
        ("before", StreamClosedError),
        ("after", StreamClosedError),
    ]
