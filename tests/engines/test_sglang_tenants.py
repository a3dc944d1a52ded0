"""Tenants behind SGLang: requests with the same tokens and another salt, adapter or none, in every store.

SGLang seeds the hashes of a request's pages with its namespace (``storage_namespace_seed``) and hands those over. The
hashes here are made by its own functions, as its tree and its controller make them; only the compiled step that
chains one page to the next is ours, the same for all.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.testing.redis_server import RedisServer
from hicache.testing.sglang_pools import fill, mha_pool, page_of, state_pool
from hicache.testing.sglang_released import import_sglang
from hicache.testing.sglang_rig import SglangRig, chained_hashes, storage_config

pytestmark = pytest.mark.engines

PAGE = 4
TOKENS = list(range(100, 100 + 3 * PAGE))
STORES = ("memory", "disk", "encrypted disk", "redis", "stack")
TENANTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "salts": ({"cache_salt": "a"}, {"cache_salt": "b"}),
    "salt and none": ({"cache_salt": "a"}, {}),
    "salt and adapter": ({"cache_salt": "a"}, {"extra_key": "a"}),
    "one adapter, two salts": (
        {"extra_key": "lora", "cache_salt": "a"},
        {"extra_key": "lora", "cache_salt": "b"},
    ),
    "parts that read the same together": (
        {"extra_key": "ab", "cache_salt": "c"},
        {"extra_key": "a", "cache_salt": "bc"},
    ),
}


@pytest.fixture(autouse=True)
def hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    import_sglang()
    monkeypatch.setattr("sglang.srt.mem_cache.utils.get_hash_str", chained_hashes)
    monkeypatch.setenv("HICACHE_TEST_KEY", "8f3c" * 16)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


def stores(kind: str, folder: Path, redis_url: str) -> list[dict[str, object]]:
    disk: dict[str, object] = {"kind": "disk", "path": str(folder), "capacity": "64MiB"}
    encrypted: dict[str, object] = {"encryption": "aes-gcm", "key_env": "HICACHE_TEST_KEY"}
    redis: dict[str, object] = {"kind": "redis", "url": redis_url, "prefix": folder.name}
    kinds: dict[str, list[dict[str, object]]] = {
        "memory": [{"kind": "memory"}],
        "disk": [disk],
        "encrypted disk": [disk | {"codec": encrypted}],
        "redis": [redis],
        "stack": [disk | {"name": "near"}, redis | {"name": "far"}],
    }
    return kinds[kind]


def tree_hashes(tokens: Sequence[int], **namespace: str) -> list[str]:
    """As SGLang's tree makes them: a node's go on from its parent's. Here the first page is a node of its own."""
    cache = import_module("sglang.srt.mem_cache.radix_cache")
    utils = import_module("sglang.srt.mem_cache.utils")
    made: list[str] = []
    parent: Any = None
    for part in (tokens[:PAGE], tokens[PAGE:]):
        node = SimpleNamespace(parent=parent, key=cache.RadixKey(array("q", part), **namespace))
        node.hash_value = utils.compute_node_hash_values(node, PAGE)
        made += node.hash_value
        parent = node
    return made


def asked_hashes(tokens: Sequence[int], **namespace: str) -> list[str]:
    """As its controller makes them for a request that has nothing yet."""
    cache = import_module("sglang.srt.mem_cache.radix_cache")
    utils = import_module("sglang.srt.mem_cache.utils")
    key = cache.RadixKey(array("q", tokens), **namespace)
    return list(utils.get_storage_hash_str(key, None, page_size=PAGE))


def found(rig: SglangRig, keys: list[str]) -> tuple[int, list[int], list[bool]]:
    """Pages that exist, prefixes that can be restored with a state, pages that can be read."""
    side = rig.query(keys, mamba=("trailing_pages", 1)).restorable_prefix_pages
    return int(rig.backend.batch_exists(keys)), list(side), rig.get(keys, [5, 6, 7])


@pytest.mark.parametrize("pair", TENANTS)
@pytest.mark.parametrize("kind", STORES)
def test_two_tenants_with_the_same_tokens_share_nothing(
    tmp_path: Path, redis_url: str, kind: str, pair: str
) -> None:
    """Before and after a restart, in the pages themselves and in the states beside them."""
    ours, theirs = TENANTS[pair]
    config = storage_config(*stores(kind, tmp_path, redis_url))
    kv, states = mha_pool(), state_pool()
    fill(kv, 1)
    fill(states, 2)
    with ExitStack() as servers:
        first = servers.enter_context(SglangRig(config, kv, mamba=states))
        mine = tree_hashes(TOKENS, **ours)
        assert first.put(mine, [0, 1, 2]) == [True, True, True]
        assert first.put_side("mamba", mine[2:], [3]) == [True]
        again = first
        if kind != "memory":  # which is that of one process
            servers.close()
            again = servers.enter_context(SglangRig(config, mha_pool(), mamba=state_pool()))
        assert found(again, asked_hashes(TOKENS, **theirs)) == (0, [], [False, False, False])
        assert found(again, asked_hashes(TOKENS, **ours)) == (3, [3], [True, True, True])
        assert page_of(again.pools["kv"], 5) == page_of(kv, 0)


@pytest.mark.parametrize("pair", TENANTS)
def test_what_one_tenant_stores_leaves_the_other_s_as_it_is(tmp_path: Path, pair: str) -> None:
    """A page that is there is not written again, so a shared name would be a page of the other's bytes."""
    ours, theirs = (tree_hashes(TOKENS, **namespace) for namespace in TENANTS[pair])
    config = storage_config({"kind": "disk", "path": str(tmp_path), "capacity": "64MiB"})
    kv = mha_pool()
    fill(kv, 1)
    with SglangRig(config, kv) as rig:
        rig.put(ours, [0, 1, 2])
        rig.put(theirs, [2, 1, 0])
        wanted = [page_of(kv, number) for number in (0, 1, 2)]
        for keys, pages in ((ours, wanted), (theirs, wanted[::-1])):
            assert rig.get(keys, [5, 6, 7]) == [True, True, True]
            assert [page_of(kv, number) for number in (5, 6, 7)] == pages
