"""The vLLM connector's parts that need no vLLM: geometry, settings, shared memory, copies, releases."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hicache.config import load_config
from hicache.engines.vllm_copies import BlockCopies, block_bytes
from hicache.engines.vllm_geometry import Component, Geometry, GroupPart, LayerPart, read_geometry
from hicache.engines.vllm_library import check_version
from hicache.engines.vllm_messages import CopyJob, CopyPart
from hicache.engines.vllm_settings import files_digest, make_settings, model_section
from hicache.errors import ConfigError, EngineUnavailableError, TierUnavailableError
from hicache.tiers.shared import SharedPool, map_region
from hicache.types import ComponentSpec, ReuseRule


def spec(kind: str, **values: Any) -> Any:
    """A stand-in for one of vLLM's specs, told by the name of its class."""
    common = {"block_size": 32, "unpadded_page_size_bytes": 256, "dtype": "float32"}
    return type(kind, (SimpleNamespace,), {})(**{**common, **values})


FULL = spec("FullAttentionSpec")
SWA = spec("SlidingWindowSpec", sliding_window=64, extra_retained_tokens=0)
MAMBA = spec("MambaSpec", state_content_size_bytes=4096, dtypes=("bfloat16",), mamba_cache_mode="align")


def cache_config(*specs: Any, **group: Any) -> Any:
    groups = [
        SimpleNamespace(
            layer_names=[f"layers.{2 * number}", f"layers.{2 * number + 1}"],
            kv_cache_spec=each,
            enable_kv_transfer=True,
            **{"is_eagle_group": False, **group},
        )
        for number, each in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups)


# ---- geometry ----------------------------------------------------------------------------------


def test_groups_with_one_rule_become_one_component() -> None:
    geometry = read_geometry(cache_config(FULL, SWA, SWA), num_ranks=2)
    assert [(c.name, c.rule, c.window_tokens, [g.index for g in c.groups]) for c in geometry.components] == [
        ("full", ReuseRule.PATH, 0, [0]),
        ("swa", ReuseRule.WINDOW, 63, [1, 2]),
    ]
    assert geometry.sections() == {
        "full": {"rule": "path", "bytes_per_token": 2 * 2 * 256 // 32},
        "swa": {"rule": "window", "window": 63, "bytes_per_token": 2 * 4 * 256 // 32},
    }


def test_a_recurrent_group_is_a_checkpoint_of_all_its_states() -> None:
    geometry = read_geometry(cache_config(MAMBA, MAMBA, FULL), num_ranks=1)
    assert geometry.has_states
    assert geometry.sections()["mamba"] == {"rule": "checkpoint", "state_bytes": 4 * 4096}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (cache_config(FULL, is_eagle_group=True), "draft model"),
        (cache_config(spec("MambaSpec", mamba_cache_mode="none", dtypes=())), "--mamba-cache-mode align"),
        (cache_config(spec("CrossAttentionSpec")), "CrossAttentionSpec is not one of"),
        (cache_config(FULL, spec("FullAttentionSpec", block_size=64)), "expected one size for all"),
        (cache_config(spec("FullAttentionSpec", block_size=131072)), "at most 65536"),
        (cache_config(), "no KV cache"),
    ],
    ids=["draft model", "states without boundaries", "unknown", "two block sizes", "huge blocks", "nothing"],
)
def test_what_cannot_be_restored_is_refused_with_its_place(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_geometry(config, num_ranks=1)


def test_the_layout_digest_tells_geometries_and_circumstances_apart() -> None:
    one, two = (read_geometry(cache_config(FULL), num_ranks=ranks) for ranks in (1, 2))
    assert len({one.digest("0.32"), two.digest("0.32"), one.digest("0.33")}) == 3
    assert one.digest("0.32") == read_geometry(cache_config(FULL), num_ranks=1).digest("0.32")


# ---- settings ----------------------------------------------------------------------------------
GEOMETRY = read_geometry(cache_config(FULL, SWA), num_ranks=1)
MODEL = {"name": "tiny", "weights": "w", "dtype": "float32", "max_tokens": 4096}


def test_host_memory_without_stores_is_all_shared_with_the_workers() -> None:
    settings = make_settings({"tiers": {"host": {"capacity": "8MiB"}}}, GEOMETRY, MODEL)
    assert (settings.tiers.device.capacity, settings.tiers.host) == (8 << 20, None)
    assert (settings.model.page_size, settings.model.name) == (32, "tiny")


def test_an_eighth_of_host_memory_is_on_the_way_to_stores(tmp_path: Any) -> None:
    file = tmp_path / "hicache.yaml"
    file.write_text(
        f"tiers:\n  host: {{capacity: 8MiB}}\n  stores: [{{kind: disk, path: {tmp_path}/d, capacity: 1GiB}}]\n"
    )
    settings = make_settings({"config_file": str(file)}, GEOMETRY, MODEL)
    assert settings.tiers.host is not None
    assert (settings.tiers.device.capacity, settings.tiers.host.capacity) == (7 << 20, 1 << 20)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "is empty; expected"),
        ({"config_file": "a.yaml", "tiers": {}}, "keep one of the two"),
        ({"config_file": "/no/such.yaml"}, "/no/such.yaml: no such file"),
        ({"tiers": {}}, "tiers.host: missing"),
        (
            {"tiers": {"device": {"kind": "cpu"}, "host": {"capacity": "8MiB"}}},
            "tiers.device: is vLLM's own memory",
        ),
        (
            {"model": {"page_size": 16}, "tiers": {"host": {"capacity": "8MiB"}}},
            "model.page_size: is read from",
        ),
        ({"tiers": {"host": {"capacity": "8MiB"}}, "polcy": {}}, "polcy"),
        (
            {"tiers": {"host": {"capacity": "8MiB"}}, "events": {"endpoint": "tcp://127.0.0.1:5557"}},
            "events.endpoint",
        ),
    ],
    ids=["empty", "file and inline", "no file", "no memory", "device", "page size", "unknown key", "events"],
)
def test_a_wrong_configuration_is_refused_with_its_place(extra: Mapping[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_settings(extra, GEOMETRY, MODEL)


def test_weights_are_told_apart_by_their_bytes(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"one")
    one = files_digest(tmp_path)
    (tmp_path / "README.md").write_text("no weight")
    assert files_digest(tmp_path) == one
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert files_digest(tmp_path) != one


def vllm_config(path: object, **model: object) -> Any:
    """As much of vLLM's configuration as identity is read from."""
    fields: dict[str, object] = {
        "model": str(path), "revision": None, "hf_config": SimpleNamespace(), "quantization": None, "dtype": "float32",
        "max_model_len": 4096, "hf_overrides": {}, "model_weights": "",
    }  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**fields, **model}),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
    )


