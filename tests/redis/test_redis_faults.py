"""The fault matrix of Redis, through the whole cache: each fault shortens the hit, is counted, and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache.testing.redis_caches import PAGE_TOKENS, CheckedCache, prompt, small_config
from hicache.testing.redis_server import RedisServer
from hicache.testing.store_pages import Corruption, spoil
from hicache.testing.tcp_proxy import TcpProxy
from hicache.tiers.store import StoreStats

pytestmark = pytest.mark.redis

NUM_PAGES = 10
SPOILT_PAGE = 4


@dataclass
class Rig:
    """A cache whose store is a server behind a proxy."""

    server: RedisServer
    proxy: TcpProxy
    checked: CheckedCache

    @property
    def store(self) -> StoreStats:
        stats = self.checked.cache.stats().store
        assert stats is not None
        return stats

    @property
    def num_failures(self) -> int:
        """Transfers and probes that went wrong."""
        return sum(self.checked.cache.stats().transfers.failures.values())

    def hit_pages(self, name: int = 1) -> int:
        """Pages of a prompt that come from L3 now, with L1 and L2 empty."""
        self.checked.cache.reset()
        served = self.checked.serve(prompt(name, NUM_PAGES))
        assert served.source.total == served.source.store
        return served.source.store // PAGE_TOKENS


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Its prompt 1 lies in L3. The breaker stays out of it: each fault is seen by the store itself."""
    with RedisServer(tmp_path) as server, TcpProxy(server.port) as proxy:
        store = {
            "kind": "redis",
            "url": f"redis://127.0.0.1:{proxy.port}",
            "timeout": "500ms",
            "breaker": {"enabled": False},
        }
        rig = Rig(server, proxy, CheckedCache(small_config([store], policy__store_timeout="2s")))
        rig.checked.store_only(prompt(1, NUM_PAGES))
        assert rig.hit_pages() == NUM_PAGES
        yield rig
        rig.checked.close()


LOST: dict[str, tuple[Callable[[Rig], None], Callable[[Rig], None]]] = {
    "connection reset": (lambda rig: rig.proxy.reset(), lambda rig: rig.proxy.accept()),
    "hang": (lambda rig: rig.proxy.hold(), lambda rig: rig.proxy.release()),
    "server stopped": (lambda rig: rig.server.pause(), lambda rig: rig.server.resume()),
    "wrong password": (
        lambda rig: rig.server.change_password("changed"),
        lambda rig: rig.server.change_password(None),
    ),
}


@pytest.mark.parametrize(("begin", "end"), LOST.values(), ids=LOST)
def test_a_server_that_cannot_be_used_is_a_miss_until_it_can(
    rig: Rig, begin: Callable[[Rig], None], end: Callable[[Rig], None]
) -> None:
    failures = rig.num_failures
    begin(rig)
    assert rig.hit_pages() == 0
    assert rig.num_failures > failures
    assert sum(rig.store.errors.values()) > 0
    end(rig)
    rig.checked.cache.drain()
    assert rig.hit_pages() == NUM_PAGES
    assert rig.store.pages_corrupt == 0


@pytest.mark.parametrize(("begin", "end"), LOST.values(), ids=LOST)
def test_a_fault_between_probe_and_read_shortens_what_was_promised(
    rig: Rig, begin: Callable[[Rig], None], end: Callable[[Rig], None]
) -> None:
    """The pages are known to be there, and then the server is gone."""
    rig.checked.cache.reset()
    with rig.checked.cache.match(prompt(2, NUM_PAGES)) as lease:
        assert lease.load() == 0
    begin(rig)
    with rig.checked.cache.match(prompt(1, NUM_PAGES)) as lease:
        assert lease.load() == 0
        assert lease.reused == 0
    end(rig)
    rig.checked.cache.drain()
    assert rig.hit_pages() == NUM_PAGES


def test_a_server_a_hundred_times_slower_still_serves(rig: Rig) -> None:
    rig.proxy.slow_down(0.02)
    assert rig.hit_pages() == NUM_PAGES
    rig.proxy.slow_down(0.8)  # over the time limit
    assert rig.hit_pages() == 0
    assert rig.num_failures > 0
    rig.proxy.slow_down(0)
    rig.checked.cache.drain()
    assert rig.hit_pages() == NUM_PAGES


def test_a_server_that_was_started_again_has_nothing_and_is_filled_again(rig: Rig) -> None:
    rig.server.kill()
    rig.server.start()
    assert rig.hit_pages() == 0
    assert rig.checked.cache.flush()
    assert rig.hit_pages() == NUM_PAGES


def test_a_full_server_refuses_writes_and_goes_on_serving(rig: Rig) -> None:
    with rig.server.client as client:
        client.config_set("maxmemory", 1)
    rig.checked.cache.reset()
    rig.checked.serve(prompt(2, NUM_PAGES))
    assert not rig.checked.cache.flush()
    assert rig.store.pages_refused > 0
    assert rig.store.errors == {}
    assert rig.hit_pages() == NUM_PAGES
    assert rig.hit_pages(2) == 0
    with rig.server.client as client:
        client.config_set("maxmemory", 0)
    rig.checked.cache.reset()
    rig.checked.store_only(prompt(2, NUM_PAGES))
    assert rig.hit_pages(2) == NUM_PAGES


@pytest.mark.parametrize("how", list(Corruption), ids=lambda how: how.name.lower())
def test_a_spoilt_page_ends_the_hit_before_it_and_is_written_again(rig: Rig, how: Corruption) -> None:
    name = spoil_page(rig, SPOILT_PAGE, how)
    assert rig.hit_pages() == SPOILT_PAGE
    assert rig.store.pages_corrupt == (0 if how is Corruption.VANISHED else 1)
    assert rig.checked.cache.flush()
    assert rig.hit_pages() == NUM_PAGES
    with rig.server.client as client:
        assert client.exists(name) == 1


def spoil_page(rig: Rig, position: int, how: Corruption) -> bytes:
    """Spoil the page at a position of prompt 1's chain, found by following parents; its name."""
    raws: dict[bytes, bytes] = {name: rig.server.ask("GET", name) for name in rig.server.names()}
    by_parent = {raw[120:152]: name for name, raw in raws.items()}
    name = by_parent[bytes(32)]
    for _ in range(position):
        name = by_parent[raws[name][32:64]]
    spoilt = spoil(raws[name], how)
    if spoilt is None:
        rig.server.ask("DEL", name)
    else:
        rig.server.ask("SET", name, spoilt)
    return name
