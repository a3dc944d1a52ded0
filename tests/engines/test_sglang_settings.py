"""What the extra config may say, and which SGLang is taken. Runs without SGLang."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hicache.engines.sglang as module
from hicache.engines.sglang_compat import OLDEST, TESTED, load_engine, release
from hicache.engines.sglang_names import model_digest
from hicache.engines.sglang_settings import read_settings
from hicache.errors import ConfigError, EngineUnavailableError

RECIPE = {"backend_name": "hicache", "module_path": "hicache.engines.sglang", "class_name": "HiCacheBackend"}
STORES = {"tiers": {"stores": [{"kind": "memory"}]}}
STORAGE = "sglang.srt.mem_cache.hicache_storage"
YAML = """\
model: {name: llama, weights: r7}
tiers:
  stores:
    - {kind: disk, path: /tmp, capacity: 1TiB}
    - {kind: redis, url: "redis://cache:6379", ttl: 1d}
  stack: {write: all}
policy: {store_timeout: 2s, wait_limit: 9s}
"""


def written(folder: Path, text: str) -> dict[str, object]:
    path = folder / "hicache.yaml"
    path.write_text(text)
    return {**RECIPE, "config_file": str(path)}


# ---- the extra config -----------------------------------------------------------------------------------------------
def test_stores_may_stand_in_the_extra_config() -> None:
    settings = read_settings({**RECIPE, "interface_v1": 1, **STORES})
    assert [store.kind for store in settings.config.tiers.stores] == ["memory"]
    assert (settings.name, settings.weights, settings.is_zero_copy) == (None, None, True)


def test_a_file_of_ours_may_be_named(tmp_path: Path) -> None:
    settings = read_settings(written(tmp_path, YAML))
    assert [store.kind for store in settings.config.tiers.stores] == ["disk", "redis"]
    assert (settings.name, settings.weights, settings.is_zero_copy) == ("llama", "r7", False)
    assert settings.config.tiers.stack.write == "all"
    assert (settings.config.policy.store_timeout, settings.config.policy.wait_limit) == (2.0, 9.0)


def test_the_environment_still_has_its_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE__POLICY__STORE_TIMEOUT", "3s")
    monkeypatch.setenv("HICACHE__MODEL__NAME", "mistral")
    settings = read_settings({**RECIPE, **STORES})
    assert (settings.config.policy.store_timeout, settings.name) == (3.0, "mistral")


def test_keys_that_sglang_reads_itself_are_let_through() -> None:
    assert read_settings({**RECIPE, "interface_v1": 1, "allocator": "shm", **STORES}).name is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (None, "tiers.stores: missing; expected at least one store"),
        ({"tiers": {"stores": []}}, "tiers.stores: missing; expected at least one store"),
        ({"store": []}, "store: not used here; .*used are config_file, model, tiers, policy, metrics"),
        ({"tier": {}}, "tier: not used here; did you mean tiers[?]"),
        ({"config_file": 3}, "config_file: found 3; expected the path of a YAML file"),
        ({"config_file": "/nowhere.yaml"}, "/nowhere.yaml: no such file"),
        ({"config_file": "x.yaml", **STORES}, "tiers: given together with config_file; keep one of them"),
        (
            {"tiers": {"host": {"capacity": "1GiB"}, **STORES["tiers"]}},
            r"tiers\.host: not used here .*SGLang owns device and host memory.*--hicache-size; remove it",
        ),
        (
            {"policy": {"eviction": "lru"}, **STORES},
            r"policy\.eviction: not used here .*--radix-eviction-policy; remove it",
        ),
        (
            {"model": {"page_size": 4}, **STORES},
            r"model\.page_size: not used here .*SGLang's pools; remove it",
        ),
        ({"sessions": {"idle_after": "1s"}, **STORES}, "sessions: not used here"),
        ({"tiers": {"stores": [{"kind": "dsik"}]}}, "did you mean disk[?]"),
        ({"tiers": {"stores": [{"kind": "disk", "path": "/tmp"}]}}, r"tiers\.stores\.0\.capacity.*missing"),
        ({"tiers": {"stores": {"kind": "memory"}}}, r"tiers\.stores.*expected a list"),
        ({"policy": {"store_timeout": "soon"}, **STORES}, r"policy\.store_timeout"),
        ({"tiers": 4}, "tiers.*expected a mapping"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place_and_a_remedy(
    extra: Mapping[str, object] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read_settings(None if extra is None else {**RECIPE, **extra})


def test_a_file_names_its_lines(tmp_path: Path) -> None:
    text = "tiers:\n  host: {capacity: 1GiB}\n  stores: [{kind: memory}]\nevents: {}\n"
    with pytest.raises(ConfigError) as caught:
        read_settings(written(tmp_path, text))
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        f"tiers.host ({tmp_path}/hicache.yaml:2)",
        f"events ({tmp_path}/hicache.yaml:4)",
    ]


def test_a_name_is_not_its_absence() -> None:
    """Injective: neither a served name nor an argument can be written so that it equals another model's."""

    class Config:
        def __init__(self, model_name: str | None) -> None:
            self.model_name = model_name

    def digest(served: str | None, name: str | None, weights: str | None, **arguments: str | None) -> bytes:
        return model_digest(Config(served), name=name, weights=weights, server_arguments=arguments)

    digests = [
        digest("m", None, None),
        digest("m", "m", None),
        digest("m", None, ""),
        digest("m", None, "m"),
        digest("", None, None, model_path="m"),
        digest(None, None, None, model_path="m"),
        digest("m", None, None, revision=None),
        digest("m", None, None, revision=""),
        digest("m", None, None, revision="a", dtype="b"),
        digest("m", None, None, revision="b", dtype="a"),
        digest("m", None, None, revision="ab", dtype=""),
    ]
    assert len(set(digests)) == len(digests)


