"""Reported failures of identity: what a page is called in L3, and who finds it there."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from hicache.radix.keys import Identity, page_keys
from hicache.testing.harness import BuildHarness
from hicache.testing.payloads import Stamp, path_bytes
from hicache.testing.trees import count_to
from hicache.types import ComponentSpec, Namespace, PageKey, ReuseRule, Tier

BASE = Identity("model-a", weights="rev-1", dtype="fp8_e4m3", page_size=4, tp_size=8, tp_rank=1)
FULL = ComponentSpec("full", ReuseRule.PATH, num_layers=32, bytes_per_token=1024)

OTHER_IDENTITIES: dict[str, dict[str, Any]] = {
    "model": {"model": "model-b"},
    "weights": {"weights": "rev-2"},
    "weights absent": {"weights": None},
    "weights empty": {"weights": ""},
    "dtype": {"dtype": "bf16"},
    "scale format": {"dtype": "fp8_e4m3+ue8m0"},
    "layout": {"layout": "layer_first"},
    "page size": {"page_size": 8},
    "tensor parallel width": {"tp_size": 16},
    "tensor parallel rank": {"tp_rank": 0},
    "pipeline width": {"pp_size": 2},
    "pipeline rank": {"pp_size": 2, "pp_rank": 1},
    "context parallel width": {"cp_size": 2},
    "context parallel rank": {"cp_size": 2, "cp_rank": 1},
}
OTHER_COMPONENTS: dict[str, dict[str, Any]] = {
    "name": {"name": "draft"},
    "rule": {"rule": ReuseRule.WINDOW},
    "layers": {"num_layers": 16},
    "bytes a token": {"bytes_per_token": 512},
}

GOLDEN = {  # first and last key of T(64), P=16, in every process on every machine
    "default": (
        "e184883ee5c3a385b16954b28ae22ac9ca93191fc0d3e8e481e3f440e5fdbdc9",
        "a119a69297c1beb500cc5e4f026801c7a9e2c0c834bb6b58951bc03e44e8e40b",
    ),
    "salted": (
        "9a8d1b9d500036962af576504c7b220ba32cf5735a5525d704df384e92407ca3",
        "aa3cd98b697ae81b3b06936e6ea018a66d58a4b2df14713375871729b87c21b7",
    ),
}
NAMESPACES = {"default": Namespace(), "salted": Namespace(salt="tenant", lora=None, extra="")}

SCRIPT = """
import sys
from hicache.radix.keys import Identity, page_keys
from hicache.types import ComponentSpec, Namespace
spec = ComponentSpec("full", "path", num_layers=32, bytes_per_token=1024)
identity = Identity("model-a", weights=None, page_size=16).digest()
for namespace in (Namespace(), Namespace(salt="tenant", lora=None, extra="")):
    for key in page_keys(identity, spec, list(range(1, 65)), 16, namespace):
        print(key.hex())
