"""L3 between caches: sharing a store, coming back after a restart, flushing, losing nothing on close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicache.testing.scripted_store import ScriptedStore
from hicache.tiers.memory import MemoryStore
from hicache.tiers.store import PageTarget, Store, StoredPage, StoreStats
from hicache.types import PageKey, Tier, TierTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"
ROOT = Path(__file__).parents[2]


class SharedStore(Store):
    """A door to a store that outlives whoever closes the door."""

    def __init__(self, behind: MemoryStore) -> None:
        self._behind = behind

    async def open(self) -> None:
        await self._behind.open()

    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        return await self._behind.exists(keys)

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        return await self._behind.get(targets)

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        return await self._behind.put(pages)

    async def delete(self, keys: Sequence[PageKey]) -> int:
        return await self._behind.delete(keys)

    async def clear(self) -> int:
        return await self._behind.clear()

    async def close(self) -> None:
        pass

    def stats(self) -> StoreStats:
        return self._behind.stats()


def on_disk(make_rig: MakeRig, folder: Path, model: str = EVERY, **settings: Any) -> Rig:  # Any: see Rig
    stores = [{"kind": "disk", "path": str(folder), "capacity": "4MiB"}]
    return make_rig(model, **{"device": 64, "host": 64, "tiers__stores": stores} | settings)


# ---- sharing -------------------------------------------------------------------------------------------------------
def test_two_caches_on_one_memory_store_serve_each_other(make_rig: MakeRig, t: T, model: str) -> None:
    behind = MemoryStore()
    first, second = (make_rig(model, host=64, store=SharedStore(behind)) for _ in range(2))
    first.serve(t(20))
    first.cache.drain()
    assert second.serve(t(24)).source == TierTokens(20 - stored_part(second), 0, stored_part(second))
    second.cache.drain()
    first.cache.reset()
    assert first.serve(t(25)).source.total == 24
    first.check_idle()
    second.check_idle()


def stored_part(rig: Rig) -> int:
    """Of a prefix of at least a window that is all in L3, how many tokens need payload: without a path
    component the tokens before a window count with the device.
    """
    primary = next((spec for spec in rig.specs if spec.rule == "path"), rig.specs[0])
    return primary.window_tokens or 20


def test_two_caches_on_one_folder_serve_each_other(make_rig: MakeRig, t: T, disk: Path) -> None:
    first, second = on_disk(make_rig, disk), on_disk(make_rig, disk)
    first.serve(t(20))
    first.cache.drain()
    assert second.serve(t(24)).source == TierTokens(0, 0, 20)
    second.cache.drain()
    first.cache.reset()
    assert first.serve(t(25)).source == TierTokens(0, 0, 24)
    first.check_idle()
    second.check_idle()


def test_what_another_cache_removed_is_a_miss_and_forgotten(make_rig: MakeRig, t: T, disk: Path) -> None:
    """O-44: the file goes between the probe and the read; the request computes, the next one does not ask."""
    first, second = on_disk(make_rig, disk, "full"), on_disk(make_rig, disk, "full")
    first.serve(t(40))
    first.cache.drain()
    with second.cache.match(t(41)) as lease:
        lease.load()  # the tree of the second knows L3 now
    second.squeeze()
    first.cache._runtime.transfers.run_store(lambda store: store.clear())
    second.cache.reset()
    assert second.serve(t(41)).source.total == 0
    second.check_idle()


# ---- restart -------------------------------------------------------------------------------------------------------
def test_a_restart_finds_every_page(make_rig: MakeRig, t: T, disk: Path, model: str) -> None:
    """O-42: five pages written; the next process finds five, and the usage is theirs."""
    first = on_disk(make_rig, disk, model)
    first.serve(t(20))
    first.cache.close()
    before = first.cache.stats().store
    second = on_disk(make_rig, disk, model)
    after = second.cache.stats().store
    assert before is not None
    assert after is not None
    assert after.num_pages > 0
    assert (after.num_pages, after.used_bytes) == (before.num_pages, before.used_bytes)
    assert second.serve(t(21)).source.total == 20
    second.check_idle()


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_restart_reads_what_was_encoded(
    make_rig: MakeRig, t: T, disk: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """Written compressed and encrypted; the next process has the key, and writes plainly."""
    monkeypatch.setenv("HICACHE_TEST_KEY", "ab" * 32)
    codec: dict[str, object] = {
        "compression": compression,
        "encryption": "aes-gcm",
        "key_env": "HICACHE_TEST_KEY",
    }
    store: dict[str, object] = {"kind": "disk", "path": str(disk), "capacity": "4MiB"}
    first = make_rig(EVERY, device=64, host=64, tiers__stores=[{**store, "codec": codec}])
    first.serve(t(20))
    first.cache.close()
    plain = {"key_env": "HICACHE_TEST_KEY"}
    second = make_rig(EVERY, device=64, host=64, tiers__stores=[{**store, "codec": plain}])
    assert second.serve(t(21)).source == TierTokens(0, 0, 20)
    second.check_idle()
    without = make_rig(EVERY, device=64, host=64, tiers__stores=[store])
    assert without.serve(t(21)).source.total == 0  # a miss for who has no key, and nothing is removed
    third = make_rig(EVERY, device=64, host=64, tiers__stores=[{**store, "codec": plain}])
    assert third.serve(t(21)).source.total == 20


def test_a_restart_serves_the_very_same_prompt(make_rig: MakeRig, t: T, disk: Path) -> None:
    """O-04 over a restart: the boundary is the last page end below the prompt, where a mark was left."""
    first = on_disk(make_rig, disk, "full+mamba")
    first.serve(t(20))
    first.cache.close()
    second = on_disk(make_rig, disk, "full+mamba")
    assert second.serve(t(20)).source.total == 16


def test_the_hot_head_is_in_l3_after_flush_and_restart(make_rig: MakeRig, t: T, disk: Path) -> None:
    """O-39: write_back, 128 pages; the head stays on the device, the tail went down."""
    first = on_disk(make_rig, disk, "full", device=136, host=136, policy__write="write_back")
    first.serve(t(512))
    first.serve([*t(16), *t(2400, 2001)])
    assert first.cache.probe(t(513)).source.host > 300
    assert first.cache.flush()
    first.check_idle()
    first.cache.close(flush=False)
    second = on_disk(make_rig, disk, "full", device=136, host=136)
    assert second.serve(t(513)).source == TierTokens(0, 0, 512)
    second.check_idle()


@pytest.mark.parametrize("host", [160, 64])
def test_no_page_is_in_l3_without_its_predecessors(make_rig: MakeRig, t: T, disk: Path, host: int) -> None:
    """O-39: the head stays hot, everything else is pushed through L2 into L3. What L3 has of a prompt is
    its beginning; with an L2 larger than the prompt it is all of it.
    """
    rig = on_disk(make_rig, disk, "full", device=136, host=host, policy__write="write_back")
    rig.serve(t(512))
    for turn in range(24):
        rig.serve([*t(16), *t(104 + 100 * (turn + 6), 100 * (turn + 6))])
        rig.serve(t(10_000 + 1000 * turn + 32, 10_001 + 1000 * turn))
    assert rig.cache.flush()
    rig.check_idle()
    stored = rig.stored(t(512))
    assert stored == sorted(stored, reverse=True)
    rig.cache.close()
    other = on_disk(make_rig, disk, "full", device=136, host=136)
    assert other.serve(t(513)).source.store == 4 * sum(stored)
    assert host < 128 or all(stored)


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_close_writes_what_l3_lacks(make_rig: MakeRig, t: T, disk: Path, write: str, model: str) -> None:
    """Under write_back too, though nothing was evicted."""
    first = on_disk(make_rig, disk, model, policy__write=write)
    first.serve(t(20), t(110, 101))
    first.cache.close()
    second = on_disk(make_rig, disk, model)
    # The answer's last token has no payload: 29 tokens were written, 28 of them in whole pages.
    assert second.serve([*t(20), *t(111, 101)]).source.total == 28
    second.check_idle()


def test_close_may_be_told_not_to_write(make_rig: MakeRig, t: T, disk: Path) -> None:
    first = on_disk(make_rig, disk, policy__write="write_back")
    first.serve(t(20))
    first.cache.close(flush=False)
    second = on_disk(make_rig, disk)
    assert second.serve(t(21)).source.total == 0


def test_flush_goes_through_an_l2_smaller_than_l1(make_rig: MakeRig, t: T, model: str) -> None:
    """All of L1 passes through an L2 of a few slots, batch by batch."""
    needed = {"full": 4, "swa": 4, "wide": 6, "mamba": 2}
    host = {name: needed[name] for name in model.split("+")}
    behind = MemoryStore()
    rig = make_rig(model, host=host, store=SharedStore(behind), policy__write="write_back")
    rig.serve(t(60))
    rig.serve(t(160, 101))
    assert rig.cache.flush()
    rig.check_idle()
    other = make_rig(model, host=64, store=SharedStore(behind))
    assert other.serve(t(61)).source.total == 60
    assert other.serve(t(161, 101)).source.total == 60


def test_write_through_selective_stores_what_is_used_twice(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, store="scripted", policy__write="write_through_selective")
    rig.serve(t(20))
    rig.cache.drain()
    assert rig.stored(t(20)) == [False] * 5
    assert rig.resident("full", Tier.HOST) == 0
    rig.serve([*t(20), 99])
    rig.check_idle()
    assert rig.stored(t(20)) == [True] * 5


PROGRAM = """
import os, sys
import numpy as np, yaml
from hicache.cache import HiCache
from hicache.config import load_config
from hicache.replay.simulated import SimulatedEngine

