"""A store that does what a test tells it: fails, lies low, waits, and remembers who called.

    store = ScriptedStore()
    store.script("get", MISS, key=k3)                       # every get of k3
    store.script("put", Raise(OSError(28, "full")), call=3)  # the third put call
    gate = store.block("get", key=k1)                       # gets of k1 wait ...
    gate.reached.wait(5); gate.release()                    # ... until released, from any thread

Pages lie in a ``MemoryStore`` behind it (``store.inner``). What is not scripted is done as there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from hicache.tiers.arguments import check_pages, check_targets
from hicache.tiers.memory import MemoryStore
from hicache.tiers.store import PageTarget, Store, StoredPage, StoreStats
from hicache.types import PageKey, Regard

Operation = Literal["exists", "get", "put"]


class Simple(Enum):
    """Outcomes without a value of their own."""

    OK = "ok"
    """Done as in the store behind; to make an exception of one key or call."""
    MISS = "miss"
    """Answered with False, and nothing is done."""
    SHORT = "short"
    """A get fills the first half of its target, then answers with False; elsewhere a MISS."""
    FLIPPED = "flipped"
    """A get fills its target with one bit wrong, notices, and answers with False; elsewhere a MISS."""


OK, MISS, SHORT, FLIPPED = Simple.OK, Simple.MISS, Simple.SHORT, Simple.FLIPPED


@dataclass(frozen=True, slots=True)
class Raise:
    """The call raises ``error``; the keys before it in the batch are done."""

    error: BaseException


class Gate:
    """Calls that come here wait until it is released; for good, so later ones pass.

    ``reached`` is set once somebody waits here. *Thread*: any.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._lock = threading.Lock()
        self._is_released = False
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def release(self) -> None:
        """Let everybody pass."""
        with self._lock:
            self._is_released = True
            waiting, self._waiting = self._waiting, []
        for loop, passed in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_pass, passed)

    async def wait(self) -> None:
        """Wait until released."""
        loop = asyncio.get_running_loop()
        passed: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._is_released:
                return
            self._waiting.append((loop, passed))
        self.reached.set()
        await passed


