"""A store whose calls are spans."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.tiers.store import PageTarget, Store, StoredPage, StoreStats
from hicache.tracing import Tracing
from hicache.types import PageKey


class TracedStore(Store):
    """Tells of each batch call to one store; see ``Store`` for all else.

    Args:
        inner: the store; opened and closed with this one.
        name: attribute ``hicache.store`` of its spans.
    """

    def __init__(self, inner: Store, name: str, tracing: Tracing) -> None:
        self.inner = inner
        self._name = name
        self._tracing = tracing

    @property
    def is_private(self) -> bool:
        return self.inner.is_private

    async def open(self) -> None:
        await self.inner.open()

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

    async def delete(self, keys: Sequence[PageKey]) -> int:
        return await self.inner.delete(keys)

    async def cool(self, keys: Sequence[PageKey]) -> None:
        await self.inner.cool(keys)

    async def warm(self, keys: Sequence[PageKey]) -> None:
        await self.inner.warm(keys)

    async def clear(self) -> int:
        return await self.inner.clear()

    async def resize(self, capacity_bytes: int) -> None:
        await self.inner.resize(capacity_bytes)

    async def close(self) -> None:
        await self.inner.close()

    def stats(self) -> StoreStats:
        return self.inner.stats()
