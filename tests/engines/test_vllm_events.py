"""What HiCache's tiers hold, as vLLM's KV events; with stand-ins for vLLM's classes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache.cache import HiCache
from hicache.config import load_config
from hicache.engines.vllm_events import TierEvents
from hicache.engines.vllm_geometry import Component, Geometry, GroupPart
from hicache.events import Cause, ResidencyChange, ResidencyEvent
from hicache.tiers.memory import MemoryStore
from hicache.types import DEFAULT_NAMESPACE, Namespace, PageKey, ReuseRule, Tier

PAGE = 4
FULL = Component("full", ReuseRule.PATH, 0, (GroupPart(0, ()),))
SWA = Component("swa", ReuseRule.WINDOW, 7, (GroupPart(1, ()), GroupPart(2, ())))


def of_vllm(kind: str) -> Any:
    return lambda **fields: SimpleNamespace(kind=kind, **fields)


VLLM: Any = SimpleNamespace(BlockStored=of_vllm("stored"), BlockRemoved=of_vllm("removed"))


@pytest.fixture
def events() -> TierEvents:
    return TierEvents(Geometry(PAGE, 1, (FULL, SWA)), VLLM)


def key(number: int) -> PageKey:
    return PageKey(bytes([number]) * 32)


def stored(
    tier: Tier,
    *pages: int,
    component: str = "full",
    parent: int | None = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> ResidencyEvent:
    """Page ``n`` has the tokens ``4n`` to ``4n + 3``."""
    tokens = np.concatenate([np.arange(PAGE * page, PAGE * (page + 1)) for page in pages]).astype("<i4")
    return ResidencyEvent(
        ResidencyChange.STORED,
        tier,
        component,
        tuple(key(page) for page in pages),
        Cause.INSERT,
        None if parent is None else key(parent),
        tokens.tobytes(),
        namespace,
    )


def removed(tier: Tier, *pages: int, component: str = "full") -> ResidencyEvent:
    keys = tuple(key(page) for page in pages)
    return ResidencyEvent(ResidencyChange.REMOVED, tier, component, keys, Cause.EVICT)


def told(events: TierEvents, *changes: ResidencyEvent) -> list[Any]:
    events.listen(changes)
    return list(events.take())


def test_a_page_in_both_host_tiers_is_in_memory_once(events: TierEvents) -> None:
    [first] = told(events, stored(Tier.DEVICE, 1, 2))
    assert (first.kind, first.medium, first.block_hashes) == ("stored", "CPU", [key(1), key(2)])
    assert (first.parent_block_hash, first.token_ids, first.block_size) == (None, [*range(4, 12)], PAGE)
    assert not told(events, stored(Tier.HOST, 1, 2), removed(Tier.DEVICE, 1, 2))
    [last] = told(events, removed(Tier.HOST, 1, 2))
    assert (last.kind, last.medium, last.block_hashes) == ("removed", "CPU", [key(1), key(2)])


def test_only_pages_new_to_memory_are_told_each_run_with_its_parent(events: TierEvents) -> None:
    told(events, stored(Tier.HOST, 2, parent=1))
    runs = told(events, stored(Tier.DEVICE, 1, 2, 3, 4))
    assert [(run.parent_block_hash, run.block_hashes, run.token_ids) for run in runs] == [
        (None, [key(1)], [4, 5, 6, 7]),
        (key(2), [key(3), key(4)], [*range(12, 20)]),
    ]


def test_stores_are_another_medium(events: TierEvents) -> None:
    told(events, stored(Tier.HOST, 1))
    [there] = told(events, stored(Tier.STORE, 1))
    assert (there.kind, there.medium) == ("stored", "STORAGE")
    [gone] = told(events, removed(Tier.HOST, 1))
    assert (gone.kind, gone.medium) == ("removed", "CPU")
    [left] = told(events, removed(Tier.STORE, 1))
    assert (left.kind, left.medium) == ("removed", "STORAGE")


def test_each_group_of_a_component_is_told(events: TierEvents) -> None:
    windows = told(events, stored(Tier.HOST, 1, component="swa"))
    assert [(w.group_idx, w.kv_cache_spec_kind, w.kv_cache_spec_sliding_window) for w in windows] == [
        (1, "sliding_window", 7),
        (2, "sliding_window", 7),
    ]
    assert [gone.group_idx for gone in told(events, removed(Tier.HOST, 1, component="swa"))] == [1, 2]


def test_adapter_and_salt_stand_where_vllm_has_them(events: TierEvents) -> None:
    namespace = Namespace(salt="s", lora=json.dumps(["poet", "/poet"]))
    [first] = told(events, stored(Tier.HOST, 1, 2, namespace=namespace))
    assert (first.lora_name, first.extra_keys) == ("poet", [("poet", "s"), ("poet",)])
    [next_one] = told(events, stored(Tier.HOST, 3, parent=2, namespace=namespace))
    assert next_one.extra_keys == [("poet",)]
    [salted] = told(events, stored(Tier.HOST, 4, 5, namespace=Namespace(salt="s")))
    assert salted.extra_keys == [("s",), None]


def test_prompts_with_pictures_are_told_neither_when_they_come_nor_when_they_go(events: TierEvents) -> None:
    pictures = Namespace(extra=json.dumps([None, ["cat"]]))
    assert not told(events, stored(Tier.HOST, 1, namespace=pictures), removed(Tier.HOST, 1))
    after_a_reset = Namespace(extra=json.dumps(["epoch", []]))
    assert told(events, stored(Tier.HOST, 1, namespace=after_a_reset))


def test_what_is_told_of_a_cache_is_where_its_pages_are() -> None:
    """Six prompts in room for two in each tier of memory: pages come, move down, and go."""
    geometry = Geometry(PAGE, 1, (FULL,))
    events = TierEvents(geometry, VLLM)
    config = load_config(
        {
            "model": {
                "name": "m",
                "page_size": PAGE,
                "components": {"full": {"rule": "path", "bytes_per_token": 64}},
            },
            "tiers": {
                "device": {"kind": "cpu", "capacity": 8 * PAGE * 64},
                "host": {"capacity": 12 * PAGE * 64, "pinned": False},
            },
            "policy": {"write": "write_through"},
        },
        environ={},
    )
    media: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}
    prompts = [np.arange(1000 * prompt, 1000 * prompt + 4 * PAGE + 1) for prompt in range(6)]
    with HiCache(config, store=MemoryStore(), on_events=events.listen, background=False) as cache:
        for tokens in prompts:
            with cache.match(tokens) as lease:
                lease.reserve(len(tokens))
                lease.release(tokens)
            cache.flush()
            for event in events.take():
                keys = set(event.block_hashes)
                if event.kind == "stored":
                    assert not keys & media[event.medium]
                    media[event.medium] |= keys
                else:
                    assert keys <= media[event.medium]
                    media[event.medium] -= keys
        sources = [cache.probe(tokens).source for tokens in prompts]
    assert len(media["STORAGE"]) == 6 * 4
    assert len(media["CPU"]) * PAGE == sum(source.device + source.host for source in sources) < 6 * 4 * PAGE
