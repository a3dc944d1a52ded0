"""Several ranks in one process, each with a thread, tiny pools, a store and streams that fail on their own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from hicache.cache import HiCache
from hicache.clock import Clock, MonotonicClock
from hicache.closing import Closing
from hicache.config import load_config
from hicache.ranks.group import Numbers, RankGroup
from hicache.ranks.in_process import threads
from hicache.replay.simulated import SimulatedEngine
from hicache.replay.stamps import PageChecker
from hicache.testing.scripted_store import FLIPPED, MISS, SHORT, Operation, Outcome, Raise, ScriptedStore
from hicache.tiers.store import Store
from hicache.transfer.streams import OnDone, SlotWork, StreamClosedError, Streams, call_on_done

T = TypeVar("T")
R = TypeVar("R")

TEAM_PATIENCE_S = 60.0
"""How long any call of a team may take before it counts as hung."""
OPERATIONS: tuple[Operation, ...] = ("exists", "get", "put")
FAULTS: tuple[Outcome, ...] = (MISS, SHORT, FLIPPED, Raise(OSError("gone")), Raise(ValueError("a bug")))


class RecordingGroup:
    """A group that notes every call: how many numbers, and the first of them, which names the call."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size
        self.calls: list[tuple[int, int]] = []

    def lowest(self, numbers: Numbers) -> Numbers:
        self.calls.append((len(numbers), int(numbers[0])))
        return self._group.lowest(numbers)

    def close(self) -> None:
        self._group.close()


class OwnClock:
    """A machine's clock of its own: it began at another time, and goes a little faster or slower."""

    def __init__(self, start_s: float, speed: float) -> None:
        self._clock = MonotonicClock()
        self._start_s = start_s
        self._speed = speed

    def now_s(self) -> float:
        return self._start_s + self._speed * self._clock.now_s()


class FlakyStream:
    """Copies at once, but breaks some copies off, and holds some back until ``let_go``.

    *Thread*: one.
    """

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness
        self._held: deque[tuple[SlotWork, OnDone]] = deque()
        self._is_closed = False
        self.fails = 0.0
        self.holds = 0.0

    @property
    def num_pending(self) -> int:
        return len(self._held)

    def submit(self, work: SlotWork, on_done: OnDone) -> None:
        if self._is_closed:
            call_on_done(on_done, 0, StreamClosedError("the flaky stream is closed"))
        elif self._held or self._random.random() < self.holds:
            self._held.append((work, on_done))
        else:
            self._copy(work, on_done)

    def let_go(self) -> None:
        """Carry out what was held back."""
        while self._held:
            self._copy(*self._held.popleft())

    def close(self) -> None:
        self._is_closed = True
        while self._held:
            _, on_done = self._held.popleft()
            call_on_done(on_done, 0, StreamClosedError("the flaky stream was closed"))

    def _copy(self, work: SlotWork, on_done: OnDone) -> None:
        fails = self._random.random() < self.fails
        count = self._random.randrange(work.num_slots) if fails else work.num_slots
        error: BaseException | None = OSError("a flaky copy") if fails else None
        try:
            work.run(0, count)
        except BaseException as fault:  # noqa: BLE001  as any stream's: a copy that raises ends as a failed one
            count, error = 0, fault
        call_on_done(on_done, count, error)