Outcome: TypeAlias = Simple | Raise | Gate


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it came in."""

    operation: str
    keys: tuple[PageKey, ...]


@dataclass(slots=True)
class _Rule:
    operation: Operation
    outcome: Outcome
    key: PageKey | None
    call: int | None
    times: int | None
    calls: set[int] = field(default_factory=set)  # numbers of calls that have used it

    @property
    def rank(self) -> int:
        """More particular rules come first: key and call, key, call, neither."""
        return 2 * (self.key is not None) + (self.call is not None)

    def applies(self, key: PageKey, call: int) -> bool:
        return (
            (self.key is None or self.key == key)
            and (self.call is None or self.call == call)
            and (self.times is None or call in self.calls or len(self.calls) < self.times)
        )


class ScriptedStore(Store):
    """A ``MemoryStore`` with a script.

    Args:
        capacity_bytes: of the store behind.

    *Thread*: calls run on one event loop; scripting, releasing and ``calls`` are for any thread.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.inner = MemoryStore(capacity_bytes)
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._gates: list[Gate] = []
        self._calls: list[Call] = []
        self._num_scripted = {"pages_missed": 0, "pages_corrupt": 0, "pages_refused": 0}

    # ---- the script ------------------------------------------------------------------------------------------

    def script(
        self,
        operation: Operation,
        outcome: Outcome,
        *,
        key: PageKey | None = None,
        call: int | None = None,
        times: int | None = None,
    ) -> None:
        """Say what happens from now on; of equally particular rules the latest counts.

        Args:
            operation: ``exists``, ``get`` or ``put``.
            outcome: OK, MISS, SHORT, FLIPPED, ``Raise(error)`` or a ``Gate``.
            key: only for this page.
            call: only in the n-th call of ``operation``, counted from 1 and from the store's start.
            times: only in so many calls.
        """
        with self._lock:
            self._rules.append(_Rule(operation, outcome, key, call, times))

    def block(self, operation: Operation, *, key: PageKey | None = None, call: int | None = None) -> Gate:
        """Make calls wait; the gate that is returned lets them pass, and then they are done as usual."""
        gate = Gate()
        with self._lock:
            self._gates.append(gate)
        self.script(operation, gate, key=key, call=call)
        return gate

    def release(self) -> None:
        """Release every gate that ``block`` made."""
        with self._lock:
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()

    def unscript(self) -> None:
        """Forget the script; gates are released."""
        with self._lock:
            self._rules.clear()
        self.release()

    @property
    def calls(self) -> list[Call]:
        """All calls so far, in the order in which they came."""
        with self._lock:
            return list(self._calls)

    def keys_of(self, operation: str) -> list[PageKey]:
        """The keys of all calls of one operation, one after another."""
        return [key for call in self.calls if call.operation == operation for key in call.keys]

    # ---- the store -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._record("open", ())
        await self.inner.open()

    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        number = self._record("exists", keys)
        answers = await self.inner.exists(keys)
        for position, key in enumerate(keys):
            if await self._outcome("exists", key, number) is not OK:
                answers[position] = False
        return answers

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        number = self._record("get", [target.key for target in targets])
        check_targets(targets)
        answers = await self.inner.get([])  # a closed store refuses before any script
        for target in targets:
            outcome = await self._outcome("get", target.key, number)
            if outcome is OK:
                answers += await self.inner.get([target])
                continue
            if outcome in (SHORT, FLIPPED):
                self._fill_badly(target, outcome)
            with self._lock:
                self._num_scripted["pages_missed"] += 1
                self._num_scripted["pages_corrupt"] += outcome is not MISS
            answers.append(False)
        return answers

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        number = self._record("put", [page.key for page in pages])
        check_pages(pages)
        await self.inner.put([])
        answers: dict[PageKey, bool] = {}
        for page in pages:
            if await self._outcome("put", page.key, number) is not OK:
                answers[page.key] = False
            elif page.parent is not None and answers.get(page.parent) is False:
                answers[page.key] = False  # as in every store: out of reach without its parent
                with self._lock:
                    self._num_scripted["pages_refused"] += 1
            else:
                (answers[page.key],) = await self.inner.put([page])
        return [answers[page.key] for page in pages]

    async def delete(self, keys: Sequence[PageKey]) -> int:
        self._record("delete", keys)
        return await self.inner.delete(keys)

    async def hint(self, keys: Sequence[PageKey], regard: Regard) -> None:
        """Recorded by the regard's name in small letters."""
        self._record(regard.name.lower(), keys)
        await self.inner.hint(keys, regard)

    async def clear(self) -> int:
        self._record("clear", ())
        return await self.inner.clear()

    async def close(self) -> None:
        self._record("close", ())
        self.release()
        await self.inner.close()

    def stats(self) -> StoreStats:
        stats = self.inner.stats()
        with self._lock:
            stats.pages_missed += self._num_scripted["pages_missed"]
            stats.pages_corrupt += self._num_scripted["pages_corrupt"]
            stats.pages_refused += self._num_scripted["pages_refused"]
        return stats

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _record(self, operation: str, keys: Sequence[PageKey]) -> int:
        with self._lock:
            self._calls.append(Call(operation, tuple(keys)))
            return sum(call.operation == operation for call in self._calls)

    async def _outcome(self, operation: Operation, key: PageKey, call: int) -> Simple:
        with self._lock:
            rules = [rule for rule in self._rules if rule.operation == operation and rule.applies(key, call)]
            if not rules:
                return OK
            rule = max(enumerate(rules), key=lambda item: (item[1].rank, item[0]))[1]
            rule.calls.add(call)
        match rule.outcome:
            case Raise(error):
                raise error
            case Gate() as gate:
                await gate.wait()
                return OK
            case simple:
                return simple

    def _fill_badly(self, target: PageTarget, outcome: Simple) -> None:
        raw = self.inner.raw(target.key)
        payload = target.payload.cast("B")
        if raw is None or not len(payload):
            return
        stored = bytearray(raw[-len(payload) :])
        if outcome is SHORT:
            half = len(payload) // 2
            payload[:half] = stored[:half]
        else:
            stored[len(stored) // 2] ^= 0x10
            payload[: len(stored)] = stored


def _pass(passed: asyncio.Future[None]) -> None:
    if not passed.done():
        passed.set_result(None)