cache = HiCache(load_config(yaml.safe_load(sys.stdin.read()), environ={}))
engine = SimulatedEngine(cache)
for turn in range(1, 1000):
    engine.serve(np.arange(1, 8 * turn + 1, dtype=np.int32), np.empty(0, dtype=np.int32))
    cache.drain()
    print(turn, flush=True)
"""


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_kill(make_rig: MakeRig, t: T, disk: Path) -> None:
    """DESIGN 6: kill -9 in the middle of the work; what had been drained before is found, usage included."""
    config = on_disk(make_rig, disk).config.model_dump_json(exclude_none=True)
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=dict(os.environ),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(config)
        child.stdin.close()
        turn = 0
        while turn < 5:
            turn = int(child.stdout.readline())
    finally:
        child.send_signal(signal.SIGKILL)
        child.stdout.close()
        child.wait(20)
    rig = on_disk(make_rig, disk)
    assert rig.serve(t(8 * turn + 1)).source.total >= 8 * turn
    rig.check_idle()
    stats = rig.cache.stats().store
    assert stats is not None
    assert stats.pages_corrupt == 0


def test_identical_rounds_reach_their_full_hit_in_the_second(make_rig: MakeRig, t: T) -> None:
    """O-71: 8 prompts of 10 pages, small L1 and L2: round 2 hits all, and L3 does not grow after it."""
    store = ScriptedStore()
    rig = make_rig(device=24, host=16, store=store)
    prompts = [t(1000 * number + 41, 1000 * number + 1) for number in range(1, 9)]
    sizes = []
    for number in range(4):
        served = [rig.serve(prompt).source.total for prompt in prompts]
        rig.cache.drain()
        assert served == ([0] * 8 if number == 0 else [40] * 8)
        sizes.append(store.stats().num_pages)
    assert sizes == [80] * 4
    rig.check_idle()


def test_what_a_private_store_has_evicted_is_not_promised(make_rig: MakeRig, t: T) -> None:
    """Evictions of the store do not come back to the tree; so it is asked from the first one on."""
    stores = [{"kind": "disk", "path": "auto", "capacity": "16KiB"}]
    rig = make_rig(device=16, host=16, tiers__stores=stores)
    prompts = [t(1000 * number + 17, 1000 * number + 1) for number in range(60)]
    for prompt in prompts:
        rig.serve(prompt)
        rig.cache.drain()
    stats = rig.cache.stats().store
    assert stats is not None
    assert stats.pages_evicted > 0
    for prompt in prompts[:20]:
        with rig.cache.match(prompt) as lease:
            assert lease.reused == lease.load()
    assert rig.serve(prompts[-1]).source.total == 16
    rig.check_idle()