# ---- the engine -------------------------------------------------------------------------------------------------------
class FakeSglang(ModuleType):
    """An SGLang of some version, with or without its storage interface."""

    def __init__(self, version: str) -> None:
        super().__init__("sglang")
        self.__version__ = version


def install(monkeypatch: pytest.MonkeyPatch, version: str, *, without: str = "") -> None:
    storage: Any = ModuleType(STORAGE)
    for name in ("HiCacheStorageConfig", "PoolHitPolicy", "PoolName", "PoolTransferResult"):
        setattr(storage, name, object)
    methods = (
        "register_mem_pool_host register_mem_host_pool_v2 on_host_pools_registered batch_exists batch_exists_v2"
        " batch_get_v1 batch_get_v2 batch_set_v1 batch_set_v2 clear get_stats"
    )
    body = {name: None for name in methods.split() if name != without}
    storage.HiCacheStorage = type("HiCacheStorage", (), body)
    monkeypatch.setitem(sys.modules, "sglang", FakeSglang(version))
    monkeypatch.setitem(sys.modules, STORAGE, storage)


def test_a_tested_release_is_taken_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, TESTED[-1])
    assert load_engine().version == TESTED[-1]
    assert caplog.records == []


@pytest.mark.parametrize("version", ["0.5.24", "0.5.23.post1", "1.0.0rc2"])
def test_an_unknown_release_says_so_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    install(monkeypatch, version)
    with caplog.at_level(logging.WARNING):
        assert load_engine().version == version
    assert f"sglang {version} was never tested with this adapter, which knows {TESTED[-1]}" in caplog.text


@pytest.mark.parametrize("version", ["0.4.9", "0.5.22", "0.5.9"])
def test_an_old_release_is_refused_with_the_one_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(monkeypatch, version)
    with pytest.raises(EngineUnavailableError, match=f"sglang {version} is too old .*sglang=={TESTED[-1]}"):
        load_engine()


def test_a_missing_sglang_is_named_with_the_one_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(EngineUnavailableError, match=f"cannot be imported .*sglang=={TESTED[-1]}"):
        load_engine()


@pytest.mark.parametrize("missing", ["batch_exists_v2", "batch_get_v1", "register_mem_host_pool_v2"])
def test_an_interface_that_lacks_something_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    install(monkeypatch, "0.6.0", without=missing)
    with pytest.raises(EngineUnavailableError, match=f"sglang 0.6.0 has no {missing} in {STORAGE}"):
        load_engine()


def test_releases_are_compared_as_numbers() -> None:
    assert release("0.5.23.post1") == OLDEST
    assert release("0.5.9") < OLDEST < release("0.6.0.dev1") < release("1.0.0")


def test_the_module_has_the_class_and_nothing_else_that_it_makes() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'HiCacheBackedn'"):
        _ = module.HiCacheBackedn
