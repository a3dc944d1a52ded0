"""A circuit breaker: a store that fails or crawls is left alone, and comes back by itself.

::

             failures in a row, or slow calls
    CLOSED ──────────────────────────────────> OPEN <───────┐
       ^                                        │ back-off   │ fails, or is slow:
       │                                        v            │ a longer back-off
       └──────────── the probe succeeds ───── PROBING ───────┘

While it is not closed every question is a miss and every page is refused, at once. The probe runs
beside the calls, so no request ever waits for a store that is ill.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

from hicache.clock import Clock
from hicache.errors import ConfigError, ProtocolError, TierError, TierUnavailableError
from hicache.tiers.arguments import check_keys, check_pages, check_targets
from hicache.tiers.store import BreakerState, BreakerStats, PageTarget, Store, StoredPage, StoreStats
from hicache.types import PageKey, Regard

logger = logging.getLogger(__name__)

PROBE_KEY = PageKey(bytes(32))
"""Asked for by probes; no page has it."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, and for how long.

    Args:
        failures: it opens after so many failed calls in a row.
        slow_s: a call that takes longer is slow.
        slow_fraction: it opens when more than this share of the last ``window`` calls were slow; in
            other words, when that quantile of their latency is over ``slow_s``.
        window: calls that are looked at; before there were so many, slowness opens nothing.
        backoff_s: first wait before a probe; each failed one doubles it, up to ``backoff_max_s``.
        jitter: each wait is longer by a random share of up to this, so that many caches in front of
            one store do not come back at the same moment.

    Raises:
        ValueError: a value out of range, by name.
    """

    failures: int = 5
    slow_s: float = 2.0
    slow_fraction: float = 0.5
    window: int = 20
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        for name in ("failures", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"breaker {name} is {getattr(self, name)}, 1 or more expected")
        for name in ("slow_s", "backoff_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"breaker {name} is {getattr(self, name)}, more than 0 expected")
        for name in ("slow_fraction", "jitter"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"breaker {name} is {getattr(self, name)}, 0 to 1 expected")
        if self.backoff_max_s < self.backoff_s:
            raise ValueError(f"breaker backoff_max_s is {self.backoff_max_s}, under backoff_s")


class Breaker:
    """The state machine alone.

    Args:
        label: what it protects, in the log.

    *Thread*: any.
    """

    def __init__(
        self, settings: BreakerSettings, *, clock: Clock, randomness: random.Random, label: str = "a store"
    ) -> None:
        self._label = label
        self._settings = settings
        self._clock = clock
        self._random = randomness
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._num_failed = 0  # in a row
        self._slow: deque[bool] = deque(maxlen=settings.window)
        self._num_backoffs = 0  # in a row: forgotten once a window of calls went well
        self._num_good = 0  # since it closed
        self._retry_s = 0.0
        self._num_opened = 0
        self._num_rejected = 0
        self._reason: str | None = None

    # ---- calls -----------------------------------------------------------------------------------------------

    def admits(self) -> bool:
        """Whether a call may go to the store; if not, it is counted as answered in its place."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return True
            self._num_rejected += 1
            return False

    def succeeded(self, latency_s: float) -> None:
        """A call ended well, though perhaps late."""
        with self._lock:
            if self._state is not BreakerState.CLOSED:
                return
            self._num_failed = 0
            self._num_good += 1
            if self._num_good >= self._settings.window:
                self._num_backoffs = 0
            self._slow.append(latency_s > self._settings.slow_s)
            num_slow, window = sum(self._slow), self._settings.window
            if len(self._slow) == window and num_slow > self._settings.slow_fraction * window:
                self._open(f"{num_slow} of {window} calls took over {self._settings.slow_s:g} s")

    def failed(self, reason: object) -> None:
        """A call failed."""
        with self._lock:
            if self._state is not BreakerState.CLOSED:
                return
            self._num_failed += 1
            if self._num_failed >= self._settings.failures:
                self._open(f"{self._num_failed} calls failed in a row, at last: {reason}")

    def trip(self, reason: object) -> None:
        """Open now."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                self._open(str(reason))

    # ---- probes ----------------------------------------------------------------------------------------------

    def begin_probe(self) -> bool:
        """Whether the caller is to try the store now. Then it reports how that ended."""
        with self._lock:
            if self._state is not BreakerState.OPEN or self._clock.now_s() < self._retry_s:
                return False
            self._state = BreakerState.PROBING
            return True

    def end_probe(self, latency_s: float) -> None:
        """The probe came back: closes, unless it was slow."""
        with self._lock:
            if latency_s > self._settings.slow_s:
                self._wait()
                return
            self._state = BreakerState.CLOSED
            self._num_failed = self._num_good = 0
            self._slow.clear()
        logger.warning("%s is used again", self._label)

    def fail_probe(self) -> None:
        """The probe failed: wait longer."""
        with self._lock:
            self._wait()

    # ---- state -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> BreakerState:
        return self._state

    def stats(self) -> BreakerStats:
        with self._lock:
            is_open = self._state is BreakerState.OPEN
            return BreakerStats(
                state=self._state,
                num_opened=self._num_opened,
                num_rejected=self._num_rejected,
                reason=self._reason,
                retry_in_s=max(0.0, self._retry_s - self._clock.now_s()) if is_open else None,
            )

    def _open(self, reason: str) -> None:
        self._num_opened += 1
        self._reason = reason
        self._wait()
        logger.warning("%s is left alone for now: %s", self._label, reason)

    def _wait(self) -> None:
        settings = self._settings
        # Bounded before it is raised: no float holds 2 ** 10,000.
        doubled_s = settings.backoff_s * 2.0 ** min(self._num_backoffs, 64)
        wait_s = min(doubled_s, settings.backoff_max_s) * (1 + settings.jitter * self._random.random())
        self._num_backoffs += 1
        self._retry_s = self._clock.now_s() + wait_s
        self._state = BreakerState.OPEN


class BreakerStore(Store):
    """Another store behind a breaker.

    A call has failed if it raised, or served no page and left new errors in the store's counters, or
    was given up by its caller after more than ``slow_s``.

    Args:
        inner: the store; opened and closed with this one.
        clock, randomness: time, and the jitter of back-offs.
        must_open: whether ``open`` fails if the store's does. If not, the breaker begins open, and a
            probe opens the store later. A ``ConfigError`` always comes through.
        probe_timeout_s: limit of a probe, opening included.
        name: of the store, in statistics and messages.

    *Thread*: as every store.
    """

    def __init__(
        self,
        inner: Store,
        settings: BreakerSettings | None = None,
        *,
        clock: Clock,
        randomness: random.Random,
        must_open: bool = True,
        probe_timeout_s: float = 5.0,
        name: str | None = None,
    ) -> None:
        self.inner = inner
        self._name = name
        self._settings = settings or BreakerSettings()
        self._clock = clock
        self._must_open = must_open
        self._probe_timeout_s = probe_timeout_s
        label = f"store {name or inner.stats().kind}"
        self._breaker = Breaker(self._settings, clock=clock, randomness=randomness, label=label)
        self._is_open = False
        self._is_inner_open = False
        self._probe: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._num_rejected = {"pages_missed": 0, "pages_refused": 0}

    @property
    def is_private(self) -> bool:
        return self.inner.is_private

    # ---- life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        try:
            await self.inner.open()
            self._is_inner_open = True
        except TierError as error:
            if self._must_open:
                raise
            self._breaker.trip(error)
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.cancel()
            await asyncio.wait((probe,))
        await self.inner.close()

    def stats(self) -> StoreStats:
        stats = self.inner.stats()
        with self._lock:
            rejected = dict(self._num_rejected)
        return replace(
            stats,
            name=self._name or stats.name,
            breaker=self._breaker.stats(),
            pages_missed=stats.pages_missed + rejected["pages_missed"],
            pages_refused=stats.pages_refused + rejected["pages_refused"],
        )

    async def settled(self) -> None:
        """Wait until no probe runs."""
        if self._probe is not None:
            await asyncio.wait((self._probe,))

    # ---- batches ---------------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        check_keys(keys)
        if not self._admits():
            return [False] * len(keys)
        return await self._watched(self.inner.exists(keys))

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        check_targets(targets)
        if not self._admits():
            self._count(pages_missed=len(targets))
            return [False] * len(targets)
        return await self._watched(self.inner.get(targets))

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        check_pages(pages)
        if not self._admits():
            self._count(pages_refused=len(pages))
            return [False] * len(pages)
        return await self._watched(self.inner.put(pages))

    async def delete(self, keys: Sequence[PageKey]) -> int:
        """As the store does. Raises ``TierUnavailableError`` while the breaker is open: nothing is deleted."""
        check_keys(keys)
        if not self._admits():
            raise TierUnavailableError(f"the store is switched off: {self._breaker.stats().reason}")
        return await self.inner.delete(keys)

    async def hint(self, keys: Sequence[PageKey], regard: Regard) -> None:
        """As the store does, whatever the breaker says: no I/O is done for it, and it may take another back."""
        if self._is_inner_open:
            await self.inner.hint(keys, regard)

    async def resize(self, capacity_bytes: int) -> None:
        await self.inner.resize(capacity_bytes)

    async def clear(self) -> int:
        """As the store does, whatever the breaker says: whoever asks for it wants to know."""
        if not self._is_open:
            raise TierUnavailableError("the store is not open; await open() first")
        return await self.inner.clear()

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _admits(self) -> bool:
        """Whether a call goes to the store. If not, and it is time, a probe begins beside it."""
        if not self._is_open:
            raise TierUnavailableError("the store is not open; await open() first")
        if self._breaker.admits():
            return True
        if self._breaker.begin_probe():
            self._probe = asyncio.get_running_loop().create_task(self._try())
        return False

    async def _try(self) -> None:
        """One probe. Reports to the breaker on every way out."""
        began_s = self._clock.now_s()
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                if not self._is_inner_open:
                    await self.inner.open()
                    self._is_inner_open = True
                await self.inner.exists([PROBE_KEY])
        except BaseException as error:
            self._breaker.fail_probe()
            if not isinstance(error, Exception):
                raise
            logger.debug("a probe failed: %s", error)
        else:
            self._breaker.end_probe(self._clock.now_s() - began_s)

    async def _watched(self, call: Awaitable[list[bool]]) -> list[bool]:
        began_s, num_errors = self._clock.now_s(), self._num_errors()
        try:
            answers = await call
        except asyncio.CancelledError:
            if self._clock.now_s() - began_s > self._settings.slow_s:
                self._breaker.failed("given up by its caller")
            raise
        except (ConfigError, ProtocolError):
            raise  # the caller's fault
        except Exception as error:
            self._breaker.failed(error)
            raise
        if answers and not any(answers) and self._num_errors() > num_errors:
            self._breaker.failed("no page was served, and errors were counted")
        else:
            self._breaker.succeeded(self._clock.now_s() - began_s)
        return answers

    def _num_errors(self) -> int:
        return sum(self.inner.stats().errors.values())

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._num_rejected[name] += amount
