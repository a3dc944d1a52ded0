"""The Redis store: names and parts, connections out of step, TTL, memory limits, logins, Sentinel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hicache.clock import ManualClock
from hicache.errors import ConfigError, TierError, TierTimeoutError, TierUnavailableError
from hicache.testing.redis_caches import run_on_redis as run
from hicache.testing.redis_server import Certificates, RedisCluster, RedisServer, wait_until
from hicache.testing.store_pages import PAYLOAD_BYTES, make_chain, make_key, make_page, make_target
from hicache.testing.tcp_proxy import TcpProxy
from hicache.tiers.framing import encode_header
from hicache.tiers.redis import RedisStore
from hicache.tiers.redis_names import PageNames
from hicache.tiers.store import StoredPage

pytestmark = pytest.mark.redis

NAMES = PageNames("hicache", "")


async def read(store: RedisStore, page: StoredPage) -> bool:
    """Whether a page is a hit; a hit must be right."""
    target = make_target(page.key, page.payload.nbytes)
    (hit,) = await store.get([target])
    assert not hit or target.payload == page.payload
    return hit


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


# ---- connections -----------------------------------------------------------------------------------
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


# ---- room and time ---------------------------------------------------------------------------------
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


# ---- identity --------------------------------------------------------------------------------------
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


# ---- parts -----------------------------------------------------------------------------------------
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


# ---- logins ----------------------------------------------------------------------------------------
def test_a_wrong_password_is_refused_at_once_with_the_remedy(
    tls_server: RedisServer, certificates: Certificates
) -> None:
    with pytest.raises(ConfigError, match="check username and the password") as refusal:
        run(
            tls_server.url,
            _nothing,
            username="cache",
            password=lambda: "hunter2",
            ca_file=str(certificates.ca_file),
        )
    assert "hunter2" not in str(refusal.value)


def test_a_user_without_rights_is_refused_with_the_rights_it_needs(
    tls_server: RedisServer, certificates: Certificates
) -> None:
    with pytest.raises(ConfigError, match=r"allow this user \+get \+getex"):
        run(
            tls_server.url,
            _nothing,
            username="cache",
            password=lambda: "correct-horse",
            ca_file=str(certificates.ca_file),
            prefix="theirs",
        )


def test_a_server_whose_certificate_nobody_trusts_is_refused(tls_server: RedisServer) -> None:
    with pytest.raises(ConfigError, match="check ca_file"):
        run(tls_server.url, _nothing)


def test_a_server_without_tls_is_not_spoken_to_over_tls(
    server: RedisServer, certificates: Certificates
) -> None:
    with pytest.raises(TierError):  # it waits for a command, and we for its side of a handshake
        run(
            f"rediss://127.0.0.1:{server.port}",
            _nothing,
            ca_file=str(certificates.ca_file),
            timeout_s=0.2,
        )


def test_a_client_certificate_is_shown_where_the_server_asks_for_one(
    tmp_path: Path, certificates: Certificates
) -> None:
    settings = ["tls-auth-clients yes"]
    with RedisServer(tmp_path, certificates=certificates, settings=settings) as server:
        files = {
            "ca_file": str(certificates.ca_file),
            "cert_file": str(certificates.cert_file),
            "key_file": str(certificates.key_file),
        }

        async def test(store: RedisStore) -> None:
            assert await store.put([make_page("a")]) == [True]

        run(server.url, test, **files)
        with pytest.raises(TierUnavailableError):
            run(server.url, test, ca_file=str(certificates.ca_file))


def test_a_password_that_was_changed_is_read_for_the_next_connection(tmp_path: Path) -> None:
    password = "first"
    with RedisServer(tmp_path, password=password) as server:
        secret = [password]

        async def test(store: RedisStore) -> None:
            await store.put([make_page("a")])
            secret[0] = "second"
            server.change_password("second")
            with pytest.raises(TierUnavailableError):
                await read(store, make_page("a"))
            assert await read(store, make_page("a"))

        run(server.url, test, password=lambda: secret[0])


def test_nothing_secret_is_logged_or_said(
    tls_server: RedisServer, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = RedisStore(
        tls_server.url,
        username="cache",
        password=lambda: "correct-horse",
        ca_file=str(certificates.ca_file),
        timeout_s=1.0,
    )

    async def test() -> None:
        await store.open()
        await store.put([make_page("a")])
        tls_server.pause()
        try:
            with pytest.raises(TierTimeoutError) as late:
                await read(store, make_page("a"))
        finally:
            tls_server.resume()
        await store.close()
        assert "correct-horse" not in str(late.value)

    asyncio.run(test())
    assert "correct-horse" not in caplog.text + repr(store) + repr(vars(store))


def test_nobody_there_is_said_with_the_address() -> None:
    with pytest.raises(TierUnavailableError, match=r"redis 127\.0\.0\.1:1: .*"):
        run("redis://127.0.0.1:1", _nothing)


async def _nothing(store: RedisStore) -> None:
    pytest.fail("the store opened")


# ---- Sentinel and Cluster --------------------------------------------------------------------------
def test_sentinels_are_asked_for_the_master_and_asked_again_when_it_is_lost(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "old") as old, RedisServer(tmp_path / "new") as new:
        watch = [f"sentinel monitor pages 127.0.0.1 {old.port} 1"]
        with RedisServer(tmp_path / "sentinel", settings=watch, is_sentinel=True) as sentinel:
            url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/pages"

            async def test(store: RedisStore) -> None:
                page = make_page("a")
                assert await store.put([page]) == [True]
                with old.client as client:
                    assert client.dbsize() == 1
                old.kill()
                with sentinel.client as client:  # what a failover comes to
                    client.execute_command("SENTINEL REMOVE", "pages")
                    client.execute_command("SENTINEL MONITOR", "pages", "127.0.0.1", new.port, 1)
                assert await store.put([page]) == [True]
                with new.client as client:
                    assert client.dbsize() == 1
                assert await read(store, page)

            run(url, test)


def test_a_master_that_no_sentinel_knows_is_named(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path, is_sentinel=True) as sentinel,
        pytest.raises(TierUnavailableError, match="knows no master pages"),
    ):
        run(f"redis+sentinel://127.0.0.1:{sentinel.port}/pages", _nothing)


def test_a_cluster_is_found_by_any_of_its_nodes(cluster: RedisCluster) -> None:
    async def test(store: RedisStore) -> None:
        chain = make_chain(1, 40)
        assert await store.put(chain) == [True] * 40
        sizes = []
        for node in cluster.nodes:
            with node.client as client:
                sizes.append(int(client.dbsize()))
        assert sum(sizes) == 40
        assert min(sizes) > 0
        assert [await read(store, page) for page in chain] == [True] * 40

    run(f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.nodes[2].port}", test)


def test_a_slot_that_moves_is_followed(cluster: RedisCluster) -> None:
    """First while it is on its way (ASK), then once it has a new owner (MOVED)."""

    async def test(store: RedisStore) -> None:
        page = make_page("moving")
        name = NAMES.page(page.key)
        source = cluster.owner(name)
        target = next(node for node in cluster.nodes if node is not source)
        slot = source.ask("CLUSTER KEYSLOT", name)
        source_id, target_id = source.ask("CLUSTER", "MYID"), target.ask("CLUSTER", "MYID")
        target.ask("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
        source.ask("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
        try:
            assert await store.put([page]) == [True]  # the source has it not, so: ASK
            assert target.names() == [name]
            assert await read(store, page)
            for node in (target, source):
                node.ask("CLUSTER SETSLOT", slot, "NODE", target_id)
            assert await read(store, page)
            assert await store.delete([page.key]) == 1
        finally:
            for node in (source, target):
                node.ask("CLUSTER SETSLOT", slot, "NODE", source_id)
        assert store.stats().errors == {}

    run(cluster.url, test)


def test_what_one_lost_node_held_is_missed_and_the_rest_is_served(tmp_path: Path) -> None:
    with RedisCluster(tmp_path) as cluster:

        async def test(store: RedisStore) -> None:
            pages = [make_page(n) for n in range(30)]
            assert await store.put(pages) == [True] * 30
            lost = [cluster.owner(NAMES.page(page.key)) is cluster.nodes[1] for page in pages]
            assert any(lost)
            cluster.nodes[1].kill()
            targets = [make_target(page.key) for page in pages]
            assert await store.get(targets) == [not gone for gone in lost]
            assert await store.exists([page.key for page in pages]) == [not gone for gone in lost]
            assert await store.put(pages) == [not gone for gone in lost]
            assert store.stats().errors["unavailable"] >= 3
            cluster.nodes[1].start()
            wait_until(cluster.is_whole, "the cluster to take its node back")
            clock.advance(10)
            assert await store.put(pages) == [True] * 30
            assert [await read(store, page) for page in pages] == [True] * 30

        clock = ManualClock()
        run(cluster.url, test, clock=clock)


def test_a_cluster_opens_without_one_of_its_nodes_and_not_without_all(tmp_path: Path) -> None:
    with RedisCluster(tmp_path) as cluster:
        cluster.nodes[0].kill()

        async def test(store: RedisStore) -> None:
            pages = [make_page(n) for n in range(30)]
            answers = await store.put(pages)
            assert {True, False} == set(answers)
            assert [await read(store, page) for page, stored in zip(pages, answers, strict=True) if stored]

        run(cluster.url, test)
        cluster.nodes[1].kill()
        cluster.nodes[2].kill()
        with pytest.raises(TierUnavailableError):
            run(cluster.url, test)


def test_a_node_that_hangs_is_left_alone_and_holds_up_no_batch(cluster: RedisCluster) -> None:
    clock = ManualClock()

    async def test(store: RedisStore) -> None:
        pages = [make_page(n) for n in range(30)]
        assert await store.put(pages) == [True] * 30
        hung = [page for page in pages if cluster.owner(NAMES.page(page.key)) is cluster.nodes[1]]
        cluster.nodes[1].pause()
        try:
            for _ in range(2):
                with pytest.raises(TierTimeoutError):
                    await read(store, hung[0])
            with pytest.raises(TierUnavailableError, match="is left alone for now: 2 calls failed in a row"):
                await read(store, hung[0])
            answers = await store.exists([page.key for page in pages])
            assert answers == [page not in hung for page in pages]
            clock.advance(10)  # a probe that fails: longer
            with pytest.raises(TierTimeoutError):
                await read(store, hung[0])
            with pytest.raises(TierUnavailableError, match="is left alone"):
                await read(store, hung[0])
        finally:
            cluster.nodes[1].resume()
        wait_until(cluster.is_whole, "the cluster to take its node back")
        clock.advance(10)
        assert [await read(store, page) for page in pages] == [True] * 30

    run(cluster.url, test, timeout_s=0.5, clock=clock)


def test_a_child_whose_parent_was_lost_with_its_node_is_refused_and_removed(tmp_path: Path) -> None:
    with RedisCluster(tmp_path) as cluster:

        async def test(store: RedisStore) -> None:
            names = [f"p{n}" for n in range(50)]
            parent = next(n for n in names if cluster.owner(NAMES.page(make_key(n))) is cluster.nodes[0])
            child = next(n for n in names if cluster.owner(NAMES.page(make_key(n))) is cluster.nodes[2])
            cluster.nodes[0].kill()
            pages = [make_page(parent), make_page(child, parent)]
            assert await store.put(pages) == [False, False]
            with cluster.nodes[2].client as client:
                assert client.dbsize() == 0
            assert await store.put([make_page(child)]) == [True]

        run(cluster.url, test)


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
