"""A store in this process's memory: for tests, and to try a configuration without a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hicache.errors import CorruptPayloadError, TierUnavailableError
from hicache.tiers.arguments import check_keys, check_pages, check_targets
from hicache.tiers.counters import StoreCounters
from hicache.tiers.framing import (
    CODEC_NONE,
    HEADER_BYTES,
    UnsupportedFormatError,
    check_payload,
    decode_header,
    encode_header,
)
from hicache.tiers.page_index import Outcome, PageIndex
from hicache.tiers.store import PageTarget, Store, StoredPage, StoreStats
from hicache.types import PageKey, Regard


class MemoryStore(Store):
    """Framed pages in a dictionary; the same checks, quota and order of eviction as on disk.

    Args:
        capacity_bytes: limit of all pages, ``HEADER_BYTES`` of each included; None for none.

    *Thread*: one event loop; between two pages it lets other tasks run. Closing forgets everything.
    """

    kind = "memory"

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._counters = StoreCounters(self.kind)
        self._index = PageIndex(capacity_bytes)
        self._blobs: dict[PageKey, bytearray] = {}  # header and payload, as on any other medium
        self._is_open = False

    async def open(self) -> None:
        self._is_open = True

    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        self._require_open()
        check_keys(keys)
        return [self._index.find(key) is not None for key in keys]

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        self._require_open()
        check_targets(targets)
        answers = []
        for target in targets:
            answers.append(self._get_one(target))
            await asyncio.sleep(0)
        return answers

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        self._require_open()
        check_pages(pages)
        answers: dict[PageKey, bool] = {}
        for page in pages:
            if page.key not in answers:
                # A page whose parent was not taken would be out of reach.
                orphaned = page.parent is not None and answers.get(page.parent) is False
                answers[page.key] = self._put_one(page, orphaned=orphaned)
                await asyncio.sleep(0)
        return [answers[page.key] for page in pages]

    async def delete(self, keys: Sequence[PageKey]) -> int:
        self._require_open()
        check_keys(keys)
        return sum(self._remove(key) for key in keys)

    async def hint(self, keys: Sequence[PageKey], regard: Regard) -> None:
        self._require_open()
        check_keys(keys)
        self._index.hint(keys, regard)

    async def clear(self) -> int:
        self._require_open()
        return sum(self._remove(key) for key in list(self._blobs))

    async def resize(self, capacity_bytes: int) -> None:
        self._require_open()
        self._capacity_bytes = self._index.capacity_bytes = capacity_bytes
        excess_bytes = self._index.used_bytes - capacity_bytes
        victims = self._index.evict(excess_bytes) if excess_bytes > 0 else ()
        for victim in victims:
            self._remove(victim.key)
        self._counters.add(pages_evicted=len(victims))

    async def close(self) -> None:
        self._is_open = False
        self._blobs.clear()
        self._index = PageIndex(self._capacity_bytes)

    def stats(self) -> StoreStats:
        return self._counters.snapshot(self._index)

    def check_integrity(self) -> list[str]:
        """One sentence for each disagreement between index and pages; empty when all is well."""
        findings = self._index.check_integrity()
        held_bytes = sum(len(blob) for blob in self._blobs.values())
        if held_bytes != self._index.used_bytes:
            findings.append(f"pages take {held_bytes} bytes, the index says {self._index.used_bytes}")
        return findings

    def raw(self, key: PageKey) -> bytearray | None:
        """The stored bytes of a page, header first, to look at or to spoil in a test."""
        return self._blobs.get(key)

    # ---- one page --------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if not self._is_open:
            raise TierUnavailableError("memory store: not open; await open() first")

    def _get_one(self, target: PageTarget) -> bool:
        blob = self._blobs.get(target.key)
        if blob is None:
            self._index.drop(target.key)
            self._counters.add(pages_missed=1)
            return False
        payload = memoryview(blob)[HEADER_BYTES:]
        try:
            header = decode_header(blob)
            header.check_identity(target.key)
            check_payload(header, payload)
            is_right = target.check(header)
        except CorruptPayloadError:
            self._remove(target.key)
            self._counters.add(pages_corrupt=1, pages_missed=1)
            return False
        except UnsupportedFormatError as error:
            self._index.hide(target.key)
            self._counters.add(pages_missed=1)
            self._counters.error("unsupported", error)
            return False
        if not is_right:
            self._counters.add(pages_missed=1)
            self._counters.error(
                "mismatch", f"page {target.key.hex()} is not the {target.component} asked for"
            )
            return False
        if header.codec == CODEC_NONE:
            target.payload.cast("B")[:] = payload
        target.hand_over(header, payload)
        self._index.touch(target.key)
        self._counters.add(pages_read=1, bytes_read=len(payload))
        return True

    def _put_one(self, page: StoredPage, *, orphaned: bool) -> bool:
        size_bytes = HEADER_BYTES + page.payload.nbytes
        admission = None if orphaned else self._index.reserve(page.key, page.parent, size_bytes)
        if admission is None or admission.outcome is Outcome.REFUSED:
            self._counters.add(pages_refused=1)
            return False
        if admission.outcome is not Outcome.GRANTED:
            return admission.outcome is Outcome.PRESENT
        for victim in admission.victims:
            del self._blobs[victim.key]
            self._index.drop(victim.key)
        header = encode_header(page.key, page.component, page.payload, parent=page.parent, codec=page.codec)
        blob = bytearray(header)
        blob += page.payload.cast("B")
        self._blobs[page.key] = blob
        self._index.commit(page.key)
        self._counters.add(
            pages_written=1, bytes_written=page.payload.nbytes, pages_evicted=len(admission.victims)
        )
        return True

    def _remove(self, key: PageKey) -> bool:
        self._index.drop(key)
        return self._blobs.pop(key, None) is not None
