"""SGLang's own controller over the backend: its threads query, read and write; only the tree and the GPU are left out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache.errors import ConfigError
from hicache.testing.sglang_pools import fill, mha_pool, page_of, slots_of, state_pool
from hicache.testing.sglang_released import import_sglang
from hicache.testing.sglang_rig import RECIPE, chained_hashes, hit_policy

pytestmark = pytest.mark.engines

PAGE = 4
WINDOW_PAGES = 2
WAIT_S = 20
TOKENS = list(range(100, 100 + 6 * PAGE))
Attach = Callable[..., Any]


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Attach]:
    """A controller with a path, a window and a state pool, attached as the server attaches it."""
    released = import_sglang()
    hybrid, names = released.controller, released.storage.PoolName
    base = hybrid.BaseHiCacheController
    parallel = SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
    module = vars(__import__(base.__module__, fromlist=["get_parallel"]))
    monkeypatch.setitem(module, "get_parallel", lambda: parallel)
    monkeypatch.setitem(module, "is_dp_attention_enabled", lambda: False)
    monkeypatch.setattr("sglang.srt.mem_cache.utils.get_hash_str", chained_hashes)
    controllers = []

    def make(seed: int, **extra: object) -> Any:
        pools = {names.KV: mha_pool(), names.SWA: mha_pool(), names.MAMBA: state_pool()}
        for number, pool in enumerate(pools.values()):
            fill(pool, seed + number)
        entries = [
            hybrid.PoolEntry(name, pool, None, lambda layer: layer, is_primary_index_anchor=name == names.KV)
            for name, pool in pools.items()
        ]
        group = hybrid.HostPoolGroup(entries)
        controller = object.__new__(hybrid.HybridCacheController)
        for name, value in {
            "extra_host_mem_release_queues": {},
            "pp_prefetch_command_group": None,
            "pp_prefetch_command_thread": None,
            "pp_prefetch_state_lock": threading.Lock(),
            "pp_prefetch_states": {},
            "pp_prefetch_decisions": {},
            "enable_storage": False,
            "enable_storage_metrics": True,
            "storage_stop_event": threading.Event(),
            "storage_host_pool": pools[names.KV],
            "mem_pool_host": group,
            "mem_pool_device": None,
            "page_size": PAGE,
            "host_memory_mode": "cache",
            "tp_group": None,
            "pp_group": None,
            "attn_tp_group": None,
            "attn_cp_group": None,
            "prefetch_hits_sync_groups": [],
            "prefetch_completion_sync_groups": [],
        }.items():
            setattr(controller, name, value)
        disk = {"kind": "disk", "path": str(tmp_path), "capacity": "64MiB"}
        controller.attach_storage_backend(
            "dynamic",
            model_name="tiny",
            storage_backend_extra_config={**RECIPE, "tiers": {"stores": [disk]}, **extra},
            host_pools=entries,
        )
        controllers.append(controller)
        return controller

    yield make
    for controller in controllers:
        controller.detach_storage_backend()


def transfer(controller: Any, name: str, hashes: Sequence[str], numbers: list[int] | None = None) -> Any:
    names = import_sglang().storage.PoolName
    pool = controller.mem_pool_host.get_pool(names(name))
    return import_sglang().storage.PoolTransfer(
        name=names(name),
        keys=list(hashes),
        host_indices=None if numbers is None else slots_of(pool, numbers),
        hit_policy=hit_policy("trailing_pages"),
    )


def write(controller: Any, numbers: list[int], *sides: Any, prefix: list[str] | None = None) -> int:
    """Back pages up as the tree asks for it; tokens that SGLang counts as stored."""
    hashes = chained_hashes(TOKENS)[: len(numbers)]
    kv = slots_of(controller.storage_host_pool, numbers)
    controller.write_storage(
        kv, TOKENS[: PAGE * len(numbers)], hashes, prefix_keys=prefix, extra_pools=list(sides)
    )
    return int(controller.ack_backup_queue.get(timeout=WAIT_S).completed_tokens)


def query(controller: Any, *sides: Any) -> Any:
    """Ask for all of the tokens; the operation with its hit."""
    controller.prefetch(SimpleNamespace(rid="r"), TOKENS, extra_pools=list(sides))
    return controller.prefetch_hit_queue.get(timeout=WAIT_S)


def read(controller: Any, operation: Any) -> tuple[int, dict[str, int]]:
    """Run the transfer of an operation whose slots are set; tokens read, pages of other pools read."""
    controller.prefetch_buffer.put(operation)
    num_tokens = 0
    pool_hits: dict[str, int] = {}
    while True:
        ack = controller.ack_prefetch_queue.get(timeout=WAIT_S)
        if ack.completed_req:
            return num_tokens, pool_hits
        if ack.completed_tokens is not None:
            num_tokens = int(ack.completed_tokens)
        if ack.pool_hits is not None:
            pool_hits = {str(name): int(pages) for name, pages in ack.pool_hits.items() if pages}


@pytest.mark.parametrize("extra", [{"interface_v1": 1}, {}], ids=["zero copy", "generic"])
def test_a_server_restores_what_another_one_stored(attach: Attach, extra: dict[str, object]) -> None:
    hashes = chained_hashes(TOKENS)
    first = attach(10, **extra)
    sides = (transfer(first, "swa", hashes[2:4], [6, 7]), transfer(first, "mamba", hashes[3:4], [5]))
    assert write(first, [0, 1, 2, 3], *sides) == 4 * PAGE

    second = attach(50, **extra)
    window = transfer(second, "swa", hashes[:WINDOW_PAGES])
    state = transfer(second, "mamba", hashes[:1])
    operation = query(second, window, state)
    assert operation.storage_hit_count == 4 * PAGE
    operation.host_indices = slots_of(second.storage_host_pool, [4, 5, 6, 7])
    window.host_indices = slots_of(second.mem_pool_host.get_pool(window.name), [0, 1])
    state.host_indices = torch.tensor([2])
    assert read(second, operation) == (4 * PAGE, {"swa": 2, "mamba": 1})

    def pages(controller: Any, name: Any, numbers: list[int]) -> list[bytes]:
        return [page_of(controller.mem_pool_host.get_pool(name), number) for number in numbers]

    kv = import_sglang().storage.PoolName.KV
    assert pages(second, kv, [4, 5, 6, 7]) == pages(first, kv, [0, 1, 2, 3])
    assert pages(second, window.name, [0, 1]) == pages(first, window.name, [6, 7])
    assert pages(second, state.name, [2]) == pages(first, state.name, [5])


@pytest.mark.parametrize(
    ("windows", "states", "num_pages"),
    [({3}, {3}, 3), ({3}, {2}, 0), ({1, 3}, {1, 2}, 1), ({2}, {2}, 2), (set(), {1}, 0), ({1}, {1, 4}, 1)],
)
def test_the_hit_is_the_longest_prefix_that_all_pools_can_restore(
    attach: Attach, windows: set[int], states: set[int], num_pages: int
) -> None:
    """O-22, O-23, through SGLang's own reduction over its ranks."""
    hashes = chained_hashes(TOKENS)
    controller = attach(1, interface_v1=1)
    sides = [transfer(controller, "swa", [hashes[end - 1]], [end]) for end in sorted(windows)]
    sides += [transfer(controller, "mamba", [hashes[end - 1]], [end]) for end in sorted(states)]
    for side in sides:
        controller.storage_backend.batch_set_v2([side])
    write(controller, [0, 1, 2, 3])
    asked = [transfer(controller, "swa", hashes[:1]), transfer(controller, "mamba", hashes[:1])]
    assert query(controller, *asked).storage_hit_count == num_pages * PAGE


