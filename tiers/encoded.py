"""A store whose payloads are compressed or encrypted on the way in, and read back whatever they are.

::

    put   payload ── codec, own threads ──> bytes and codec ──> the store behind, which records both
    get   the store behind ──> a plain page lands in its target
                           ──> an encoded one is handed over, and decoded here, own threads
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hicache.errors import CorruptPayloadError
from hicache.tiers.arguments import check_pages
from hicache.tiers.codecs import Codec
from hicache.tiers.counters import StoreCounters
from hicache.tiers.framing import UnsupportedFormatError
from hicache.tiers.store import PageTarget, Store, StoredPage, StoreStats
from hicache.tiers.workers import Workers
from hicache.tiers.wrapper import StoreWrapper
from hicache.types import PageKey

DEFAULT_THREADS = 2


@dataclass(slots=True)
class _Received:
    """One target, and what the store behind handed over for it."""

    target: PageTarget
    codec: int = 0
    stored: bytes | None = None

    def take(self, codec: int, stored: memoryview) -> None:
        self.codec, self.stored = codec, bytes(stored)


class EncodedStore(StoreWrapper):
    """Pages of every codec, in any store.

    Args:
        inner: keeps the encoded bytes; opened and closed with this one.
        codec: how pages are written.
        num_threads: that encode and decode.

    A page that cannot be decoded is a miss, counted under ``errors``: ``corrupt`` and removed (damaged, or not
    encrypted where the codec encrypts), or
    ``unsupported`` (another key, a codec of a newer version) and left to its owner.

    *Thread*: one event loop.
    """

    def __init__(self, inner: Store, codec: Codec, *, num_threads: int = DEFAULT_THREADS) -> None:
        super().__init__(inner)
        self.codec = codec
        self._num_threads = num_threads
        self._workers: Workers | None = None
        self._counters = StoreCounters(inner.stats().kind)

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        received = [_Received(target) for target in targets]
        answers = await self.inner.get([replace(each.target, receive=each.take) for each in received])
        encoded = [n for n, each in enumerate(received) if answers[n] and each.stored is not None]
        spoilt = self._refuse_plain(received, answers) if self.codec.settings.encrypts else []

        def decode(n: int) -> None:
            answers[n] = self._decode(received[n], spoilt)

        if encoded:
            await self._in_threads([partial(decode, n) for n in encoded])
        if spoilt:
            await self.inner.delete(spoilt)
        return answers

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        if self.codec.settings.is_plain or not pages:
            return await self.inner.put(pages)
        check_pages(pages)
        encoded: list[StoredPage] = list(pages)

        def encode(n: int) -> None:
            page = pages[n]
            codec, stored = self.codec.encode(page.payload, page.key, page.component)
            encoded[n] = replace(page, payload=stored, codec=codec)

        await self._in_threads([partial(encode, n) for n in range(len(pages))])
        return await self.inner.put(encoded)

    async def close(self) -> None:
        workers, self._workers = self._workers, None
        try:
            await self.inner.close()
        finally:
            if workers is not None:
                workers.close()

    def stats(self) -> StoreStats:
        """Those of the store behind, bytes as stored; what it read but could not be decoded is in ``errors``."""
        stats, own = self.inner.stats(), self._counters.totals()
        errors = {name: stats.errors.get(name, 0) + count for name, count in own.errors.items()}
        return replace(
            stats,
            pages_corrupt=stats.pages_corrupt + own.pages_corrupt,
            errors={**stats.errors, **errors},
        )

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _refuse_plain(self, received: Sequence[_Received], answers: list[bool]) -> list[PageKey]:
        """Pages as they are, which came without being decoded, are misses where all are to be encrypted."""
        plain = [n for n, each in enumerate(received) if answers[n] and each.stored is None]
        for n in plain:
            answers[n] = False
            self._counters.add(pages_corrupt=1)
            self._counters.error("corrupt", CorruptPayloadError("the page is not encrypted"))
        return [received[n].target.key for n in plain]

    def _decode(self, received: _Received, spoilt: list[PageKey]) -> bool:
        target = received.target
        assert received.stored is not None
        try:
            self.codec.decode(received.codec, received.stored, target.key, target.component, target.payload)
        except CorruptPayloadError as error:
            self._counters.add(pages_corrupt=1)
            self._counters.error("corrupt", error)
            spoilt.append(target.key)
            return False
        except UnsupportedFormatError as error:
            self._counters.error("unsupported", error)
            return False
        return True

    async def _in_threads(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run the jobs in one hop for each thread."""
        if self._workers is None:
            self._workers = Workers(self._num_threads, name="hicache-codec")
        stop = threading.Event()
        left = iter(jobs)
        lock = threading.Lock()

        def share() -> None:
            while not stop.is_set():
                with lock:
                    job = next(left, None)
                if job is None:
                    return
                job()

        await self._workers.run([share] * min(self._num_threads, len(jobs)), stop)
