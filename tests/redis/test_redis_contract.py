"""The Redis store against the contract: one server, values cut into parts, TLS with ACL, a cluster."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import redis

from hicache.testing.redis_server import Certificates, RedisCluster, RedisServer
from hicache.testing.store_contract import UnboundedStoreContract
from hicache.testing.store_pages import Corruption, spoil
from hicache.tiers.framing import HEADER_BYTES, decode_header
from hicache.tiers.redis import RedisStore
from hicache.tiers.redis_names import HEAD_BYTES, PageNames, manifest_of
from hicache.tiers.store import Store
from hicache.types import PageKey

pytestmark = pytest.mark.redis

NAMES = PageNames("hicache", "")


class RedisContract(UnboundedStoreContract):
    """Hooks for one server."""

    servers: Sequence[RedisServer]

    def at(self, name: bytes) -> redis.Redis:
        (server,) = self.servers
        return server.client

    def raw_bytes(self, store: Store, key: PageKey) -> bytes | None:
        name = NAMES.page(key)
        with self.at(name) as client:
            raw = client.get(name)
        assert raw is None or isinstance(raw, bytes)
        return raw

    def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None:
        raw = self.raw_bytes(store, key)
        assert raw is not None
        spoilt = spoil(raw, how)
        name = NAMES.page(key)
        with self.at(name) as client:
            if spoilt is None:
                client.delete(name)
            else:
                client.set(name, spoilt)

    async def gauges(self, store: Store) -> tuple[int, int]:
        assert isinstance(store, RedisStore)
        stats = await store.survey()
        return stats.num_pages, stats.used_bytes


class TestOneServer(RedisContract):
    @pytest.fixture(autouse=True)
    def use(self, server: RedisServer) -> None:
        self.servers = (server,)

    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = RedisStore(self.servers[0].url)
        await store.open()
        return store


class TestCutValues(RedisContract):
    """Every page of the contract but the smallest is cut into parts."""

    @pytest.fixture(autouse=True)
    def use(self, server: RedisServer) -> None:
        self.servers = (server,)

    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = RedisStore(self.servers[0].url, value_bytes=401, ttl_s=60)
        await store.open()
        return store

    def page_cost_bytes(self, num_bytes: int) -> int:
        return HEAD_BYTES + num_bytes

    def raw_bytes(self, store: Store, key: PageKey) -> bytes | None:
        head = super().raw_bytes(store, key)
        if head is None:
            return None
        header = decode_header(head)
        manifest = manifest_of(memoryview(head), header)
        if manifest is None:
            return head
        (server,) = self.servers
        parts: list[bytes] = server.ask("MGET", *NAMES.parts(header, manifest))
        return head[:HEADER_BYTES] + b"".join(parts)

    def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None:
        name = NAMES.page(key)
        head = super().raw_bytes(store, key)
        raw = self.raw_bytes(store, key)
        assert head is not None
        assert raw is not None
        header = decode_header(head)
        manifest = manifest_of(memoryview(head), header)
        assert manifest is not None
        parts = NAMES.parts(header, manifest)
        spoilt = spoil(raw, how)
        with self.at(name) as client:
            if spoilt is None:
                client.delete(parts[1])  # a page that has lost a part has vanished
                return
            client.set(name, spoilt[:HEADER_BYTES] + head[HEADER_BYTES:] if spoilt else b"")
            for part, (begin, end) in zip(parts, manifest.spans(header.payload_bytes), strict=True):
                client.set(part, spoilt[HEADER_BYTES + begin : HEADER_BYTES + end])

    async def gauges(self, store: Store) -> tuple[int, int]:
        """Of pages only: a page whose header went bad has left parts, which nobody can name, to the TTL."""
        (server,) = self.servers
        heads: list[bytes] = [server.ask("GET", name) for name in server.names() if NAMES.is_page(name)]
        sizes = [HEAD_BYTES + decode_header(head).payload_bytes for head in heads]
        return len(heads), sum(sizes)


class TestTlsAndAcl(RedisContract):
    """A user who may do no more than the documentation says, over TLS with a CA of our own."""

    @pytest.fixture(autouse=True)
    def use(self, tls_server: RedisServer, certificates: Certificates) -> None:
        self.servers = (tls_server,)
        self.certificates = certificates

    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = RedisStore(
            self.servers[0].url,
            username="cache",
            password=lambda: "correct-horse",
            ca_file=str(self.certificates.ca_file),
            ttl_s=60,
        )
        await store.open()
        return store


class TestCluster(RedisContract):
    keeps_batch_order = False  # servers of a cluster know nothing of each other

    @pytest.fixture(autouse=True)
    def use(self, cluster: RedisCluster) -> None:
        self.cluster = cluster
        self.servers = cluster.nodes

    def at(self, name: bytes) -> redis.Redis:
        return self.cluster.owner(name).client

    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = RedisStore(self.cluster.url)
        await store.open()
        return store
