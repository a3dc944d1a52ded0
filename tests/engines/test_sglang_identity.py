"""Who finds whose pages: equal tokens with equal bytes, in any process, and never another model's, layout's or rank's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.engines.sglang_compat import Engine
from hicache.errors import ConfigError, EngineUnavailableError
from hicache.testing.sglang_pools import filled, indexer_pool, mha_pool, mla_pool, page_of, state_pool
from hicache.testing.sglang_released import import_sglang
from hicache.testing.sglang_rig import SglangRig, storage_config

pytestmark = pytest.mark.engines

KEYS = ["a", "b"]
RANK = {"tp_rank": 1, "tp_size": 4, "pp_rank": 1, "pp_size": 2, "attn_cp_rank": 0, "attn_cp_size": 2}
GOLDEN = "9b9c216b570629af2d2245e26db2feaac363ad09598c71a9a0a4ec35446d2629"
"""Key of a page. If it has to change, every store in the field is cold: raise ``NAMES_VERSION``."""

Section = dict[str, object]


@pytest.fixture
def disk(tmp_path: Path) -> Section:
    return {"kind": "disk", "path": str(tmp_path), "capacity": "64MiB"}


def config_of(disk: Section, **changes: Any) -> Any:
    return storage_config(disk, **{**RANK, **changes})


# ---- another process, a restart -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server with another hash seed, which wrote and ended without closing anything."""
    folder = tmp_path_factory.mktemp("other")
    code = f"""
from hicache.testing.sglang_pools import fill, mha_pool, state_pool
from hicache.testing.sglang_rig import SglangRig, storage_config
disk = {{"kind": "disk", "path": {str(folder)!r}, "capacity": "64MiB"}}
full, states = mha_pool(), state_pool()
fill(full, 1), fill(states, 2)
rig = SglangRig(storage_config(disk, **{RANK}), full, mamba=states)
assert rig.put(["a", "b"], [3, 4]) == [True, True]
assert rig.put_side("mamba", ["b"], [5]) == [True]
"""
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250, env=environment)
    return folder


def test_a_server_finds_what_another_process_left(other_server: Path) -> None:
    disk: Section = {"kind": "disk", "path": str(other_server), "capacity": "64MiB"}
    full, states = filled(7), filled(8, state_pool)
    with SglangRig(config_of(disk), full, mamba=states) as rig:
        assert rig.query(KEYS, mamba=("trailing_pages", 1)).restorable_prefix_pages == [2]
        assert rig.get(KEYS, [0, 1]) == [True, True]
        assert rig.get_side("mamba", ["b"], [0]) == [True]
    assert [page_of(full, 0), page_of(full, 1)] == [page_of(filled(1), 3), page_of(filled(1), 4)]
    assert page_of(states, 0) == page_of(filled(2, state_pool), 5)


def test_a_rank_beside_it_finds_nothing_of_it(other_server: Path) -> None:
    disk: Section = {"kind": "disk", "path": str(other_server), "capacity": "64MiB"}
    with SglangRig(config_of(disk, tp_rank=2), filled(7), mamba=filled(8, state_pool)) as rig:
        assert rig.backend.batch_exists(KEYS) == 0
        assert rig.get_side("mamba", ["b"], [0]) == [False]


def test_a_page_keeps_its_name_from_one_version_to_the_next() -> None:
    with SglangRig(storage_config(**RANK), mha_pool()) as rig:
        assert rig.backend._pools["kv"].names.key("a").hex() == GOLDEN


# ---- what tells pages apart ---------------------------------------------------------------------------------------
POOLS: dict[str, Callable[[], Any]] = {
    "dtype": lambda: mha_pool(dtype=torch.float16),
    "layout": lambda: mha_pool("page_head"),
    "layout of the same regions": lambda: mha_pool("page_first_direct"),
    "page size": lambda: mha_pool(page_size=2),
    "layers": lambda: mha_pool(num_layers=2),
    "first layer": lambda: with_attribute(mha_pool(), "start_layer", 3),
    "format of a page": lambda: with_attribute(mha_pool(), "storage_format_tag", "v2"),
    "kind of a pool": mla_pool,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "model": {"model_name": "tiny-2"},
    "name in the configuration": {"extra": {"model": {"name": "tiny"}}},
    "weights": {"extra": {"model": {"weights": "r2"}}},
    "tensor rank": {"tp_rank": 2},
    "tensor ranks": {"tp_size": 8},
    "pipeline rank": {"pp_rank": 0},
    "pipeline ranks": {"pp_size": 3},
    "context rank": {"attn_cp_rank": 1},
    "context ranks": {"attn_cp_size": 1},
}


def with_attribute(pool: Any, name: str, value: object) -> Any:
    setattr(pool, name, value)
    return pool


