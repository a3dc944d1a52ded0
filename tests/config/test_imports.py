"""``hicache config import``: other caches' settings as ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.cli import main
from hicache.config import HiCacheConfig, load_config
from hicache.config.imports import import_config
from hicache.errors import ConfigError

SECRET = "correct horse"


def write(folder: Path, text: str, name: str = "theirs") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def run(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)


def imported(folder: Path, text: str, **options: Any) -> tuple[HiCacheConfig, dict[str, str]]:
    """Ours, loaded from the text that is written, and the notes."""
    done = import_config(write(folder, text), **options)
    return load_config(yaml.safe_load(done.text), environ={}), dict(done.notes)


# ---- LMCache -----------------------------------------------------------------------------------------------------------
def test_an_lmcache_file_is_taken_over_key_by_key(tmp_path: Path) -> None:
    config, notes = imported(
        tmp_path,
        f"""
        chunk_size: 128
        local_cpu: true
        max_local_cpu_size: 20
        local_disk: "file://{tmp_path}/disk/"
        max_local_disk_size: 1.5
        remote_url: "rediss://cache.internal:6380"
        remote_serde: naive
        cache_policy: LFU
        min_retrieve_tokens: 512
        blocking_timeout_secs: 3
        save_unfull_chunk: false
        """,
    )
    assert config.model.page_size == 128
    assert config.tiers.host is not None
    assert config.tiers.host.capacity_per_rank == 20 * 2**30
    disk, redis = config.tiers.stores
    assert (disk.kind, getattr(disk, "capacity", 0), redis.kind) == ("disk", 3 * 2**29, "redis")
    assert getattr(redis, "url", "") == "rediss://cache.internal:6380"
    assert (config.policy.eviction, config.policy.prefetch.min_tokens) == ("lfu", 512)
    assert config.policy.store_timeout == 3
    assert set(notes) == {"local_disk", "model, tiers.device"}


def test_what_an_lmcache_file_leaves_out_has_its_default(tmp_path: Path) -> None:
    config, _ = imported(tmp_path, "local_cpu: true\n")
    assert (config.model.page_size, config.tiers.stores) == (256, [])
    assert config.policy.store_timeout == 10
    assert config.tiers.host is not None
    assert config.tiers.host.capacity_per_rank == 5 * 2**30


def test_what_has_no_counterpart_is_named(tmp_path: Path) -> None:
    config, notes = imported(
        tmp_path,
        """
        chunk_size: 70000
        local_cpu: false
        remote_url: "mooncakestore://10.0.0.1:50051/"
        remote_serde: cachegen
        save_unfull_chunk: true
        enable_p2p: true
        enable_blending: false
        made_up: 1
        extra_config: {transfer_timeout: 1}
        """,
    )
    assert config.model.page_size == 65_536
    assert config.tiers.stores == []
    assert "70000 tokens are more than a page" in notes["chunk_size"]
    assert notes["remote_url"].startswith("no counterpart for mooncakestore://")
    for key in ("local_cpu", "remote_serde", "save_unfull_chunk", "enable_p2p", "made_up"):
        assert key in notes
    assert "extra_config.transfer_timeout" in notes
    assert "enable_blending" not in notes  # it was off


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("valkey://h:1", "redis://h:1"),
        ("redis-sentinel://a:1,b:2", "redis+sentinel://a:1,b:2/mymaster"),
        ("redis-sentinel://a:1,b:2/main", "redis+sentinel://a:1,b:2/main"),
        ("redis://a:1,b:2", "redis+cluster://a:1,b:2"),
    ],
)
def test_redis_addresses_are_written_our_way(tmp_path: Path, theirs: str, ours: str) -> None:
    config, _ = imported(tmp_path, f"remote_url: {theirs}\n")
    assert getattr(config.tiers.stores[0], "url", "") == ours


@pytest.mark.parametrize(
    "url", [f"redis://me:{SECRET}@h:1", f"redis://:{SECRET}@h:1", f"weird://:{SECRET}@h"]
)
def test_a_password_is_nowhere_in_what_is_written(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("config", "import", write(tmp_path, f"remote_url: '{url}'\n")) == 0
    told = capsys.readouterr()
    assert SECRET not in told.out + told.err
    if url.startswith("redis"):
        assert "password_env: HICACHE_REDIS_PASSWORD" in told.out


def test_a_key_cannot_break_out_of_its_comment(tmp_path: Path) -> None:
    done = import_config(write(tmp_path, 'local_cpu: true\n"x\\ntiers": 1\n'))
    assert yaml.safe_load(done.text)["tiers"] != 1
    assert "# x tiers: not known here" in done.text


# ---- SGLang ------------------------------------------------------------------------------------------------------------
COMMAND = """
# how we serve
python -m sglang.launch_server --model-path meta/llama --page-size=64 \\
  --enable-hierarchical-cache --hicache-size 30 --hicache-write-policy write_through_selective \\
  --hicache-mem-layout page_first --hicache-io-backend kernel --port 30000 \\
  --hicache-storage-backend file --hicache-storage-prefetch-policy wait_complete --tp-size 2 \\
  --radix-eviction-policy slru \\
  --hicache-storage-backend-extra-config '{"prefetch_threshold": 512, "prefetch_timeout_base": 0.5, "odd": 1}'
