"""The Redis store: settings, connections out of step, room and time, names and parts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hicache.errors import TierTimeoutError, TierUnavailableError
from hicache.testing.redis_caches import read
from hicache.testing.redis_caches import run_on_redis as run
from hicache.testing.redis_server import RedisServer
from hicache.testing.store_pages import PAYLOAD_BYTES, make_chain, make_key, make_page
from hicache.testing.tcp_proxy import TcpProxy
from hicache.tiers.framing import encode_header
from hicache.tiers.redis import RedisStore
from hicache.tiers.redis_names import PageNames
from hicache.tiers.store import StoredPage

pytestmark = pytest.mark.redis

NAMES = PageNames("hicache", "")


class Full:
    """A server without room for anything new."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def __enter__(self) -> None:
        self._server.ask("CONFIG SET", "maxmemory", 1)

    def __exit__(self, *error: object) -> None:
        self._server.ask("CONFIG SET", "maxmemory", 0)


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[TcpProxy]:
    with TcpProxy(server.port) as proxy:
        yield proxy


def through(proxy: TcpProxy) -> str:
    return f"redis://127.0.0.1:{proxy.port}"


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"ttl_s": 0.0}, "ttl_s is 0, at least 0.001 expected"),
        ({"value_bytes": 0}, "value_bytes is 0"),
        ({"timeout_s": 0.0}, "timeout_s is 0"),
        ({"max_connections": 0}, "max_connections is 0"),
        ({"prefix": "a{b"}, "braces choose the slot"),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_by_name(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RedisStore("redis://h", **settings)


# ---- connections -----------------------------------------------------------------------------------------------------


def test_a_connection_that_owes_the_answer_of_a_cancelled_call_is_thrown_away(proxy: TcpProxy) -> None:
    async def test(store: RedisStore) -> None:
        first, second = make_page("first"), make_page("second")
        await store.put([first, second])
        assert proxy.num_connections == 1
        proxy.hold()
        call = asyncio.ensure_future(read(store, first))
        assert await asyncio.to_thread(proxy.holding.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        proxy.release()
        # On the old connection the answer to the first question would come now.
        assert await read(store, second)
        assert proxy.num_connections == 2
        assert store.stats().pages_corrupt == 0

    run(through(proxy), test, max_connections=1)


def test_a_connection_whose_answer_came_too_late_is_thrown_away(proxy: TcpProxy) -> None:
    async def test(store: RedisStore) -> None:
        first, second = make_page("first"), make_page("second")
        await store.put([first, second])
        proxy.hold()
        with pytest.raises(TierTimeoutError, match=r"did not answer within 1 s"):
            await read(store, first)
        proxy.release()
        assert await read(store, second)
        assert store.stats().pages_corrupt == 0

    run(through(proxy), test, timeout_s=1.0, max_connections=1)


def test_a_connection_whose_call_ended_well_is_used_again(proxy: TcpProxy) -> None:
    async def test(store: RedisStore) -> None:
        for n in range(5):
            await store.put([make_page(n)])
            assert await read(store, make_page(n))
        assert not await read(store, make_page("missing"))
        assert proxy.num_connections == 1

    run(through(proxy), test)


def test_calls_beyond_the_most_connections_wait_for_one(proxy: TcpProxy) -> None:
    async def test(store: RedisStore) -> None:
        chain = make_chain(1, 12)
        await store.put(chain)
        assert await asyncio.gather(*(read(store, page) for page in chain)) == [True] * 12
        assert proxy.num_connections <= 3

    run(through(proxy), test, max_connections=3)


def test_a_reset_is_an_error_and_the_next_call_connects_anew(proxy: TcpProxy) -> None:
    async def test(store: RedisStore) -> None:
        page = make_page("a")
        await store.put([page])
        proxy.reset()
        with pytest.raises(TierUnavailableError, match=r"redis 127\.0\.0\.1"):
            await read(store, page)
        proxy.accept()
        assert await read(store, page)

    run(through(proxy), test)


def test_a_server_that_was_started_again_is_found_again(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:

        async def test(store: RedisStore) -> None:
            page = make_page("a")
            await store.put([page])
            server.stop()
            with pytest.raises(TierUnavailableError):
                await read(store, page)
            server.start()
            assert not await read(store, page)  # it kept nothing
            assert await store.put([page]) == [True]
            assert await read(store, page)

        run(server.url, test)


def test_closing_waits_for_what_runs_no_longer_than_its_time_limit(proxy: TcpProxy) -> None:
    async def test(store: RedisStore) -> None:
        await store.put([make_page("a")])
        proxy.hold()
        call = asyncio.ensure_future(read(store, make_page("a")))
        assert await asyncio.to_thread(proxy.holding.wait, 10)
        await store.close()
        with pytest.raises(TierTimeoutError):
            await call
        with pytest.raises(TierUnavailableError, match="not open"):
            await read(store, make_page("a"))

    run(through(proxy), test, timeout_s=1.0)


def test_closing_that_is_given_up_leaves_no_connection_open(proxy: TcpProxy) -> None:
    async def test(store: RedisStore) -> None:
        await store.put([make_page("a")])
        proxy.hold()
        call = asyncio.ensure_future(read(store, make_page("a")))
        assert await asyncio.to_thread(proxy.holding.wait, 10)
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run(through(proxy), test)  # a connection left open is a warning, and a warning is an error


# ---- room and time ---------------------------------------------------------------------------------------------------


def test_a_server_without_room_refuses_a_page_and_what_hangs_below_it(tmp_path: Path) -> None:
    with RedisServer(tmp_path, settings=["maxmemory 8mb", "maxmemory-policy noeviction"]) as server:

        async def test(store: RedisStore) -> None:
            large = StoredPage(make_key("big"), None, "full", memoryview(bytes(1 << 20)))
            fill = [make_page(f"fill {n}", num_bytes=1 << 20) for n in range(9)]
            answers = await store.put(fill)
            assert answers[0] is True
            assert answers[-1] is False
            child = make_page("child", "big", num_bytes=10)
            assert await store.put([large, child]) == [False, False]
            assert await store.exists([large.key, child.key]) == [False, False]
            stats = store.stats()
            assert stats.pages_refused == answers.count(False) + 2
            assert stats.errors == {}
            for page, stored in zip(fill, answers, strict=True):
                assert await read(store, page) == stored

        run(server.url, test)


@pytest.mark.parametrize("value_bytes", [300, 1 << 20], ids=["cut", "whole"])
def test_a_full_server_takes_what_it_has_already(server: RedisServer, value_bytes: int) -> None:
    async def test(store: RedisStore) -> None:
        chain = make_chain(1, 3)
        await store.put(chain[:2])
        with Full(server):
            assert await store.put(chain) == [True, True, False]
            assert [await read(store, page) for page in chain] == [True, True, False]
        assert store.stats().pages_refused == 1
        assert await store.put(chain) == [True] * 3

    run(server.url, test, value_bytes=value_bytes)


def test_a_page_that_the_server_evicted_is_a_miss(tmp_path: Path) -> None:
    with RedisServer(tmp_path, settings=["maxmemory 8mb", "maxmemory-policy allkeys-lru"]) as server:

        async def test(store: RedisStore) -> None:
            pages = [make_page(n, num_bytes=1 << 20) for n in range(16)]
            for page in pages:
                assert await store.put([page]) == [True]
            hits = [await read(store, page) for page in pages]
            assert hits[-1]
            assert not hits[0]
            stats = store.stats()
            assert (stats.pages_missed, stats.pages_corrupt) == (hits.count(False), 0)

        run(server.url, test)


@pytest.mark.parametrize(("refresh", "expected"), [(True, "renewed"), (False, "left")])
@pytest.mark.parametrize("value_bytes", [300, 1 << 20], ids=["cut", "whole"])
def test_reading_renews_the_ttl_where_that_is_asked_for(
    server: RedisServer, refresh: bool, expected: str, value_bytes: int
) -> None:
    async def test(store: RedisStore) -> None:
        page = make_page("a")
        await store.put([page])
        names = server.names()
        with server.client as client:
            assert len(names) == (1 if value_bytes > PAYLOAD_BYTES else 5)
            assert all(590_000 < int(client.pttl(name)) <= 600_000 for name in names)
            for name in names:
                client.pexpire(name, 5000)
            assert await read(store, page)
            renewed = {int(client.pttl(name)) > 5000 for name in names}
        assert renewed == {expected == "renewed"}

    run(server.url, test, ttl_s=600.0, refresh_ttl=refresh, value_bytes=value_bytes)


def test_without_a_ttl_a_page_stays(server: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        await store.put([make_page("a")])
        with server.client as client:
            assert client.pttl(NAMES.page(make_key("a"))) == -1

    run(server.url, test)


# ---- identity --------------------------------------------------------------------------------------------------------


def test_prefixes_and_namespaces_never_meet_and_each_clears_its_own(server: RedisServer) -> None:
    async def main() -> None:
        stores = [
            RedisStore(server.url, prefix=prefix, namespace=namespace)
            for prefix, namespace in (("hicache", "m1"), ("hicache", "m2"), ("other", "m1"), ("h*", "m1"))
        ]
        page = make_page("a")
        for store in stores:
            await store.open()
            assert await store.exists([page.key]) == [False]
            assert await store.put([page]) == [True]
        assert await stores[3].clear() == 1  # its prefix is no pattern
        for n, store in enumerate(stores):
            assert (await store.survey()).num_pages == (n != 3)
            await store.close()

    asyncio.run(main())


def test_entries_of_others_are_neither_counted_nor_cleared(server: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        with server.client as client:
            client.set("hicache", "theirs")
            client.set("hicachet:{x}", "theirs")
            await store.put(make_chain(1, 3))
            assert (await store.survey()).num_pages == 3
            assert await store.clear() == 3
            assert client.dbsize() == 2

    run(server.url, test)


def test_no_command_looks_at_all_keys_at_once(tmp_path: Path) -> None:
    with RedisServer(tmp_path, settings=['rename-command KEYS ""', 'rename-command FLUSHALL ""']) as server:

        async def test(store: RedisStore) -> None:
            chain = [make_page(n, num_bytes=1) for n in range(2500)]
            await store.put(chain)
            assert (await store.survey()).num_pages == 2500
            assert await store.clear() == 2500
            assert await store.exists([page.key for page in chain[:3]]) == [False] * 3

        run(server.url, test)


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_writers_that_cut_differently_read_each_other(server: RedisServer) -> None:
    async def main() -> None:
        stores = [RedisStore(server.url, value_bytes=size) for size in (300, 450, 1 << 20)]
        for store in stores:
            await store.open()
        for n, writer in enumerate(stores):
            page = make_page(f"of writer {n}")
            assert await writer.put([page]) == [True]
            for reader in stores:
                assert await read(reader, page)
        # The same page, cut anew by each: the last one counts, whoever reads.
        page = make_page("shared")
        for writer in (stores[0], stores[1], stores[2], stores[0]):
            assert await writer.put([page]) == [True]
            for reader in stores:
                assert await read(reader, page)
        for store in stores:
            await store.close()

    asyncio.run(main())


def test_deleting_a_page_takes_its_parts_along(server: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        pages = [make_page(n) for n in range(3)]
        await store.put(pages)
        assert await store.delete([pages[0].key, pages[2].key, pages[0].key, make_key("none")]) == 2
        with server.client as client:
            assert client.dbsize() == 5
        assert await read(store, pages[1])

    run(server.url, test, value_bytes=300)


@pytest.mark.parametrize("how", ["short", "long", "flipped", "of another"])
def test_a_part_that_is_not_right_makes_the_page_a_miss_and_all_of_it_goes(
    server: RedisServer, how: str
) -> None:
    async def test(store: RedisStore) -> None:
        page = make_page("a")
        await store.put([page])
        (name,) = [name for name in server.names() if name.endswith(b":1")]
        with server.client as client:
            part = bytearray(server.ask("GET", name))
            if how == "flipped":
                part[7] ^= 1
            part = {"short": part[:-1], "long": part + b"x", "of another": bytearray(300)}.get(how, part)
            client.set(name, bytes(part))
            assert not await read(store, page)
            assert client.dbsize() == 0
        stats = store.stats()
        assert (stats.pages_corrupt, stats.pages_missed) == (1, 1)

    run(server.url, test, value_bytes=300)


@pytest.mark.parametrize("value_bytes", [100, 1 << 20])
def test_a_payload_that_looks_like_a_manifest_is_a_payload(server: RedisServer, value_bytes: int) -> None:
    async def test(store: RedisStore) -> None:
        manifest = b"HICPARTS" + (8).to_bytes(8, "little") + (3).to_bytes(8, "little")
        page = StoredPage(make_key("a"), None, "full", memoryview(manifest))
        assert await store.put([page]) == [True]
        assert await read(store, page)

    run(server.url, test, value_bytes=value_bytes)


def test_a_page_of_a_newer_format_is_left_alone_and_does_not_exist(server: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        page = make_page("a")
        raw = bytearray(encode_header(page.key, "full", page.payload))
        raw[8] = 9
        raw[152:160] = _header_checksum(bytes(raw[:152]))
        with server.client as client:
            client.set(NAMES.page(page.key), bytes(raw) + bytes(page.payload))
            assert not await read(store, page)
            assert await store.exists([page.key]) == [False]
            assert client.dbsize() == 1
        stats = store.stats()
        assert (stats.errors, stats.pages_corrupt) == ({"unsupported": 1}, 0)

    run(server.url, test)


def _header_checksum(fields: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")