"""


def golden_keys(name: str) -> list[str]:
    identity = Identity("model-a", weights=None, page_size=16).digest()
    return [key.hex() for key in page_keys(identity, FULL, count_to(64), 16, NAMESPACES[name])]


@pytest.mark.parametrize("change", OTHER_IDENTITIES)
def test_every_part_of_the_identity_changes_every_key(change: str) -> None:
    """O-45."""
    other = dataclasses.replace(BASE, **OTHER_IDENTITIES[change])
    keys = [page_keys(i.digest(), FULL, count_to(16), 4, Namespace()) for i in (BASE, other)]
    assert len({*keys[0], *keys[1]}) == 8


@pytest.mark.parametrize("change", OTHER_COMPONENTS)
def test_every_part_of_the_component_changes_every_key(change: str) -> None:
    """O-45."""
    other = dataclasses.replace(FULL, **OTHER_COMPONENTS[change])
    keys = [page_keys(BASE.digest(), spec, count_to(16), 4, Namespace()) for spec in (FULL, other)]
    assert len({*keys[0], *keys[1]}) == 8


@pytest.mark.parametrize("change", OTHER_IDENTITIES)
def test_a_cache_of_another_identity_finds_nothing_in_the_shared_store(
    build: BuildHarness, change: str
) -> None:
    """O-45."""
    shared: dict[PageKey, Stamp] = {}
    settings = {"page_size": 4, "device": 8, "host": 8, "has_store": True}
    writer = build(store=shared, identity=BASE.digest(), **settings)
    writer.serve(count_to(16))
    writer.persist_all()
    assert len(shared) == 4

    other = dataclasses.replace(BASE, **OTHER_IDENTITIES[change])
    stranger = build(store=shared, identity=other.digest(), **settings)
    stranger.learn(count_to(17))
    assert stranger.probe(count_to(17)).boundary == 0
    twin = build(store=shared, identity=BASE.digest(), **settings)
    twin.learn(count_to(17))
    assert twin.probe(count_to(17)).boundary == 16


def test_equal_heads_of_unequal_tensor_parallel_widths_have_other_keys() -> None:
    """O-45: 8 KV heads; rank 1 of 8 and rank 1 of 16 hold other bytes."""
    narrow = dataclasses.replace(BASE, tp_size=8, tp_rank=1)
    wide = dataclasses.replace(BASE, tp_size=16, tp_rank=1)
    assert narrow.digest() != wide.digest()


@pytest.mark.parametrize("seed", [None, "0", "12345"])
def test_keys_are_the_same_in_every_process(seed: str | None) -> None:
    """O-46."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == golden_keys("default") + golden_keys("salted")


@pytest.mark.parametrize("name", GOLDEN)
def test_keys_equal_the_golden_ones(name: str) -> None:
    """O-46: a change here makes every stored page unreachable; it needs a new format version."""
    keys = golden_keys(name)
    assert len(keys) == 4
    assert (keys[0], keys[-1]) == GOLDEN[name]


@pytest.mark.parametrize("shape", [[16], [8, 16], [4, 8, 12, 16]], ids=str)
def test_keys_do_not_depend_on_the_shape_of_the_tree(build: BuildHarness, shape: list[int]) -> None:
    """O-24: device holds two pages of four; the probe asks for the others, whatever the nodes."""
    cache = build(page_size=4, device=64, host=16, has_store=True, write="write_back")
    full = cache.executor.keys.of("full", Namespace(), path_bytes(count_to(16)))
    cache.executor.seed_store("full", Namespace(), path_bytes(count_to(16)), range(4))
    cache.serve(count_to(16))
    for end in shape:
        cache.serve([*count_to(end), *[77 + end] * 4])
    cache.empty("full", Tier.DEVICE)
    cache.empty("full", Tier.HOST)
    cache.serve(count_to(8))

    query = cache.learn(count_to(17))
    assert query.keys == {"full": ((2, full[2]), (3, full[3]))}
    lease = cache.match(count_to(17))
    assert (lease.found.source.device, lease.found.source.store) == (8, 8)
    assert cache.restore(lease).boundary == 16


def test_a_prefix_that_shrinks_between_probe_and_plan_is_fetched_whole(build: BuildHarness) -> None:
    """O-24: one of the two device pages leaves in between; the keys are the same, nothing is missed."""
    cache = build(page_size=4, device=8, host=16, has_store=True, write="write_back")
    cache.executor.seed_store("full", Namespace(), path_bytes(count_to(16)), range(4))
    full = cache.executor.keys.of("full", Namespace(), path_bytes(count_to(16)))
    cache.serve(count_to(8))
    query = cache.store_query(count_to(17))
    assert query.keys == {"full": ((2, full[2]), (3, full[3]))}
    cache.make_room("full", Tier.DEVICE, 7)
    cache.complete_all()
    cache.make_room("full", Tier.HOST, 16)
    cache.complete_all()
    asked = cache.learn(count_to(17))
    assert {page for page, _ in asked.keys["full"]} >= {2, 3}
    lease = cache.match(count_to(17))
    assert lease.found.boundary == 16
    assert cache.restore(lease).boundary == 16