def test_a_lost_page_shortens_what_is_read(attach: Attach) -> None:
    hashes = chained_hashes(TOKENS)
    controller = attach(1, interface_v1=1)
    write(controller, [0, 1, 2, 3])
    operation = query(controller)
    names = controller.storage_backend._pools["kv"].names
    store = controller.storage_backend._store
    store._ask(store._store.delete([names.key(hashes[2])]), 5.0, "delete")
    operation.host_indices = slots_of(controller.storage_host_pool, [4, 5, 6, 7])
    assert read(controller, operation)[0] == 2 * PAGE


def test_numbers_reach_the_metrics_of_the_server(attach: Attach) -> None:
    controller = attach(1, interface_v1=1)
    write(controller, [0, 1, 2])
    metrics = controller.storage_backend.get_stats()
    assert (metrics.backup_pgs, len(metrics.backup_bandwidth)) == ([3], 1)


def test_clearing_makes_every_query_a_miss(attach: Attach) -> None:
    controller = attach(1, interface_v1=1)
    write(controller, [0, 1, 2])
    assert controller.clear_storage_backend()
    assert query(controller).storage_hit_count == 0


def test_a_wrong_configuration_fails_the_attachment_and_leaves_the_server_without_it(attach: Attach) -> None:
    with pytest.raises(ConfigError, match="tier: not used here; did you mean tiers"):
        attach(1, tier={})
