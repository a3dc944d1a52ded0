"""Precedence, origins and round trips (case O-59)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.config import (
    HiCacheConfig,
    device_budget,
    dump_config,
    explain_config,
    load_config,
    preset_names,
)
from hicache.config.units import format_bytes, format_duration
from hicache.errors import ConfigError
from hicache.types import ComponentSpec

Refused = Callable[..., tuple[str, ...]]

DESIGN_EXAMPLE = """\
model:
  name: qwen3-next-80b
  page_size: 64
  components:
    full:  {rule: path, layers: 12, bytes_per_token: 24KiB}
    swa:   {rule: window, window: 1024, layers: 12, bytes_per_token: 24KiB}
    mamba: {rule: checkpoint, layers: 36, state_bytes: 19MiB}
tiers:
  device: {kind: cuda, capacity: 40GiB}     # cpu where there is no GPU
  host:   {capacity: 200GiB, pinned: true}
  stores:
    - {kind: redis, url: "rediss://cache.internal:6379", ttl: 1d}
policy:
  eviction: lru
  write: write_through_selective
  prefetch: {mode: timeout, min_tokens: 256}
sessions: {idle_after: auto, expire_after: 30m}
"""


def origins(*arguments: Any, **keywords: Any) -> dict[str, tuple[str, str]]:
    keywords.setdefault("environ", {})
    return {path: (value, origin) for path, value, origin in explain_config(*arguments, **keywords)}


def test_the_design_example_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "hicache.yaml"
    path.write_text(DESIGN_EXAMPLE)
    config = load_config(path, environ={})
    assert config.model.specs() == (
        ComponentSpec("full", "path", 0, 12, 24 * 1024, 0),
        ComponentSpec("swa", "window", 1024, 12, 24 * 1024, 0),
        ComponentSpec("mamba", "checkpoint", 0, 36, 0, 36 * 553_416),
    )
    assert config.tiers.device.capacity == 40 * 2**30
    assert config.tiers.stores[0].kind == "redis"
    assert config.sessions.expire_after == 1800
    assert config.policy.prefetch.timeout_per_1024_tokens == 0.1


def test_a_state_that_does_not_divide_over_its_layers_is_padded_by_less_than_a_byte_each() -> None:
    written = 19 * 2**20
    padded = load_config("cuda", environ={}).model.specs()[1].state_bytes
    assert padded % 36 == 0
    assert 0 <= padded - written < 36


def test_defaults_are_those_of_the_design(tree: dict[str, Any]) -> None:
    policy = load_config(tree, environ={}).policy
    assert (policy.eviction, policy.granularity, policy.write) == (
        "adaptive",
        "page",
        "write_through_selective",
    )
    assert policy.prefetch.model_dump() == {
        "mode": "timeout",
        "min_tokens": 256,
        "timeout_base": 2.0,
        "timeout_per_1024_tokens": 0.1,
        "timeout_max": 30.0,
        "recompute_per_1024_tokens": None,
    }
    assert policy.watermarks.device.model_dump() == {"low": 0.02, "high": 0.05}
    assert (policy.queues.store, policy.queues.prefetch) == (256 * 2**20, 256 * 2**20)
    assert (policy.wait_limit, policy.store_timeout) == (30.0, 5.0)


def test_environment_wins_over_the_file_and_an_argument_over_both(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(yaml.safe_dump({**tree, "policy": {"eviction": "fifo", "granularity": "leaf"}}))
    environ = {"HICACHE__MODEL__PAGE_SIZE": "512", "HICACHE__POLICY__EVICTION": "mru"}
    found = origins(path, environ=environ, overrides={"policy.eviction": "lfu"})
    assert found["policy.wait_limit"] == ("30s", "default")
    assert found["policy.granularity"] == ("leaf", f"file {path}:20")
    assert found["model.page_size"] == ("512", "environment HICACHE__MODEL__PAGE_SIZE")
    assert found["policy.eviction"] == ("lfu", "argument")


def test_every_leaf_of_a_mapping_says_so(tree: dict[str, Any]) -> None:
    found = origins(tree)
    assert found["model.components.full.bytes_per_token"] == ("16B", "mapping")
    assert found["tiers.stores.0.name"] == ("disk", "default")
    assert found["model.weights"] == ("null", "default")


def test_a_preset_is_called_by_its_file_name() -> None:
    assert origins("cpu")["model.page_size"] == ("512", "file cpu.yaml:15")


def test_the_source_is_not_changed(tree: dict[str, Any]) -> None:
    before = yaml.safe_dump(tree)
    load_config(tree, environ={}, overrides={"tiers.stores.0.capacity": "32MiB", "model.page_size": 8})
    assert yaml.safe_dump(tree) == before


@pytest.mark.parametrize(
    ("environ", "path", "value"),
    [
        ({"HICACHE__TIERS__HOST__CAPACITY": "8MiB"}, "tiers.host.capacity", "8MiB"),
        ({"HICACHE__TIERS__HOST": "{capacity: 8MiB}"}, "tiers.host.capacity", "8MiB"),
        ({"HICACHE__TIERS__STORES__0__CAPACITY": "1GiB"}, "tiers.stores.0.capacity", "1GiB"),
        ({"HICACHE__TIERS__STORES": '[{"kind": "memory"}]'}, "tiers.stores.0.kind", "memory"),
        (
            {"HICACHE__MODEL__COMPONENTS__FULL__BYTES_PER_TOKEN": "32"},
            "model.components.full.bytes_per_token",
            "32B",
        ),
        ({"HICACHE__MODEL__WEIGHTS": "007"}, "model.weights", "'007'"),
        ({"HICACHE__MODEL__NAME": "a: [b"}, "model.name", "'a: [b'"),
        ({"HICACHE__TIERS__HOST__PINNED": "true"}, "tiers.host.pinned", "true"),
        (
            {"HICACHE__TIERS__STORES__0__CAPACITY": "1GiB", "HICACHE__TIERS__STORES": "[{kind: memory}]"},
            "tiers.stores.0.capacity",
            "1GiB",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_variable_reaches_its_key(
    tree: dict[str, Any], environ: dict[str, str], path: str, value: str
) -> None:
    found = origins(tree, environ={**environ, "HICACHE_RUST": "off", "PATH": "/bin"})
    assert found[path][0] == value
    assert found[path][1] in {f"environment {name}" for name in environ}


def test_a_variable_finds_a_component_spelt_in_another_case(tree: dict[str, Any]) -> None:
    tree["model"]["components"] = {"Full-KV": {"rule": "path", "bytes_per_token": 16}}
    environ = {"HICACHE__MODEL__COMPONENTS__FULL_KV__LAYERS": "4"}
    assert load_config(tree, environ=environ).model.components["Full-KV"].layers == 4


def test_the_process_environment_is_read_by_default(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE__MODEL__PAGE_SIZE", "8")
    assert load_config(tree).model.page_size == 8


def test_null_takes_back_what_lower_layers_said(tree: dict[str, Any]) -> None:
    tree["policy"] = {"eviction": "mru"}
    overrides = {
        "policy.eviction": None,
        "tiers.stores": None,
        "tiers.host": None,
        "model.components.swa": None,
        "tiers.device": {"capacity": None, "capacity_per_rank": "2MiB"},
    }
    config = load_config(tree, environ={}, overrides=overrides)
    assert config.policy.eviction == "adaptive"
    assert config.tiers.host is None
    assert config.tiers.stores == []
    assert list(config.model.components) == ["full", "mamba"]
    assert config.tiers.device.rank_bytes(1) == 2 * 2**20


def test_an_override_may_add_a_store_and_a_tier(tree: dict[str, Any]) -> None:
    del tree["tiers"]["host"], tree["tiers"]["stores"]
    overrides = {"tiers.host.capacity": "4MiB", "tiers.stores.0.kind": "memory"}
    config = load_config(tree, environ={}, overrides=overrides)
    assert [store.name for store in config.tiers.stores] == ["memory"]


@pytest.mark.parametrize(
    "overrides",
    [
        {5: 3},
        {None: 3},
        {True: 3},
        {b"model.name": "m"},
        {("model", "name"): "m"},
        [("a", 1)],
        "x",
        3,
        {1, 2},
    ],
    ids=repr,
)
def test_overrides_that_are_no_mapping_of_paths_are_refused(refused: Refused, overrides: object) -> None:
    (line,) = refused("cpu", overrides=overrides)
    assert line.startswith("overrides: ")
    assert 'like {"tiers.host.capacity": "20GiB"}' in line


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({5: "3"}, "environ: the number 5 is no name; expected variables and their text, like os.environ"),
        ("x", "environ: 'x'; expected a mapping of variables"),
        (
            {"HICACHE__MODEL__PAGE_SIZE": 5},
            "HICACHE__MODEL__PAGE_SIZE (environment): the number 5 is no text",
        ),
    ],
    ids=["name", "no-mapping", "value"],
)
def test_an_environment_that_is_none_is_refused(environ: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("cpu", environ=environ)
    assert caught.value.problems[0].startswith(told)


def test_a_value_that_holds_itself_is_refused(refused: Refused) -> None:
    value: dict[str, object] = {}
    value["host"] = value
    (line,) = refused("cpu", overrides={"tiers": value})
    assert line == "a value is nested too deeply, or holds itself; expected plain data"


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), [1], {1: 1}], ids=["huge", "least", "list", "mapping"]
)
@pytest.mark.parametrize("path", [path for path, _, _ in explain_config("redis", environ={})])
def test_no_value_ends_in_another_error_than_a_refusal(path: str, value: object) -> None:
    with contextlib.suppress(ConfigError):  # any other error fails this test
        load_config("redis", overrides={path: value}, environ={})


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"environ": {"HICACHE__": "1"}}, "HICACHE__ (environment): expected names joined by '__'"),
        (
            {"environ": {"HICACHE__MODEL____NAME": "x"}},
            "HICACHE__MODEL____NAME (environment): expected names",
        ),
        (
            {"environ": {"HICACHE__TIERS__HOTS__CAPACITY": "1GiB"}},
            "tiers.hots (environment HICACHE__TIERS__HOTS__CAPACITY): unknown key; did you mean host?",
        ),
        (
            {"environ": {"HICACHE__TIERS__HOST__CAPACITY": ""}},
            "tiers.host.capacity (environment HICACHE__TIERS__HOST__CAPACITY): is empty; unset it",
        ),
        (
            {"environ": {"HICACHE__TIERS__HOST": "{capacity: "}},
            "tiers.host (environment HICACHE__TIERS__HOST): not valid YAML",
        ),
        (
            {"environ": {"HICACHE__TIERS__HOST": "!!python/name:os.system"}},
            "tiers.host (environment HICACHE__TIERS__HOST): the tag !!python/name:os.system is not allowed",
        ),
        (
            {"environ": {"HICACHE__MODEL__NAME__X": "1"}},
            "model.name.x (environment HICACHE__MODEL__NAME__X): model.name is 'm', not a mapping",
        ),
        ({"overrides": {"tiers..host": 1}}, "'tiers..host' (argument): expected a path"),
        (
            {"overrides": {"tiers.stores.7.capacity": "1GiB"}},
            "tiers.stores.7.capacity (argument): tiers.stores is a list of 1; expected a number up to 1, not 7",
        ),
        (
            {"overrides": {"tiers.stores.disk.capacity": "1GiB"}},
            "tiers.stores.disk.capacity (argument): tiers.stores is a list of 1",
        ),
        (
            {"overrides": {"model.components.swaa": None}},
            "model.components.swaa (argument): found nothing; expected a mapping",
        ),
        (
            {"overrides": {"tiers.host.capacity": 1j}},
            "tiers.host.capacity (argument): found a complex; expected a size",
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_an_override_that_has_no_effect_is_refused_by_its_name(
    tree: dict[str, Any], refused: Refused, keywords: dict[str, Any], expected: str
) -> None:
    found = refused(tree, **keywords)
    assert len(found) == 1
    assert found[0].startswith(expected)


@pytest.mark.parametrize("preset", preset_names())
def test_dumping_and_loading_a_preset_is_a_fixed_point(preset: str) -> None:
    config = load_config(preset, environ={})
    text = dump_config(config)
    again = load_config(yaml.safe_load(text), environ={})
    assert again == config
    assert dump_config(again) == text


@settings(max_examples=100)
@given(
    capacity=st.integers(2**20, 2**62),
    wait=st.floats(1e-6, 10**9),
    low=st.floats(0, 0.5),
    weights=st.none() | st.text(min_size=1).filter(lambda text: text.isprintable() and text.strip()),
)
def test_dumping_and_loading_any_values_is_a_fixed_point(
    capacity: int, wait: float, low: float, weights: str | None
) -> None:
    overrides: dict[str, object] = {
        "tiers.device.capacity": format_bytes(capacity),
        "policy.wait_limit": format_duration(wait),
        "policy.watermarks.host": {"low": low, "high": 0.5},
        "model.weights": weights,
    }
    config = load_config("hybrid", environ={}, overrides=overrides)
    assert load_config(yaml.safe_load(dump_config(config)), environ={}) == config


@pytest.mark.parametrize("preset", preset_names())
def test_every_explained_value_can_be_given_back_as_an_argument(preset: str) -> None:
    values = {path: value for path, value, _ in explain_config(preset, environ={})}
    overrides = {path: yaml.safe_load(value) for path, value in values.items()}
    again = explain_config(preset, environ={}, overrides=overrides)
    assert {path: value for path, value, _ in again} == values


@pytest.mark.parametrize(
    ("settings", "device", "host"),
    [
        pytest.param({}, ("shared", "default for kind cpu"), ("shared", "default"), id="cpu"),
        pytest.param(
            {"tiers.device.kind": "cuda"},
            ("fixed", "default for kind cuda"),
            ("shared", "default"),
            id="cuda",
        ),
        pytest.param(
            {"tiers.device.split": "fixed"}, ("fixed", "argument"), ("shared", "default"), id="written"
        ),
    ],
)
def test_a_split_that_nobody_wrote_is_explained_by_what_it_comes_to(
    settings: dict[str, object], device: tuple[str, str], host: tuple[str, str]
) -> None:
    explained = {path: row for path, *row in explain_config("hybrid", environ={}, overrides=settings)}
    assert tuple(explained["tiers.device.split"]) == device
    assert tuple(explained["tiers.host.split"]) == host
    has_one_budget = device_budget(load_config("hybrid", environ={}, overrides=settings)) is not None
    assert has_one_budget == (device[0] == "shared")


def test_a_configuration_cannot_be_changed(tree: dict[str, Any]) -> None:
    config = load_config(tree, environ={})
    with pytest.raises(ValueError, match="frozen"):
        config.model.page_size = 8


def test_a_configuration_made_without_the_loader_is_checked_too(tree: dict[str, Any]) -> None:
    tree["tiers"]["device"]["capacity"] = "1KiB"
    with pytest.raises(ValueError, match=r"tiers\.device\.capacity: 1024 bytes"):
        HiCacheConfig.model_validate(tree)