"""


def test_sglangs_flags_are_taken_over(tmp_path: Path) -> None:
    config, notes = imported(tmp_path, COMMAND)
    assert (config.model.name, config.model.page_size) == ("meta/llama", 64)
    assert config.tiers.host is not None
    assert config.tiers.host.capacity_per_rank == 30 * 10**9
    assert (config.ranks.tp_size, config.policy.write) == (2, "write_through_selective")
    assert (config.policy.eviction, config.policy.prefetch.mode) == ("slru", "wait_complete")
    assert (config.policy.prefetch.min_tokens, config.policy.prefetch.timeout_base) == (512, 0.5)
    assert [store.kind for store in config.tiers.stores] == ["disk"]
    assert set(notes) == {
        "hicache_mem_layout",
        "hicache_io_backend",
        "hicache_storage_backend",
        "odd",
        "model, tiers.device",
    }


def test_without_a_size_l2_is_a_multiple_of_l1(tmp_path: Path) -> None:
    config, notes = imported(tmp_path, "--enable-hierarchical-cache --hicache-ratio 3")
    base = load_config("cpu", environ={})
    assert config.tiers.host is not None
    assert config.tiers.host.capacity == 3 * (base.tiers.device.capacity or 0)
    assert config.policy.write == "write_through"
    assert (config.policy.prefetch.timeout_base, config.policy.prefetch.timeout_per_1024_tokens) == (1, 0.25)
    assert "hicache_ratio" in notes


@pytest.mark.parametrize("form", ["json", "yaml", "extra", "file"])
def test_settings_come_in_every_form(tmp_path: Path, form: str) -> None:
    extra = {"prefetch_threshold": 100, "prefetch_timeout_per_ki_token": 0.25}
    (tmp_path / "extra.json").write_text(json.dumps(extra))
    text = {
        "json": json.dumps({"hicache-size": 1, "hicache_storage_backend_extra_config": extra}),
        "yaml": "---\nhicache-size: 1   # --not-a-flag\nhicache-storage-backend-extra-config: "
        + json.dumps(json.dumps(extra)),
        "extra": json.dumps(extra),
        "file": "--hicache-size 1 --hicache-storage-backend-extra-config @extra.json",
    }[form]
    config, _ = imported(tmp_path, text)
    assert config.policy.prefetch.min_tokens == 100
    assert config.policy.prefetch.timeout_per_1024_tokens == 0.25


def test_session_mode_becomes_the_policy_of_sessions(tmp_path: Path) -> None:
    config, notes = imported(
        tmp_path, "--hicache-size 1 --enable-session-radix-cache --hicache-storage-backend mooncake"
    )
    assert config.policy.eviction == "session"
    assert notes["hicache_storage_backend"].startswith("no counterpart for mooncake")


# ---- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "max_local_cpu_size: many\n",
            r"max_local_cpu_size \(.*theirs\): found 'many'; expected a number above 0",
        ),
        ("max_local_cpu_size: -1\n", "found the number -1; expected a number above 0"),
        ("local_cpu: maybe\n", "local_cpu .*: found 'maybe'; expected true or false"),
        ("local_cpu: true\ncache_policy: LRUU\n", "one of lru, lfu, fifo, mru; did you mean lru"),
        ("local_cpu: true\nextra_config: 3\n", "extra_config .*expected a mapping"),
        ("local_disk: 7\n", "local_disk .*expected a folder"),
        ("chunk_size: 1.5\n", "chunk_size .*expected a whole number"),
        ("chunk_size: !!python/object:os.system x\n", "tag"),
        ("chunk_size: 1\nchunk_size: 2\n", "chunk_size"),
        ("--hicache-write-policy write_thru", "did you mean write_through"),
        ("--hicache-size 1 --hicache-storage-backend-extra-config '{'", "is not JSON"),
        pytest.param(
            f"--hicache-size 1 --hicache-storage-backend-extra-config '{'[' * 200_000}'",
            "is nested too deeply; expected a JSON object",
            id="endless nesting",
        ),
        ("--hicache-size 1 --hicache-storage-backend-extra-config @none.json", "@none.json cannot be read"),
        ("--hicache-size 'unclosed", "cannot be read as a command"),
        ("port: 1\n", "neither LMCache's nor SGLang's keys"),
        ("- a\n", "expected a mapping"),
        ("max_local_cpu_size: 0.0000000001\n", r"tiers\.host\.capacity_per_rank"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        import_config(write(tmp_path, text))


def test_the_command_refuses_what_it_cannot_read_or_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path, "local_cpu: true\n")
    assert run("config", "import", str(tmp_path / "none")) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert run("config", "import", source, "--from", "vllm") == 2
    assert "an origin is one of lmcache, sglang" in capsys.readouterr().err
    target = tmp_path / "ours.yaml"
    assert run("config", "import", source, "--out", str(target)) == 0
    assert run("config", "check", str(target)) == 0
    assert run("config", "import", source, "--out", str(target)) == 2
    assert "name a new file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n# nothing\n...\n"], ids=repr)
def test_a_file_that_says_nothing_is_empty_and_no_configuration_of_ours(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is empty; expected an LMCache YAML, or SGLang's flags") as caught:
        import_config(write(tmp_path, text))
    assert "tiers" not in str(caught.value)
