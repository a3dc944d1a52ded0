"""A store whose calls are spans."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.tiers.store import PageTarget, Store, StoredPage
from hicache.tiers.wrapper import StoreWrapper
from hicache.tracing import Tracing
from hicache.types import PageKey


class TracedStore(StoreWrapper):
    """Tells of each batch call to one store; see ``Store`` for all else.

    Args:
        inner: the store; opened and closed with this one.
        name: attribute ``hicache.store`` of its spans.
    """

    def __init__(self, inner: Store, name: str, tracing: Tracing) -> None:
        super().__init__(inner)
        self._name = name
        self._tracing = tracing

    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        with self._tracing.span("hicache.exists", store=self._name, pages=len(keys)) as span:
            answers = await self.inner.exists(keys)
            span.note(found_pages=sum(answers))
        return answers

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        with self._tracing.span("hicache.get", store=self._name, pages=len(targets)) as span:
            answers = await self.inner.get(targets)
            span.note(found_pages=sum(answers))
        return answers

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        with self._tracing.span("hicache.put", store=self._name, pages=len(pages)) as span:
            answers = await self.inner.put(pages)
            span.note(stored_pages=sum(answers))
        return answers