class Rank:
    """One rank: a cache with an engine on it, and the faults that only this rank has.

    Args:
        tree: the configuration, without this rank's place.
        seed: of this rank's faults.
        store: L3 instead of a scripted one of its own.
        session_clock: default: real time, by a clock of its own that goes a little wrong.
    """

    def __init__(
        self,
        group: RankGroup,
        tree: dict[str, Any],  # Any: what a YAML may hold
        *,
        seed: int = 0,
        core: str | None = None,
        store: Store | None = None,
        session_clock: Clock | None = None,
    ) -> None:
        self.group = RecordingGroup(group)
        self.number = group.rank
        self.random = random.Random(seed * 1009 + group.rank)
        self.store = ScriptedStore()
        self.streams = [FlakyStream(self.random) for _ in range(3)]
        self.checker = PageChecker()
        ranks = {"tp_size": group.size, "tp_rank": group.rank}
        self.cache = HiCache(
            load_config({**tree, "ranks": ranks}, environ={}),
            clock=OwnClock(1000.0 * group.rank, 1.0),
            session_clock=session_clock or OwnClock(77.0 * group.rank, 1.0 + 0.25 * group.rank),
            core=core,
            store=self.store if store is None else store,
            streams=Streams(to_host=self.streams[0], to_device=self.streams[1], local=self.streams[2]),
            on_page=self.checker.check,
            group=self.group,
        )
        self.engine = SimulatedEngine(self.cache, chunk_tokens=16)

    def break_something(self) -> None:
        """Begin or end faults of this rank's store and copies, at random."""
        roll = self.random.random()
        if roll < 0.15:
            operation, fault = self.random.choice(OPERATIONS), self.random.choice(FAULTS)
            for call in range(1, 1000, self.random.randint(2, 6)):
                self.store.script(operation, fault, call=call)
        elif roll < 0.2:
            self.store.block(self.random.choice(OPERATIONS))
        elif roll < 0.5:
            self.mend()
        for stream in self.streams:
            stream.fails = self.random.choice((0.0, 0.0, 0.0, 0.2))
            stream.holds = self.random.choice((0.0, 0.0, 0.0, 0.0, 0.1))
            if self.random.random() < 0.7:
                stream.let_go()

    def mend(self) -> None:
        """All of this rank is well again."""
        self.store.unscript()
        for stream in self.streams:
            stream.fails = stream.holds = 0.0
            stream.let_go()

    def state(self) -> tuple[object, ...]:
        """All of the tree, its counts, and what is under way: equal on all ranks at all times."""
        runtime = self.cache._runtime  # noqa: SLF001  a test's eye on the inside
        with runtime.lock:
            core = runtime.core
            return (
                core.snapshot(),
                core.in_flight(),
                dict(core.counters()),
                dict(runtime.faults),
                [core.pool_count(name, tier) for name, tier in self.pools()],
                self.cache.sessions.count(),
                self.cache.sessions.followed,
            )

    def pools(self) -> list[tuple[str, Any]]:  # Any: the tier
        from hicache.runtime import POOLED

        return [(spec.name, tier) for spec in self.cache.config.model.specs() for tier in POOLED]

    def close(self) -> None:
        """Mend and close, waiting for nothing."""
        self.mend()
        self.cache.close(flush=False, drain=False)


class Team(Closing, Generic[T]):
    """One thing for each rank, each made and used by a thread of its own.

    Args:
        make: makes a rank's thing from its place in the group.
    """

    def __init__(self, size: int, make: Callable[[RankGroup], T], *, timeout_s: float = 30.0) -> None:
        self._pools = [ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}") for rank in range(size)]
        groups = threads(size, timeout_s=timeout_s)
        try:
            made = _results(
                [pool.submit(make, group) for pool, group in zip(self._pools, groups, strict=True)]
            )
        except BaseException:
            self.end()
            raise
        self.members = tuple(made)

    def each(self, call: Callable[[T], R]) -> list[R]:
        """Have every rank make a call at the same time; raises what the first that failed has raised."""
        return _results(self.start(call))

    def start(self, call: Callable[[T], R]) -> list[Future[R]]:
        """The same without waiting."""
        return [pool.submit(call, member) for pool, member in zip(self._pools, self.members, strict=True)]

    def end(self) -> None:
        """Let the threads go."""
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Close what each rank has, and let the threads go."""
        for future in self.start(_close):
            future.result(TEAM_PATIENCE_S)
        self.end()


def _close(member: Any) -> None:  # Any: whatever a team is made of
    member.close()


def _results(futures: Sequence[Future[R]]) -> list[R]:
    errors = [future.exception(TEAM_PATIENCE_S) for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]
