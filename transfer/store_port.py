"""The store as those who work for the engine speak to it: each call bounded and timed, each fault told once."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from hicache.errors import TierUnavailableError
from hicache.tiers.store import PageTarget, Store, StoredPage
from hicache.tracing import Tracing
from hicache.transfer.jobs import Direction, Failure
from hicache.transfer.stats import PROBE, TransferCounters
from hicache.transfer.store_calls import StoreCalls, failure_of
from hicache.types import PageKey

OnPage = Callable[[str, str, PageKey, memoryview], None]
"""Called as ``(op, component, key, payload)``; what it raises turns the page into a failure."""

_CALLED = {Direction.STORE: "put", Direction.FETCH: "get", PROBE: "probe"}


@dataclass(frozen=True, slots=True)
class Answers:
    """What a call said of each of its pages, and how long it took."""

    of_pages: Sequence[bool]
    seconds: float

    @property
    def num_leading(self) -> int:
        """Pages before the first whose answer is no."""
        return self.of_pages.index(False) if False in self.of_pages else len(self.of_pages)


class StorePort:
    """One store, its calls, and what is counted of them.

    Args:
        store: may be exchanged between calls.
        calls: bounds them.
        on_page: checks a page's payload; see ``num_good``.

    *Thread*: one event loop.
    """

    def __init__(
        self,
        store: Store,
        *,
        calls: StoreCalls,
        counters: TransferCounters,
        on_page: OnPage | None,
        tracing: Tracing,
    ) -> None:
        self.store = store
        self.calls = calls
        self.counters = counters
        self.tracing = tracing
        self._on_page = on_page

    async def ask(
        self,
        what: str,
        call: Coroutine[Any, Any, Sequence[bool]],  # Any: what a coroutine is sent and yields
        num_pages: int,
        timeout_s: float | None = None,
    ) -> Answers | Failure:
        """Make a call that answers for each page; a ``Failure``, logged, if it raised.

        Args:
            what: a ``Direction`` of the store, or ``PROBE``.
            timeout_s: default: the limit of all calls.
        """
        began = time.perf_counter()
        try:
            answers = await self.calls.run(call, timeout_s)
            if len(answers) != num_pages:
                raise TierUnavailableError(
                    f"the store answered {len(answers)} of {num_pages} {_CALLED[what]}s"
                )
        except Exception as error:  # noqa: BLE001  whatever a store raises is a failure and no more
            failure = failure_of(error)
            self.counters.warn(failure, f"a {_CALLED[what]}", error)
            return failure
        finally:
            seconds = time.perf_counter() - began
            self.counters.spent(what, seconds)
        return Answers(answers, seconds)

    def num_good(self, op: str, pages: Sequence[StoredPage | PageTarget]) -> int:
        """How many leading pages pass ``on_page``; ``op`` is ``store`` or ``fetch``."""
        if self._on_page is None:
            return len(pages)
        for index, page in enumerate(pages):
            try:
                self._on_page(op, page.component, page.key, page.payload)
            except Exception as error:  # noqa: BLE001  the check's verdict, whatever its type
                self.counters.warn(Failure.STAMP, f"the check of a page to {op}", error)
                return index
        return len(pages)
