"""Reported failures of Redis clients and of caches on Redis, each with its right value."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from hicache.config import load_config
from hicache.errors import ConfigError
from hicache.testing.redis_caches import run_on_redis as run
from hicache.testing.redis_server import RedisServer
from hicache.testing.store_pages import make_chain, make_key, make_page, make_target
from hicache.testing.tcp_proxy import TcpProxy
from hicache.tiers.redis import RedisStore
from hicache.tiers.redis_node import RedisNode
from hicache.tiers.store import PageTarget, StoredPage

pytestmark = pytest.mark.redis


def test_a_thousand_cancelled_reads_put_no_connection_out_of_step(server: RedisServer) -> None:
    """O-50: each at a moment of its own; what is read in between is always the page that was asked for."""
    pages = [make_page(n) for n in range(20)]
    rng = random.Random(50)

    async def read(store: RedisStore, page: StoredPage) -> None:
        target = make_target(page.key, page.payload.nbytes)
        assert await store.get([target]) == [True]
        assert target.payload == page.payload

    async def test(store: RedisStore) -> None:
        await store.put(pages)
        num_cancelled = 0
        for _ in range(1000):
            call = asyncio.ensure_future(read(store, rng.choice(pages)))
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            call.cancel()
            other = rng.choice(pages)
            await read(store, other)
            num_cancelled += (await asyncio.gather(call, return_exceptions=True))[0] is not None
        assert num_cancelled > 500
        assert store.stats().pages_corrupt == 0

    run(server.url, test, max_connections=2)


def test_every_byte_value_comes_back(server: RedisServer) -> None:
    """O-52."""
    content = bytes(range(256)) * 4096

    async def test(store: RedisStore) -> None:
        page = StoredPage(make_key("bytes"), None, "full", memoryview(content))
        assert await store.put([page]) == [True]
        target = PageTarget(page.key, "full", memoryview(bytearray(len(content))))
        assert await store.get([target]) == [True]
        assert bytes(target.payload) == content

    run(server.url, test)


def test_a_url_that_asks_for_decoding_is_refused() -> None:
    """O-52: options behind a question mark are the client library's, not ours."""
    store = {"kind": "redis", "url": "redis://localhost:6379/0?decode_responses=True"}
    with pytest.raises(ConfigError, match=r"tiers.stores.0.url"):
        load_config("cpu", overrides={"tiers.stores": [store]}, environ={})


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_page_over_the_limit_of_a_value_is_kept_in_parts(server: RedisServer, lost: int) -> None:
    """O-53: a page of 3 MiB, values of 1 MiB; without one of its parts it is a miss, and deleting takes all."""
    content = random.Random(53).randbytes(3 << 20)
    page = StoredPage(make_key("large"), None, "full", memoryview(content))
    target = PageTarget(page.key, "full", memoryview(bytearray(len(content))))

    async def test(store: RedisStore) -> None:
        assert await store.put([page]) == [True]
        names = server.names()
        assert len(names) == 4
        assert max(server.ask("STRLEN", name) for name in names) <= 1 << 20
        assert await store.get([target]) == [True]
        assert bytes(target.payload) == content
        parts = sorted(name for name in names if b":" in name.rpartition(b"}")[2])
        server.ask("DEL", parts[lost])
        assert await store.get([target]) == [False]
        assert await store.put([page]) == [True]
        assert await store.delete([page.key]) == 1
        assert server.names() == []

    run(server.url, test, value_bytes=1 << 20)


def test_a_batch_is_one_round_trip_on_one_connection(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-72: a prefix of 64 pages."""
    trips: list[int] = []
    ask = RedisNode.run

    async def counted(node: RedisNode, commands: Any) -> Any:  # Any: as it is
        trips.append(len(commands))
        return await ask(node, commands)

    chain = make_chain(1, 64)

    async def test(store: RedisStore) -> None:
        monkeypatch.setattr(RedisNode, "run", counted)
        await store.put(chain)
        await store.exists([page.key for page in chain])
        assert await store.get([make_target(page.key, page.payload.nbytes) for page in chain]) == [True] * 64
        assert trips == [64, 64, 64]

    with TcpProxy(server.port) as proxy:
        run(f"redis://127.0.0.1:{proxy.port}", test)
        assert proxy.num_connections == 1
