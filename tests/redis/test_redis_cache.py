"""A cache in front of Redis: shared by processes, never by identities; a cluster that loses a master; stacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.cache import HiCache
from hicache.errors import ConfigError
from hicache.replay.result import ReplayResult
from hicache.replay.run import replay
from hicache.testing.redis_caches import PAGE_TOKENS, CheckedCache, prompt, rounds, small_config
from hicache.testing.redis_server import RedisCluster, RedisServer, free_port, wait_until
from hicache.testing.tcp_proxy import TcpProxy
from hicache.tiers.store import BreakerState
from hicache.types import Namespace

pytestmark = pytest.mark.redis

PATIENCE = {"backoff": "10ms", "backoff_max": "10ms", "jitter": 0}
"""Of a breaker that probes at every opportunity."""
ROOT = Path(__file__).parents[2]

OTHER_PROCESS = """
import json, sys
from hicache.testing.redis_caches import CheckedCache, prompt, small_config
cache = CheckedCache(small_config([{"kind": "redis", "url": sys.argv[1]}]))
hits = [cache.serve(prompt(name)).source.store for name in json.loads(sys.argv[2])]
assert cache.cache.flush()
cache.close()
print(json.dumps(hits))
"""


def serve_elsewhere(url: str, names: list[int], hash_seed: int) -> list[int]:
    """Serve prompts in another process; the tokens of each that came from L3."""
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, url, json.dumps(names)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hits = json.loads(done.stdout)
    assert isinstance(hits, list)
    return hits


# ---- sharing ---------------------------------------------------------------------------------------
def test_two_processes_hit_what_the_other_has_written(server: RedisServer) -> None:
    ours = CheckedCache(small_config([{"kind": "redis", "url": server.url}]))
    ours.serve(prompt(1))
    assert ours.cache.flush()
    assert serve_elsewhere(server.url, [1, 2], hash_seed=7) == [10 * PAGE_TOKENS, 0]
    assert ours.serve(prompt(2)).source.store == 10 * PAGE_TOKENS
    ours.close()


IDENTITIES = {
    "model": {"model__name": "another"},
    "weights": {"model__weights": "sha256:1"},
    "dtype": {"model__dtype": "bfloat16"},
    "rank": {"ranks__tp_size": 2, "ranks__tp_rank": 1},
    "page": {"model__page_size": 2 * PAGE_TOKENS},
}


@pytest.mark.parametrize("identity", IDENTITIES.values(), ids=IDENTITIES)
def test_another_identity_never_meets_our_pages(server: RedisServer, identity: dict[str, object]) -> None:
    stores: list[dict[str, object]] = [{"kind": "redis", "url": server.url}]
    ours = CheckedCache(small_config(stores))
    ours.store_only(prompt(1))
    ours.close()
    theirs = CheckedCache(small_config(stores, **identity))
    assert theirs.serve(prompt(1)).source.total == 0
    theirs.store_only(prompt(1))
    # Each model's entries have a prefix of their own.
    assert len({name.split(b":")[1] for name in server.names()}) == 2
    theirs.close()


@pytest.mark.parametrize(
    "namespace",
    [Namespace(salt="tenant"), Namespace(lora="adapter"), Namespace(extra="key"), Namespace(salt="")],
    ids=["salt", "lora", "extra", "empty-salt"],
)
@pytest.mark.parametrize("is_stacked", [False, True], ids=["alone", "behind a disk"])
def test_another_namespace_never_meets_our_pages(
    server: RedisServer, namespace: Namespace, tmp_path: Path, is_stacked: bool
) -> None:
    disk = {"kind": "disk", "path": str(tmp_path), "capacity": "64MiB"}
    redis = {"kind": "redis", "url": server.url}
    rig = CheckedCache(small_config([disk, redis] if is_stacked else [redis]))
    rig.store_only(prompt(1))
    assert rig.serve(prompt(1), namespace).source.total == 0
    rig.store_only(prompt(1), namespace)
    assert rig.serve(prompt(1), namespace).source.store == 10 * PAGE_TOKENS
    assert rig.serve(prompt(1)).source.store == 10 * PAGE_TOKENS
    rig.close()


# ---- a cluster loses a master ----------------------------------------------------------------------
def hit_rates(result: ReplayResult) -> list[float]:
    return [counts.tokens.hit_rate for _, counts in sorted(result.turns.items())]


def test_a_cluster_that_loses_a_master_in_a_replay_costs_hits_and_no_more(tmp_path: Path) -> None:
    num_prompts, num_pages = 20, 8
    with RedisCluster(tmp_path) as cluster:

        def between(result: ReplayResult) -> None:
            match result.requests / num_prompts:
                case 3.5:
                    cluster.nodes[1].kill()
                case 5.0:
                    cluster.nodes[1].start()
                    wait_until(cluster.is_whole, "the cluster to take its node back")

        result = replay(
            rounds(9, num_prompts, num_pages),
            small_config([{"kind": "redis", "url": cluster.url, "breaker": PATIENCE}]),
            on_request=between,
        )
    assert (result.requests, result.stamp_mismatches, result.audit_errors) == (9 * num_prompts, 0, [])
    assert result.pages_checked > 0
    # Rounds 1 to 3: whole. 4: the master dies in its middle. 5: without it. 6: it is back, and empty. 7 to 9: whole.
    rates = hit_rates(result)
    full = num_pages * PAGE_TOKENS / (num_pages * PAGE_TOKENS + 1)
    assert rates[0] == 0
    assert rates[1] == rates[2] == pytest.approx(full)
    assert rates[4] < rates[3] < full
    assert rates[8] == pytest.approx(full)
    assert result.stats is not None
    assert result.stats.store is not None
    assert result.stats.store.errors["unavailable"] > 0
    assert result.stats.store.pages_corrupt == 0


# ---- stacks ----------------------------------------------------------------------------------------
def test_disk_before_redis_works_by_configuration_and_names_both(server: RedisServer, tmp_path: Path) -> None:
    def stores(folder: str) -> list[dict[str, object]]:
        return [
            {"kind": "disk", "name": "local", "path": str(tmp_path / folder), "capacity": "1MiB"},
            {"kind": "redis", "name": "shared", "url": server.url},
        ]

    first = CheckedCache(small_config(stores("a")))
    first.store_only(prompt(1))
    first.close()  # what waits for Redis is written first

    second = CheckedCache(small_config(stores("b")))  # another machine: its own disk, the same Redis
    assert second.serve(prompt(1)).source.store == 10 * PAGE_TOKENS
    stats = second.cache.stats().store
    assert stats is not None
    assert [(part.name, part.kind, part.pages_read) for part in stats.stores] == [
        ("local", "disk", 0),
        ("shared", "redis", 10),
    ]
    second.close()  # promotion is written first, too

    server.pause()
    try:
        third = CheckedCache(small_config(stores("b"), policy__store_timeout="2s"))
        assert third.serve(prompt(1)).source.store == 10 * PAGE_TOKENS  # from the disk alone
        third.close()
    finally:
        server.resume()


def test_a_stack_of_memory_and_a_lost_redis_goes_on_with_what_is_left(server: RedisServer) -> None:
    stores: list[dict[str, object]] = [{"kind": "memory"}, {"kind": "redis", "url": server.url}]
    rig = CheckedCache(small_config(stores, tiers__stack__write="all"))
    rig.store_only(prompt(1))
    with server.client as client:
        assert client.dbsize() == 10
        client.flushall()
    assert rig.serve(prompt(1)).source.store == 10 * PAGE_TOKENS
    rig.close()


def test_a_stack_whose_disk_is_taken_away_is_served_by_redis(server: RedisServer, tmp_path: Path) -> None:
    stores: list[dict[str, object]] = [
        {"kind": "disk", "path": str(tmp_path / "disk"), "capacity": "1MiB"},
        {"kind": "redis", "url": server.url},
    ]
    rig = CheckedCache(small_config(stores, tiers__stack__write="all"))
    rig.store_only(prompt(1))
    shutil.rmtree(tmp_path / "disk")
    assert rig.serve(prompt(1)).source.store == 10 * PAGE_TOKENS
    rig.cache.close(flush=False)


# ---- the breaker -----------------------------------------------------------------------------------
def test_a_server_that_is_away_at_first_is_found_later(tmp_path: Path) -> None:
    port = free_port()
    store = {"kind": "redis", "url": f"redis://127.0.0.1:{port}", "breaker": PATIENCE}
    rig = CheckedCache(small_config([store]))
    assert rig.serve(prompt(1)).source.total == 0
    stats = rig.cache.stats().store
    assert stats is not None
    assert stats.breaker is not None
    assert (stats.name, stats.breaker.state) == ("redis", BreakerState.OPEN)
    with RedisServer(tmp_path, port=port) as server:

        def is_used() -> bool:
            rig.serve(prompt(2))
            rig.cache.flush()
            with server.client as client:
                return int(client.dbsize()) > 0

        wait_until(is_used, "the breaker to close")
        rig.close()


def test_a_server_that_hangs_is_left_alone_and_used_again_by_itself(server: RedisServer) -> None:
    with TcpProxy(server.port) as proxy:
        store = {
            "kind": "redis",
            "url": f"redis://127.0.0.1:{proxy.port}",
            "timeout": "1s",
            "breaker": {**PATIENCE, "failures": 2},
        }
        rig = CheckedCache(small_config([store], policy__store_timeout="2s"))
        rig.store_only(prompt(1))
        proxy.hold()

        def state() -> BreakerState:
            stats = rig.cache.stats().store
            assert stats is not None
            assert stats.breaker is not None
            return stats.breaker.state

        for name in range(2, 6):
            assert rig.serve(prompt(name)).source.store == 0
        assert state() is not BreakerState.CLOSED
        proxy.release()

        def is_hit() -> bool:
            rig.cache.drain()
            rig.cache.reset()
            return rig.serve(prompt(1)).source.store == 10 * PAGE_TOKENS

        wait_until(is_hit, "the breaker to close")
        assert state() is BreakerState.CLOSED
        rig.close()


def test_a_refused_login_keeps_the_cache_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_PASSWORD", "hunter2")
    with RedisServer(tmp_path, password="right") as server:
        store: dict[str, object] = {"kind": "redis", "url": server.url, "password_env": "CACHE_PASSWORD"}
        with pytest.raises(ConfigError, match="check username and the password") as refusal:
            HiCache(small_config([store]))
        assert "hunter2" not in str(refusal.value)
        monkeypatch.delenv("CACHE_PASSWORD")
        with pytest.raises(ConfigError, match="the variable CACHE_PASSWORD is not set"):
            HiCache(small_config([store]))
        secret = tmp_path / "secret"
        secret.write_text("right\n")
        del store["password_env"]
        rig = CheckedCache(small_config([{**store, "password_file": str(secret)}]))
        rig.store_only(prompt(1))
        assert rig.serve(prompt(1)).source.store == 10 * PAGE_TOKENS
        rig.close()
        secret.unlink()
        with pytest.raises(ConfigError, match="secret cannot be read: No such file"):
            HiCache(small_config([{**store, "password_file": str(secret)}]))
