"""A Redis store on Sentinel and on Cluster: masters, slots that move, nodes that are lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.clock import ManualClock
from hicache.errors import TierTimeoutError, TierUnavailableError
from hicache.testing.redis_caches import read
from hicache.testing.redis_caches import run_on_redis as run
from hicache.testing.redis_server import RedisCluster, RedisServer, wait_until
from hicache.testing.store_pages import make_chain, make_key, make_page, make_target
from hicache.tiers.redis import RedisStore
from hicache.tiers.redis_names import PageNames

pytestmark = pytest.mark.redis

NAMES = PageNames("hicache", "")


async def _nothing(store: RedisStore) -> None:
    pytest.fail("the store opened")


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
