"""A store around another one."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.tiers.store import PageTarget, Store, StoredPage, StoreStats
from hicache.types import PageKey, Regard


class StoreWrapper(Store):
    """Passes every call on; what a wrapper adds, it overrides.

    Args:
        inner: the store; opened and closed with this one.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def is_private(self) -> bool:
        return self.inner.is_private

    async def open(self) -> None:
        await self.inner.open()

    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        return await self.inner.exists(keys)

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        return await self.inner.get(targets)

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        return await self.inner.put(pages)

    async def delete(self, keys: Sequence[PageKey]) -> int:
        return await self.inner.delete(keys)

    async def hint(self, keys: Sequence[PageKey], regard: Regard) -> None:
        await self.inner.hint(keys, regard)

    async def clear(self) -> int:
        return await self.inner.clear()

    async def resize(self, capacity_bytes: int) -> None:
        await self.inner.resize(capacity_bytes)

    async def close(self) -> None:
        await self.inner.close()

    def stats(self) -> StoreStats:
        return self.inner.stats()