def weights_of(path: object, **model: object) -> object:
    layout = SimpleNamespace(kv_cache_layout="LBNHC")
    return model_section(vllm_config(path, **model), layout, GEOMETRY, "0.32.0")["weights"]


def twice_the_window(config: Any) -> Any:
    return config


def test_what_changes_a_model_beside_its_files_is_another_model(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    plain = weights_of(tmp_path)
    assert plain == weights_of(tmp_path, hf_overrides={}, model_weights=str(tmp_path))
    variants = [
        weights_of(tmp_path, **changes)
        for changes in (
            {"hf_overrides": {"rope_theta": 1e6}},
            {"hf_overrides": {"rope_theta": 1e7}},
            {"hf_overrides": twice_the_window},
            {"model_weights": "s3://models/a"},
            {"model_weights": "s3://models/b"},
            {"quantization": "fp8"},
        )
    ]
    assert len({plain, *variants}) == 1 + len(variants)
    in_another_order = {"b": 1, "a": 2}, {"a": 2, "b": 1}
    assert len({weights_of(tmp_path, hf_overrides=each) for each in in_another_order}) == 1


def test_a_checkpoint_of_one_file_is_told_by_its_bytes(tmp_path: Any) -> None:
    file = tmp_path / "model.gguf"
    seen = set()
    for content in (b"one", b"two"):
        file.write_bytes(content)
        seen.add(weights_of(file))
    assert len(seen) == 2


# ---- releases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+cpu"])
def test_a_supported_release_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize(
    ("version", "age"), [("0.31.2", "too old"), ("0.33.0", "newer than what was tested")]
)
def test_another_release_is_refused_with_the_version_wanted(version: str, age: str) -> None:
    with pytest.raises(EngineUnavailableError, match=rf"vllm {version} is {age}; .* vllm 0\.32"):
        check_version(version)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_connector_says_which_one_is_wanted() -> None:
    with pytest.raises(EngineUnavailableError, match=r"install vllm 0\.32"):
        importlib.import_module("hicache.engines.vllm")


# ---- shared memory -----------------------------------------------------------------------------
SPECS = (
    ComponentSpec("full", bytes_per_token=8),
    ComponentSpec("mamba", ReuseRule.CHECKPOINT, state_bytes=40),
)


def test_another_mapping_sees_what_was_written_and_outlives_the_owner() -> None:
    pool = SharedPool(SPECS, 4, {"full": 3, "mamba": 2})
    mapped = map_region(pool.region)
    pool.write("full", 2, bytes(range(32)))
    mapped["mamba"][1] = 7
    assert (pool.read("mamba", 0), pool.read("mamba", 1)) == (bytes(40), bytes([7] * 40))
    pool.close()
    assert mapped["full"][2].tolist() == list(range(32))


def test_memory_whose_owner_is_gone_is_refused_with_the_reason() -> None:
    pool = SharedPool(SPECS, 4, {"full": 3, "mamba": 2})
    pool.close()
    with pytest.raises(TierUnavailableError, match="cannot be opened"):
        map_region(pool.region)


# ---- copies ------------------------------------------------------------------------------------
BLOCK_BYTES = 4 * 8  # 4 tokens of 8 bytes
TWO_GROUPS = Geometry(
    4,
    2,
    (
        Component(
            "full",
            ReuseRule.PATH,
            0,
            (
                GroupPart(0, (LayerPart("a", BLOCK_BYTES, "f32"), LayerPart("b", BLOCK_BYTES, "f32"))),
                GroupPart(1, (LayerPart("c", BLOCK_BYTES, "f32"),)),
            ),
        ),
    ),
)


def padded_cache(num_blocks: int, seed: int) -> torch.Tensor:
    """A layer's blocks, each followed by what belongs to somebody else, heads before tokens."""
    raw = torch.from_numpy(np.random.default_rng(seed).random((num_blocks, 12), dtype=np.float32))
    return raw.as_strided((num_blocks, 2, 4, 1), (12, 1, 2, 1))


def move(copies: BlockCopies, part: CopyPart, *, is_load: bool) -> None:
    copies.submit(CopyJob(1, "r", (part,)), is_load=is_load)
    copies._threads[is_load].submit(lambda: None).result()
    (ended,) = copies.take_ended()
    assert ended.is_done


@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_come_back_bit_by_bit_in_other_blocks(rank: int) -> None:
    caches = {name: padded_cache(6, seed) for seed, name in enumerate("abc")}
    before = {name: cache.clone() for name, cache in caches.items()}
    pool = SharedPool((ComponentSpec("full", bytes_per_token=48),), 4, {"full": 5})
    copies = BlockCopies(TWO_GROUPS, rank, caches, 6)
    copies.attach(pool.region)
    for group in (0, 1):
        save = CopyPart(0, group, np.array([4, 0]), np.array([1, 5]))
        move(copies, save, is_load=False)
        move(copies, CopyPart(0, group, np.array([0, 4]), np.array([2, 3])), is_load=True)
    copies.close()
    for name, cache in caches.items():
        assert torch.equal(cache[2], before[name][5])
        assert torch.equal(cache[3], before[name][1])
        for untouched in (0, 1, 4, 5):
            assert torch.equal(cache[untouched], before[name][untouched])
    other = slice(96, None) if rank == 0 else slice(0, 96)
    assert not pool["full"][0, :, other].any()  # the other rank's part
    pool.close()


def test_a_copy_that_fails_is_reported_and_the_next_one_runs() -> None:
    caches = {name: padded_cache(6, seed) for seed, name in enumerate("abc")}
    pool = SharedPool((ComponentSpec("full", bytes_per_token=48),), 4, {"full": 5})
    copies = BlockCopies(TWO_GROUPS, 0, caches, 6)
    copies.attach(pool.region)
    copies.submit(CopyJob(1, "r", (CopyPart(0, 0, np.array([5]), np.array([1])),)), is_load=True)
    copies.submit(CopyJob(2, "s", (CopyPart(0, 0, np.array([4]), np.array([1])),)), is_load=True)
    copies._threads[True].submit(lambda: None).result()
    copies.close()
    assert [(ended.job.number, ended.is_done) for ended in copies.take_ended()] == [(1, False), (2, True)]
    pool.close()


def test_equal_parts_of_a_block_count_as_one() -> None:
    cache = torch.arange(24.0).view(12, 2)  # 6 blocks of 2 parts
    assert block_bytes("a", cache, 6, 16).view(torch.float32).tolist() == cache.view(6, 4).tolist()


def test_a_block_that_is_scattered_is_refused_with_its_layer() -> None:
    scattered = torch.zeros(2, 6, 4).transpose(0, 1)  # keys of all blocks, then values of all blocks
    with pytest.raises(ConfigError, match="layer a: a block of 32 bytes is spread"):
        block_bytes("a", scattered, 6, 32)


def test_settings_of_a_geometry_load() -> None:
    settings = make_settings({"tiers": {"host": {"capacity": "8MiB"}}}, GEOMETRY, MODEL)
    assert (
        load_config(settings.model_dump(mode="json", exclude_none=True)).model.components
        == settings.model.components
    )