@pytest.mark.parametrize("what", POOLS)
def test_another_pool_finds_nothing(disk: Section, what: str) -> None:
    with SglangRig(config_of(disk), filled(1)) as rig:
        rig.put(KEYS, [0, 1])
        assert rig.backend.batch_exists(KEYS) == 2
    with SglangRig(config_of(disk), POOLS[what]()) as rig:
        assert rig.backend.batch_exists(KEYS) == 0
        assert rig.get(KEYS, [0, 1]) == [False, False]


@pytest.mark.parametrize("what", CONFIGS)
def test_another_server_finds_nothing(disk: Section, what: str) -> None:
    with SglangRig(config_of(disk), filled(1)) as rig:
        rig.put(KEYS, [0, 1])
    with SglangRig(config_of(disk, **CONFIGS[what]), filled(2)) as rig:
        assert rig.backend.batch_exists(KEYS) == 0
        assert rig.get(KEYS, [0, 1]) == [False, False]


@pytest.mark.parametrize("argument", ["kv_cache_dtype", "quantization", "revision", "dtype"])
def test_a_server_with_other_arguments_finds_nothing(
    disk: Section, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools of 8-bit floats say uint8, whichever they are."""
    for value, num_found in (("one", 0), ("one", 2), ("another", 0), (None, 0)):
        monkeypatch.setattr(Engine, "server_arguments", lambda _, value=value: {argument: value})
        with SglangRig(config_of(disk), filled(1)) as rig:
            assert rig.backend.batch_exists(KEYS) == num_found
            if value == "one":
                rig.put(KEYS, [0, 1])


def test_a_name_in_the_configuration_stands_for_the_path_of_the_model(
    disk: Section, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"extra": {"model": {"name": "llama", "weights": "r1"}}}
    for path, served, num_found in (("/here/llama", "prod", 0), ("/there/llama", "canary", 2)):
        monkeypatch.setattr(Engine, "server_arguments", lambda _, path=path: {"model_path": path})
        with SglangRig(config_of(disk, model_name=served, **named), filled(1)) as rig:
            assert rig.backend.batch_exists(KEYS) == num_found
            rig.put(KEYS, [0, 1])


def test_two_models_served_under_one_name_do_not_meet(disk: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/models/a", "/models/b"):
        monkeypatch.setattr(Engine, "server_arguments", lambda _, path=path: {"model_path": path})
        with SglangRig(config_of(disk, model_name="default"), filled(1)) as rig:
            assert rig.backend.batch_exists(KEYS) == 0
            rig.put(KEYS, [0, 1])


def checkpoint(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize("byte", [0, 9_000_000, 19_999_999], ids=["first", "within", "last"])
def test_other_weights_at_the_same_path_find_nothing(
    disk: Section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte: int
) -> None:
    """On another machine behind one Redis, or after the model was trained on."""
    trained = bytearray(20_000_000)
    trained[byte - byte % 312_500 : byte + 1] = b"x" * (byte % 312_500 + 1)  # a tensor's worth
    for weights, num_found in ((bytes(20_000_000), 0), (bytes(20_000_000), 2), (bytes(trained), 0)):
        path = str(checkpoint(tmp_path / "model", weights))
        monkeypatch.setattr(Engine, "server_arguments", lambda _, path=path: {"model_path": path})
        with SglangRig(config_of(disk), filled(1)) as rig:
            assert rig.backend.batch_exists(KEYS) == num_found
            rig.put(KEYS, [0, 1])


def test_weights_in_the_configuration_spare_the_look_into_files(
    disk: Section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"extra": {"model": {"name": "llama", "weights": "r1"}}}
    for content, num_found in ((b"one", 0), (b"two", 2)):
        path = str(checkpoint(tmp_path / content.decode(), content))
        monkeypatch.setattr(Engine, "server_arguments", lambda _, path=path: {"model_path": path})
        with SglangRig(config_of(disk, **named), filled(1)) as rig:
            assert rig.backend.batch_exists(KEYS) == num_found
            rig.put(KEYS, [0, 1])


@pytest.mark.parametrize("argument", ["kv_cache_dtype", "revision", "json_model_override_args"])
def test_arguments_are_those_of_the_server_that_runs(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import_sglang()
    arguments = import_module("sglang.srt.server_args").ServerArgs
    context = import_module("sglang.srt.runtime_context")._CONTEXT
    monkeypatch.setattr(context, "_server_args", arguments(model_path="/m", **{argument: "given"}))
    with SglangRig(storage_config(), mha_pool()) as rig:
        read = rig.backend.engine.server_arguments()
    assert (read["model_path"], read[argument]) == ("/m", "given")


def test_a_release_that_calls_an_argument_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import_sglang()
    context = import_module("sglang.srt.runtime_context")._CONTEXT
    monkeypatch.setattr(context, "_server_args", object())
    with pytest.raises(EngineUnavailableError, match=r"has no server argument dtype, .*kv_cache_dtype"):
        SglangRig(storage_config(), mha_pool())


def test_a_model_without_any_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.name: missing, .*name the model"):
        SglangRig(storage_config(model_name=None), mha_pool())


def test_replicas_of_a_data_parallel_server_share(disk: Section) -> None:
    with SglangRig(config_of(disk, dp_rank=0), filled(1)) as rig:
        rig.put(KEYS, [0, 1])
    with SglangRig(config_of(disk, dp_rank=1), filled(2)) as rig:
        assert rig.backend.batch_exists(KEYS) == 2


# ---- latent attention: one rank writes for all ----------------------------------------------------------------------
def test_ranks_of_latent_attention_read_what_the_first_wrote(disk: Section) -> None:
    source, target = filled(1, mla_pool), filled(2, mla_pool)
    with SglangRig(
        config_of(disk, tp_rank=0, is_mla_model=True),
        source,
        indexer=filled(3, lambda: indexer_pool(mla_pool())),
    ) as rig:
        rig.put(KEYS, [0, 1])
        rig.put_side("indexer", KEYS, [0, 1])
    with SglangRig(
        config_of(disk, tp_rank=3, is_mla_model=True), target, indexer=indexer_pool(mla_pool())
    ) as rig:
        assert rig.query(KEYS, indexer=("all_pages", 1)).restorable_prefix_pages == [1, 2]
        assert rig.get(KEYS, [4, 5]) == [True, True]
    assert page_of(target, 4) == page_of(source, 0)


def test_ranks_of_one_server_work_in_one_folder_at_once(disk: Section) -> None:
    ranks = [
        SglangRig(
            config_of(disk, tp_rank=rank, is_mla_model=True),
            filled(10 + rank, mla_pool),
            mamba=filled(20 + rank, state_pool),
        )
        for rank in range(3)
    ]
    try:
        assert ranks[0].put(KEYS, [0, 1]) == [True, True]
        for rig in ranks:
            assert rig.put_side("mamba", ["b"], [3]) == [True]
        for rig in ranks:
            assert rig.query(KEYS, mamba=("trailing_pages", 1)).restorable_prefix_pages == [2]
            assert (rig.get(KEYS, [4, 5]), rig.get_side("mamba", ["b"], [6])) == ([True, True], [True])
            assert page_of(rig.pools["kv"], 5) == page_of(ranks[0].pools["kv"], 1)
            assert page_of(rig.pools["mamba"], 6) == page_of(rig.pools["mamba"], 3)
    finally:
        for rig in ranks:
            rig.backend.close()


@pytest.mark.parametrize(("name", "make"), [("mamba", state_pool), ("draft", mha_pool)])
def test_what_is_cut_by_rank_beside_latent_attention_stays_with_its_rank(
    disk: Section, name: str, make: Callable[[], Any]
) -> None:
    with SglangRig(
        config_of(disk, tp_rank=0, is_mla_model=True), mla_pool(), **{name: filled(1, make)}
    ) as rig:
        rig.put_side(name, KEYS, [0, 1])
    with SglangRig(
        config_of(disk, tp_rank=1, is_mla_model=True), mla_pool(), **{name: filled(2, make)}
    ) as rig:
        assert rig.get_side(name, KEYS, [0, 1]) == [False, False]
    with SglangRig(
        config_of(disk, tp_rank=0, is_mla_model=True), mla_pool(), **{name: filled(2, make)}
    ) as rig:
        assert rig.get_side(name, KEYS, [0, 1]) == [True, True]


# ---- what hangs under what ----------------------------------------------------------------------------------------------
def test_a_prefix_that_sglang_passes_ties_batches_together() -> None:
    """Stores evict children before parents; without the prefix each batch is a first page."""
    from hicache.testing.scripted_store import ScriptedStore
    from hicache.testing.sglang_pools import slots_of

    parents: dict[bytes, bytes | None] = {}

    class Watched(ScriptedStore):
        async def put(self, pages: Any) -> list[bool]:
            parents.update({page.key: page.parent for page in pages})
            return await super().put(pages)

    pool = mha_pool()
    with SglangRig(
        storage_config(), pool, arguments={"make_store": lambda *_: Watched()}, swa=mha_pool()
    ) as rig:
        key = rig.backend._pools["kv"].names.key
        prefix = import_sglang().storage.HiCacheStorageExtraInfo(prefix_keys=["x", "y"])
        rig.put(["x", "y"], [0, 1])
        rig.backend.batch_set_v1(KEYS, slots_of(pool, [2, 3]), prefix)
        window = rig.transfer("swa", KEYS, [2, 3])
        window.hit_policy = type(window.hit_policy)("trailing_pages")
        rig.backend.batch_set_v2([window], prefix)
        of_window = [rig.backend._pools["swa"].names.key(name) for name in KEYS]
    assert parents == {
        key("x"): None, key("y"): key("x"), key("a"): key("y"), key("b"): key("a"),
        of_window[0]: None, of_window[1]: None,
    }  # fmt: skip
