"""Caches with a Redis store, and what is done to them in tests: small pools, pages of 16 tokens, every byte checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hicache.cache import HiCache
from hicache.config import HiCacheConfig, load_config
from hicache.replay.simulated import Served, SimulatedEngine
from hicache.replay.stamps import PageChecker
from hicache.testing.store_pages import make_target
from hicache.tiers.redis import RedisStore
from hicache.tiers.store import StoredPage
from hicache.types import DEFAULT_NAMESPACE, Namespace
from hicache.workload.records import Request
from hicache.workload.synthetic import SessionSource
from hicache.workload.tokens import Tokens, stream_tokens

PAGE_TOKENS = 16
PAGE_BYTES = 16 * PAGE_TOKENS


def small_config(stores: Sequence[Mapping[str, object]], **overrides: object) -> HiCacheConfig:
    """Room for 40 pages in L1 and 60 in L2; what is computed goes to the stores.

    Args:
        overrides: further keys, with ``__`` for a dot.
    """
    keys: dict[str, object] = {
        "model.page_size": PAGE_TOKENS,
        "tiers.device.capacity": 40 * PAGE_BYTES,
        "tiers.host.capacity": 60 * PAGE_BYTES,
        "tiers.stores": list(stores),
        "policy.prefetch.min_tokens": 0,
        "policy.watermarks.device": {"low": 0, "high": 0},
    }
    keys |= {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config("redis", overrides=keys, environ={})


class CheckedCache:
    """A cache, an engine that uses it, and a check of every page that enters or leaves L3."""

    def __init__(self, config: HiCacheConfig, **settings: Any) -> None:  # Any: HiCache's
        self.checker = PageChecker()
        self.cache = HiCache(config, on_page=self.checker.check, **settings)
        self._engine = SimulatedEngine(self.cache, chunk_tokens=4 * PAGE_TOKENS)

    def serve(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> Served:
        """One request without an answer; every reused byte was the right one."""
        served = self._engine.serve(tokens, np.empty(0, np.int32), namespace=namespace)
        assert served.mismatches == 0
        assert self.checker.mismatches == 0
        return served

    def store_only(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
        """Compute a prompt, and leave its pages in L3 alone."""
        self.serve(tokens, namespace)
        assert self.cache.flush()
        self.cache.reset()

    def close(self) -> None:
        """Close the cache; it must be sound to the end."""
        assert self.cache.audit() == []
        self.cache.close(flush=False)


def prompt(name: int, num_pages: int = 10) -> Tokens:
    """Tokens of ``num_pages`` pages and one more token, so that all pages may be reused."""
    return stream_tokens(name + 1, 0, num_pages * PAGE_TOKENS + 1, seed=0)


def rounds(num_rounds: int, num_prompts: int, num_pages: int) -> Iterator[Request]:
    """The same prompts again and again: every round after the first can hit all pages of each."""
    length = num_pages * PAGE_TOKENS + 1
    for turn in range(num_rounds):
        for session in range(num_prompts):
            index = turn * num_prompts + session
            yield Request(
                index=index,
                arrival_s=float(index),
                prompt=SessionSource(0, session, 0, length, 0),
                output=SessionSource(0, session, length, length, 0),
                session=None,
                turn=turn + 1,
                continues=None,
                continued_by=None,
            )


RedisTest = Callable[[RedisStore], Coroutine[Any, Any, None]]  # Any: asyncio's


def run_on_redis(url: str, test: RedisTest, **settings: Any) -> None:  # Any: RedisStore's
    """Open a store on a server, run the test, and close it; bounded."""

    async def main() -> None:
        store = RedisStore(url, **settings)
        await store.open()
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(asyncio.wait_for(main(), timeout=120))


async def read(store: RedisStore, page: StoredPage) -> bool:
    """Whether a page is a hit; a hit must be right."""
    target = make_target(page.key, page.payload.nbytes)
    (hit,) = await store.get([target])
    assert not hit or target.payload == page.payload
    return hit
