"""What makes equal tokens unequal: namespaces in the tree and in L3, and the model's identity in L3."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicache.testing.trees import UNEQUAL_NAMESPACES
from hicache.types import DEFAULT_NAMESPACE, Namespace, TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"
ROOT = Path(__file__).parents[2]


def on_memory(make_rig: MakeRig, model: str = "full", **settings: Any) -> Rig:  # Any: see Rig
    return make_rig(model, device=256, host=256, store="scripted", **settings)


# ---- namespaces (O-05, O-06) ---------------------------------------------------------------------------------------
def test_no_namespace_is_served_from_another(make_rig: MakeRig, t: T) -> None:
    """O-05: each pair of different tuples: nothing; the same tuple: all but the cap."""
    rig = on_memory(make_rig)
    for namespace in UNEQUAL_NAMESPACES.values():
        assert rig.serve(t(16), namespace=namespace).source.total == 0
    for namespace in UNEQUAL_NAMESPACES.values():
        assert rig.serve(t(17), namespace=namespace).source.total == 16
    rig.check_idle()


def test_every_namespace_has_pages_of_its_own_in_l3(make_rig: MakeRig, t: T) -> None:
    """O-05, O-06: different keys, and each reads back what it wrote."""
    rig = on_memory(make_rig, EVERY)
    for namespace in UNEQUAL_NAMESPACES.values():
        rig.serve(t(16), namespace=namespace)
    rig.cache.drain()
    keys = [key for namespace in UNEQUAL_NAMESPACES.values() for key in rig.keys(t(16), "full", namespace)]
    assert len(set(keys)) == len(keys) == 4 * len(UNEQUAL_NAMESPACES)
    assert rig.cache._runtime.transfers.run_store(lambda store: store.exists(keys)) == [True] * len(keys)
    rig.cache.reset()
    for namespace in UNEQUAL_NAMESPACES.values():
        assert rig.serve(t(17), namespace=namespace).source == TierTokens(0, 0, 16)
    rig.check_idle()


PAIRS = list(itertools.permutations(["none", "salt x", "salt empty"], 2))


@pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=[f"{a} to {b}" for a, b in PAIRS])
def test_l3_gives_nothing_to_another_tenant(make_rig: MakeRig, t: T, writer: str, reader: str) -> None:
    """O-06: L1 and L2 are empty, so only the keys stand between the two."""
    rig = on_memory(make_rig, EVERY)
    rig.serve(t(40), namespace=UNEQUAL_NAMESPACES[writer])
    rig.cache.drain()
    rig.cache.reset()
    assert rig.serve(t(41), namespace=UNEQUAL_NAMESPACES[reader]).source.total == 0
    assert rig.store.keys_of("get") == []
    assert rig.serve(t(41), namespace=UNEQUAL_NAMESPACES[writer]).source.store == 40
    rig.check_idle()


def test_a_request_whose_match_ends_at_the_root_asks_under_its_own_name(make_rig: MakeRig, t: T) -> None:
    """O-06: nothing of tenant B is in the tree, so there is no node to take the namespace from."""
    rig = on_memory(make_rig)
    rig.serve(t(40), namespace=Namespace(salt="A"))
    rig.cache.drain()
    rig.cache.reset()
    asked = len(rig.store.keys_of("exists"))
    assert rig.serve(t(8), namespace=Namespace(salt="B")).source.total == 0
    keys = rig.store.keys_of("exists")[asked:]
    assert tuple(keys) == rig.keys(t(4), "full", Namespace(salt="B"))
    assert rig.serve(t(41), namespace=Namespace(salt="A")).source.store == 40


def test_the_default_namespace_is_the_one_without_parts(make_rig: MakeRig, t: T) -> None:
    rig = on_memory(make_rig)
    rig.serve(t(16))
    assert rig.serve(t(17), namespace=Namespace()).source.total == 16
    assert rig.keys(t(16)) == rig.keys(t(16), "full", DEFAULT_NAMESPACE)


def test_a_probe_knows_namespaces_too(make_rig: MakeRig, t: T) -> None:
    rig = on_memory(make_rig)
    rig.serve(t(16), namespace=Namespace(lora="x"))
    assert rig.cache.probe(t(17)).walked == 0
    assert rig.cache.probe(t(17), namespace=Namespace(salt="x")).walked == 0
    assert rig.cache.probe(t(17), namespace=Namespace(lora="x")).boundary == 16


# ---- identity (O-45) -----------------------------------------------------------------------------------------------

VARIATIONS: dict[str, dict[str, Any]] = {
    "model": {"model__name": "other"},
    "weights": {"model__weights": "sha256:1"},
    "dtype": {"model__dtype": "float8_e4m3"},
    "page size": {"page_size": 8},
    "tensor parallel size": {"ranks__tp_size": 2},
    "tensor parallel rank": {"ranks__tp_size": 2, "ranks__tp_rank": 1},
    "pipeline rank": {"ranks__pp_size": 2, "ranks__pp_rank": 1},
    "context rank": {"ranks__cp_size": 2, "ranks__cp_rank": 1},
    "layers": {"model__components": {"full": {"rule": "path", "layers": 4, "bytes_per_token": 8}}},
    "bytes": {"model__components": {"full": {"rule": "path", "layers": 2, "bytes_per_token": 16}}},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_another_identity_on_the_same_store_hits_nothing(
    make_rig: MakeRig, t: T, name: str, disk: Path
) -> None:
    """O-45: vary one thing at a time; the pages of the first cache are there and are never read."""
    stores = [{"kind": "disk", "path": str(disk), "capacity": "1MiB"}]
    first = make_rig(device=256, host=256, tiers__stores=stores)
    first.serve(t(64))
    first.cache.close()
    other = make_rig(device=256, host=256, tiers__stores=stores, **VARIATIONS[name])
    assert other.serve(t(65)).source.total == 0
    stats = other.cache.stats().store
    assert stats is not None
    assert (stats.pages_read, stats.pages_corrupt) == (0, 0)
    other.check_idle()
    other.cache.close()
    again = make_rig(device=256, host=256, tiers__stores=stores)
    assert again.serve(t(65)).source.store == 64


def test_two_ranks_share_a_store_and_read_only_their_own(make_rig: MakeRig, t: T, disk: Path) -> None:
    stores = [{"kind": "disk", "path": str(disk), "capacity": "1MiB"}]
    ranks = [
        make_rig(EVERY, device=256, host=256, tiers__stores=stores, ranks__tp_size=2, ranks__tp_rank=rank)
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.serve(t(40))
        rank.cache.drain()
        rank.cache.reset()
    for rank in ranks:
        assert rank.serve(t(41)).source.store == 40
        rank.check_idle()


PROGRAM = """
import sys
from hicache.cache import HiCache
from hicache.config import load_config
from hicache.replay.simulated import SimulatedEngine
from hicache.replay.stamps import PageChecker
import numpy as np
import yaml

checker = PageChecker()
cache = HiCache(load_config(yaml.safe_load(sys.stdin.read()), environ={}), on_page=checker.check)
served = SimulatedEngine(cache).serve(np.arange(1, 66, dtype=np.int32), np.empty(0, dtype=np.int32))
cache.close()
print(served.source.store, served.source.total, served.mismatches, checker.mismatches, cache.audit())
"""


@pytest.mark.parametrize(
    "hash_seed", [pytest.param("", id="unset", marks=pytest.mark.slow), pytest.param("12345", id="12345")]
)
def test_another_process_reads_the_pages_whatever_its_hash_seed(
    make_rig: MakeRig, t: T, disk: Path, hash_seed: str
) -> None:
    """O-42, O-45, O-46: no variation, other process: the same keys, every byte right."""
    stores = [{"kind": "disk", "path": str(disk), "capacity": "1MiB"}]
    first = make_rig(EVERY, device=64, host=64, tiers__stores=stores)
    first.serve(t(64))
    config = first.config.model_dump_json(exclude_none=True)
    first.cache.close()
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed} if hash_seed else dict(os.environ)
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=config,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environ,
        timeout=250,
        check=False,
    )
    assert (other.stdout.strip(), other.stderr) == ("64 64 0 0 []", "")
