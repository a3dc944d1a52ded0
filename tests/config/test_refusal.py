"""What is refused, with the key, what was found and what would be right (cases O-59, O-60, O-62)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.config import load_config
from hicache.testing.redis_server import make_certificates

Refused = Callable[..., tuple[str, ...]]
MIB = 2**20
DISK = {"kind": "disk", "path": "auto", "capacity": "16MiB"}
REDIS = {"kind": "redis", "url": "redis://h"}


def case(overrides: dict[str, Any], *expected: str) -> Any:
    return pytest.param(overrides, expected, id=", ".join(f"{k}={v}" for k, v in overrides.items())[:70])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # unknown keys
        case({"tiers.host.capactiy": 1}, "tiers.host.capactiy (argument): unknown key; did you mean capacity?"),
        case({"polcy": {}}, "polcy (argument): unknown key; did you mean policy?"),
        case({"eviction": "lru"}, "eviction (argument): unknown key; it belongs at policy.eviction"),
        case({"model.components.full.zzz": 1}, "model.components.full.zzz (argument): unknown key; nothing is"),
        case({"tiers.stores.0.url": "x"}, "tiers.stores.0.url (argument): unknown key; it belongs at"),
        # types
        case({"model.name": 2025}, "model.name (argument): found the number 2025; expected text (quote it"),
        case({"model.name": " "}, "model.name (argument): found an empty text"),
        case({"model.page_size": "16"}, "model.page_size (argument): found '16'; expected a whole number"),
        case({"model.page_size": 16.0}, "model.page_size (argument): found the number 16.0; expected a whole"),
        case({"model.page_size": True}, "model.page_size (argument): found true; expected a whole number"),
        case({"tiers.host.pinned": 1}, "tiers.host.pinned (argument): found the number 1; expected true or false"),
        case({"tiers.device.index": "0"}, "tiers.device.index (argument): found '0'; expected a whole number"),
        case({"tiers.device.index": -1}, "tiers.device.index (argument): found the number -1; expected at least 0"),
        case({"tiers.stores": {"kind": "disk"}}, "tiers.stores (argument): found a mapping; expected a list"),
        case({"tiers.stores.0": 3}, "tiers.stores.0 (argument): found the number 3; expected a mapping"),
        case({"model.components": 3}, "model.components (argument): found the number 3; expected a mapping"),
        case({"policy": "lru"}, "policy (argument): found 'lru'; expected a mapping"),
        # ranges and missing keys
        case({"model.page_size": 0}, "model.page_size (argument): found the number 0; expected at least 1"),
        case({"model.page_size": 65537}, "model.page_size (argument): found the number 65537; expected at most 65536"),
        case({"model.max_tokens": 0}, "model.max_tokens (argument): found the number 0; expected at least 1"),
        case({"model.page_size": None}, "model.page_size (mapping): missing; expected tokens a page, 1 to 65536"),
        case({"model.components": {"full": None, "swa": None, "mamba": None}}, "model.components (mapping): is empty"),
        case({"tiers.device.capacity": None}, "tiers.device.capacity (mapping): missing; expected the pool's total"),
        case({"ranks.tp_rank": 2, "ranks.tp_size": 2}, "ranks.tp_rank (argument): found 2, but tp_size is 2"),
        case({"ranks.backend": "nccl"}, "ranks.backend (argument): found 'nccl'; a backend is one of none, gloo"),
        case({"ranks.backend": "gloo", "ranks.address": "h:1"}, "ranks.backend (argument): found gloo, but one rank"),
        case({"ranks.tp_size": 2, "ranks.backend": "gloo"}, "ranks.address (argument): missing, but backend gloo needs host"),
        case({"ranks.address": "h:29600"}, "ranks.address (argument): given without a backend; expected backend"),
        case(
            {"ranks.tp_size": 2, "ranks.backend": "gloo", "ranks.address": "29600"},
            "ranks.address (argument): found '29600'; expected host:port, like 10.0.0.7:29600",
        ),
        *(
            case(
                {"ranks.tp_size": 2, "ranks.backend": "gloo", "ranks.address": f"h:{port}"},
                f"ranks.address (argument): found port {port} in 'h:{port}'; expected 1 to 65535",
            )
            for port in ("0", "-5", "99999", "65536")
        ),
        # what others connect to
        *(
            case(
                {"events.endpoint": "ipc:///tmp/e", f"events.{key}": endpoint},
                f"events.{key} (argument): found {endpoint}; expected tcp://HOST:PORT with a port of 1 to 65535",
            )
            for key in ("endpoint", "replay_endpoint")
            for endpoint in ("tcp://h:99999", "tcp://h:-5", "tcp://h:x", "tcp://h", "tcp://:5557")
        ),
        *(
            case(
                {"events.endpoint": endpoint, "events.replay_endpoint": endpoint},
                f"events.replay_endpoint (argument): found {endpoint}, which is endpoint too; expected another one",
            )
            for endpoint in ("tcp://127.0.0.1:5557", "ipc:///tmp/e")
        ),
        *(
            case({"metrics.host": host}, f"metrics.host (argument): found '{host}'; expected the name or address of")
            for host in ("foo bar", "http://h", "h:9400", "[::1]", "-h")
        ),
        case(
            {"ranks.tp_size": 2, "ranks.backend": "gloo", "ranks.address": "[::1]:29600", "ranks.timeout": "35s"},
            "ranks.timeout (argument): 35s, but a rank may rightly be late by policy.wait_limit +"
            " policy.store_timeout, 35s; expected more",
        ),
        case({"ranks.cp_rank": 1}, "ranks.cp_rank (argument): found 1, but cp_size is 1; expected 0 to 0"),
        # units
        case({"policy.wait_limit": "20GiB"}, "policy.wait_limit (argument): found '20GiB', which is a size"),
        case({"policy.wait_limit": "5 parsecs"}, "policy.wait_limit (argument): found '5 parsecs', whose unit"),
        case({"policy.wait_limit": "-5s"}, "policy.wait_limit (argument): found '-5s'; a duration cannot be neg"),
        case({"policy.wait_limit": "0s"}, "policy.wait_limit (argument): found no time at all"),
        case({"policy.wait_limit": 30}, "policy.wait_limit (argument): found 30, a number without a unit"),
        case({"tiers.host.capacity": "30m"}, "tiers.host.capacity (argument): found '30m', which is a duration"),
        case({"tiers.host.capacity": "-1GiB"}, "tiers.host.capacity (argument): found '-1GiB'; a size cannot be"),
        case({"sessions.idle_after": "never"}, "sessions.idle_after (argument): found 'never'; expected a duration"),
        case({"policy.watermarks.host.low": "5GiB"}, "policy.watermarks.host.low (argument): found '5GiB', which is"),
        # names
        case({"policy.eviction": "lrru"}, "policy.eviction (argument): found 'lrru'; did you mean lru? an eviction"),
        case({"policy.eviction": "newest"}, "policy.eviction (argument): found 'newest'; an eviction policy is "),
        case({"policy.write": "writethrough"}, "policy.write (argument): found 'writethrough'; did you mean write_t"),
        case({"policy.granularity": 3}, "policy.granularity (argument): found the number 3; a granularity is one"),
        case({"policy.prefetch.mode": "time"}, "policy.prefetch.mode (argument): found 'time'; did you mean timeout?"),
        case({"tiers.device.kind": "gpu"}, "tiers.device.kind (argument): found 'gpu'; did you mean cpu? the kind of"),
        case({"tiers.stores.0.kind": "dsik"}, "tiers.stores.0.kind (argument): found 'dsik'; did you mean disk?"),
        case({"tiers.stores": [{"path": "x"}]}, "tiers.stores.0.kind (argument): missing; the kind of a store is one of"),
        case({"model.components.full.rule": "pth"}, "model.components.full.rule (argument): found 'pth'; did you mean"),
        case({"model.components.a b": {"rule": "path", "bytes_per_token": 1}}, "model.components.a b (argument): found"),
        case({"model.components.FULL": {"rule": "path", "bytes_per_token": 1}}, "model.components.FULL (argument): diff"),
        # contradictions inside a section
        case(
            {"model.components.mamba.bytes_per_token": 8},
            "model.components.mamba.bytes_per_token (argument): contradicts rule checkpoint",
        ),
        case({"model.components.mamba.window": 8}, "model.components.mamba.window (argument): contradicts rule check"),
        case({"model.components.swa.window": None}, "model.components.swa.window (mapping): missing, but rule window"),
        case({"model.components.full.window": 8}, "model.components.full.window (argument): contradicts rule path"),
        case({"model.components.full.state_bytes": 8}, "model.components.full.state_bytes (argument): contradicts"),
        case({"model.components.full.layers": 3}, "model.components.full.bytes_per_token (mapping): 16 bytes do not"),
        case(
            {"model.components.mamba.rule": "path"},
            "model.components.mamba.bytes_per_token (mapping): missing, but rule path needs it",
            "model.components.mamba.state_bytes (mapping): contradicts rule path",
        ),
        case({"policy.watermarks.host": {"low": 0.1}}, "policy.watermarks.host.low (argument): 0.1 is over high, 0.05"),
        case({"policy.watermarks.host": {"high": 1}}, "policy.watermarks.host.high (argument): found 1, which would"),
        case({"policy.prefetch.timeout_base": "1m"}, "policy.prefetch.timeout_base (argument): 1m is over timeout_max"),
        case({"sessions.idle_after": "5h"}, "sessions.idle_after (argument): 5h is over expire_after, 4h"),
        case({"tiers.device.index": 1}, "tiers.device.index (argument): found 1, but kind cpu has no devices"),
        case(
            {"tiers.host.capacity_per_rank": "4MiB"},
            "tiers.host.capacity_per_rank (argument): given together with capacity; capacity is the total over all",
        ),
        # stores
        case({"tiers.host": None}, "tiers.host (mapping): missing, but there are stores: pages travel"),
        case(
            {"tiers.stores": [{**DISK, "path": "a/../b"}, {**DISK, "path": "b"}]},
            "tiers.stores.1.path (argument): 'b' is also the path of stores.0",
        ),
        case(
            {"tiers.stores": [{**DISK, "name": "x"}, {**REDIS, "name": "x"}]},
            "tiers.stores.1.name (argument): 'x' is also the name of stores.0",
        ),
        case({"tiers.stores.0.path": "a\0b"}, "tiers.stores.0.path (argument): found a line break or another control"),
        case({"tiers.stores.0.path": "~nobody-here/x"}, "tiers.stores.0.path (argument): found '~nobody-here/x', whose"),
        case(
            {"tiers.stores": [{**REDIS, "capacity": "1GiB"}]},
            "tiers.stores.0.capacity (argument): not allowed: a Redis server bounds itself (maxmemory)",
        ),
        case(
            {"tiers.stack.write": "second"},
            "tiers.stack.write (argument): found 'second'; a way to write is one of first, all, later",
        ),
        case(
            {"tiers.stores.0.breaker": {"backoff": "2m"}},
            "tiers.stores.0.breaker.backoff (argument): 2m is over backoff_max, 1m; expected at most that",
        ),
        case(
            {"tiers.stores": [{**REDIS, "prefix": "a{b}"}]},
            "tiers.stores.0.prefix (argument): found 'a{b}'; braces choose the slot in a cluster",
        ),
        case(
            {"tiers.stores": [{**REDIS, "cert_file": "/c.pem"}]},
            "tiers.stores.0.cert_file (argument): contradicts a url without TLS",
            "tiers.stores.0.key_file (argument): missing, but cert_file is given",
        ),
        case(
            {"tiers.stores": [{**REDIS, "sentinel_login": True}]},
            "tiers.stores.0.sentinel_login (argument): needs a url with sentinels",
            "tiers.stores.0.sentinel_login (argument): needs a password",
        ),
        case(
            {"tiers.stores": [{**REDIS, "timeout": "6s"}]},
            "tiers.stores.0.timeout (argument): 6s is over policy.store_timeout, 5s",
        ),
        case({"tiers.stores": [{**REDIS, "url": "http://h"}]}, "tiers.stores.0.url (argument): expected redis://"),
        case({"tiers.stores": [{**REDIS, "ttl": "1GiB"}]}, "tiers.stores.0.ttl (argument): found '1GiB', which is a"),
        case({"tiers.stores": [{**REDIS, "username": "u"}]}, "tiers.stores.0.username (argument): needs a password"),
        case(
            {"tiers.stores": [{**REDIS, "password_env": "A", "password_file": "/b"}]},
            "tiers.stores.0.password_file (argument): given together with password_env",
        ),
        case(
            {"tiers.stores": [{**REDIS, "ca_file": "/dev/null"}]},
            "tiers.stores.0.ca_file (argument): contradicts a url without TLS",
        ),
        case(
            {"tiers.stores": [{**REDIS, "url": "rediss://h", "ca_file": "/no/such/ca.pem"}]},
            "tiers.stores.0.ca_file (argument): /no/such/ca.pem cannot be read (No such file or directory)",
        ),
        # what does not fit
        case(
            {"tiers.host.capacity": 255},
            "tiers.host.capacity (argument): 255 bytes for each of 1 rank(s), but one request needs 3584"
            " (full 1 x 256, swa 5 x 256, mamba 2 x 1024); expected at least 3584B",
        ),
        case(
            {"tiers.device.capacity": "1KiB"},
            "tiers.device.capacity (argument): 1024 bytes for each of 1 rank(s), but one request needs 3584",
        ),
        case(
            {"tiers.stores.0.capacity": 1023},
            "tiers.stores.0.capacity (argument): 1023 bytes for each of 1 rank(s), but one slot of mamba takes 1184"
            " (1024 and what the store adds); expected at least 1184B",
        ),
        case(
            {"policy.queues.store": 1023},
            "policy.queues.store (argument): 1023 bytes, but one slot of mamba takes 1024, so it would always",
        ),
        case(
            {"tiers.host.limit": "1MiB"},
            "tiers.host.capacity (mapping): 4194304 bytes, over the limit of 1048576",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_by_name(
    tree: dict[str, Any],
    refused: Refused,
    overrides: dict[str, Any],
    expected: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # some paths are relative; a checkout may be one that cannot be written to
    found = refused(tree, overrides=overrides)
    assert len(found) == len(expected), found
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start), line
        assert "\n" not in line


def test_everything_wrong_in_a_file_is_told_at_once_with_its_line(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(
        "model:\n"
        "  name: m\n"
        "  pagesize: 16\n"  # 3: unknown, and so page_size is missing
        "  components:\n"
        "    mamba: {rule: checkpoint, state_bytes: 1KiB, bytes_per_token: 8}\n"  # 5: contradiction
        "tiers:\n"
        "  device: {kind: cpu, capacity: 5 parsecs}\n"  # 7: unit
        "  host: {capacity: 1MiB, capacity_per_rank: 1MiB}\n"  # 8: both
        "policy: {eviction: lur, wait_limit: 20GiB}\n"  # 9: twice
    )
    found = refused(path)
    assert [line.partition(":")[0] + ":" + line.split(":")[1].partition(")")[0] for line in found] == [
        f"model.pagesize ({path}:3",
        f"model.components.mamba.bytes_per_token ({path}:5",
        f"tiers.device.capacity ({path}:7",
        f"tiers.host.capacity_per_rank ({path}:8",
        f"policy.eviction ({path}:9",
        f"policy.wait_limit ({path}:9",
    ]
    assert "did you mean page_size?" in found[0]


def test_what_holds_between_sections_is_checked_beside_other_mistakes(
    tree: dict[str, Any], refused: Refused
) -> None:
    overrides = {"tiers.host.capacity": "1KiB", "policy.eviction": "lur", "sessions.idle": "1m"}
    found = refused(tree, overrides=overrides)
    assert [line.split()[0] for line in found] == ["sessions.idle", "policy.eviction", "tiers.host.capacity"]


def test_an_empty_tree_names_what_must_be_there(refused: Refused) -> None:
    assert [line.partition(";")[0] for line in refused({})] == ["model: missing", "tiers: missing"]


def test_keys_that_are_not_text_are_refused(tree: dict[str, Any], refused: Refused) -> None:
    tree["model"][1] = 2
    spoilt: dict[Any, Any] = {**tree, 3: 4}
    assert [line.partition(":")[0] for line in refused(spoilt)] == ["3 (mapping)", "model.1 (mapping)"]


# ---- limits per rank and in total (O-62) -----------------------------------------------------------
def ranked(tree: dict[str, Any], host: dict[str, Any]) -> dict[str, Any]:
    component = {"rule": "path", "bytes_per_token": 1}
    model = {"name": "m", "page_size": 16, "components": {"full": component}}
    return {**tree, "model": model, "ranks": {"tp_size": 8}, "tiers": {"device": {"kind": "cpu", "capacity": 4096}, "host": host}}  # fmt: skip


def test_eight_ranks_of_640_against_5000_are_refused_with_the_product(
    tree: dict[str, Any], refused: Refused
) -> None:
    found = refused(ranked(tree, {"capacity_per_rank": 640, "limit": 5000}))
    assert found == (
        (
            "tiers.host.capacity_per_rank (mapping): 8 ranks x 640 = 5120 bytes, over the limit of 5000;"
            " expected at most 625 a rank"
        ),
    )


def test_eight_ranks_of_625_fit_5000_exactly(tree: dict[str, Any]) -> None:
    config = load_config(ranked(tree, {"capacity_per_rank": 625, "limit": 5000}), environ={})
    assert config.tiers.host is not None
    assert (config.tiers.host.total_bytes(8), config.tiers.host.rank_bytes(8)) == (5000, 625)


def test_a_total_is_divided_over_the_ranks(tree: dict[str, Any]) -> None:
    config = load_config(ranked(tree, {"capacity": 5120}), environ={})
    assert config.tiers.host is not None
    assert (config.tiers.host.total_bytes(8), config.tiers.host.rank_bytes(8)) == (5120, 640)


def test_a_total_that_is_too_small_for_all_ranks_names_the_total_needed(
    tree: dict[str, Any], refused: Refused
) -> None:
    (line,) = refused(ranked(tree, {"capacity": 127}))
    assert line.endswith(
        "15 bytes for each of 8 rank(s), but one request needs 16 (full 1 x 16); expected at least 128B"
    )


# ---- this machine ----------------------------------------------------------------------------------
def test_a_disk_path_below_a_regular_file_is_refused(
    tree: dict[str, Any], refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        (line,) = refused(tree, overrides={"tiers.stores.0.path": str(path)})
        assert f"{tmp_path / 'file'} is not a folder" in line


def test_a_disk_path_at_a_link_to_nothing_is_refused(
    tree: dict[str, Any], refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (line,) = refused(tree, overrides={"tiers.stores.0.path": str(tmp_path / "link")})
    assert "link is not a folder" in line


def test_a_disk_path_in_a_folder_that_cannot_be_written_is_refused(
    tree: dict[str, Any], refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    (line,) = refused(tree, overrides={"tiers.stores.0.path": str(tmp_path / "a" / "b")})
    assert f"{tmp_path} is not writable" in line


def test_a_disk_path_that_belongs_to_another_user_is_refused(
    tree: dict[str, Any], refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    (line,) = refused(tree, overrides={"tiers.stores.0.path": str(tmp_path)})
    assert f"{tmp_path} belongs to user {tmp_path.stat().st_uid}, this process runs as user" in line
    load_config(tree, environ={}, overrides={"tiers.stores.0.path": str(tmp_path / "new")})


def test_tls_files_that_hold_no_certificate_are_refused(
    tree: dict[str, Any], refused: Refused, tmp_path: Path
) -> None:
    made, others = make_certificates(tmp_path / "a"), make_certificates(tmp_path / "b")
    junk = tmp_path / "junk"
    junk.write_text("no certificate\n")

    def lines(**files: Path) -> tuple[str, ...]:
        store = {**REDIS, "url": "rediss://h"} | {key: str(path) for key, path in files.items()}
        return refused(tree, overrides={"tiers.stores": [store]})

    (line,) = lines(ca_file=junk)
    assert f"stores.0.ca_file (argument): {junk} holds no certificates" in line
    (line,) = lines(cert_file=junk, key_file=made.key_file)
    assert f"stores.0.cert_file (argument): {junk} holds no certificate" in line
    (line,) = lines(cert_file=made.cert_file, key_file=others.key_file)
    assert f"or its key is not in {others.key_file}" in line
    good = {"ca_file": made.ca_file, "cert_file": made.cert_file, "key_file": made.key_file}
    store = {**REDIS, "url": "rediss://h"} | {key: str(path) for key, path in good.items()}
    load_config(tree, environ={}, overrides={"tiers.stores": [store]})


def test_a_disk_path_that_can_be_made_is_accepted_and_not_made(tree: dict[str, Any], tmp_path: Path) -> None:
    config = load_config(tree, environ={}, overrides={"tiers.stores.0.path": tmp_path / "a" / "b"})
    store = config.tiers.stores[0]
    assert store.kind == "disk"
    assert store.directory == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


def test_a_home_folder_is_expanded_where_it_is_used_and_kept_as_written(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = load_config(tree, environ={}, overrides={"tiers.stores.0.path": "~/kv"}).tiers.stores[0]
    assert store.kind == "disk"
    assert (store.path, store.directory) == ("~/kv", tmp_path / "kv")


def test_auto_is_no_folder_yet(tree: dict[str, Any]) -> None:
    store = load_config(tree, environ={}).tiers.stores[0]
    assert store.kind == "disk"
    assert store.directory is None


# ---- secrets ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "store",
    [
        {**REDIS, "password": "hunter2"},
        {**REDIS, "url": "redis://:hunter2@h"},
        {**REDIS, "url": "redis://u:hunter2@h", "ttl": "1GiB"},
        {**REDIS, "password_env": "hunter2!"},
        {**REDIS, "password_env": ["hunter2"]},
        {**REDIS, "password_file": {"hunter2": 1}},
        {**REDIS, "pasword": "hunter2"},
        {"kind": "disk", "capacity": "1GiB", "path": ["redis://:hunter2@h"]},
        {"kind": "disk", "capacity": "1GiB", "path": "redis://:hunter2@h"},
        {"kind": "redis://u:hunter2/with@signs@h:6379"},
        {**REDIS, "name": "redis://u:hunter2@h"},
    ],
    ids=str,
)
def test_a_refusal_never_repeats_a_secret(
    tree: dict[str, Any], refused: Refused, store: dict[str, Any]
) -> None:
    assert "hunter2" not in "\n".join(refused(tree, overrides={"tiers.stores": [store]}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.name", "https://user:hunter2@hub/org/model"),
        ("events.endpoint", "tcp://u:hunter2@127.0.0.1:5557"),
        ("admin.socket", "redis://u:hunter2@h"),
        ("metrics.host", "http://u:hunter2@h"),
    ],
)
def test_a_url_with_a_password_is_refused_wherever_it_stands(
    tree: dict[str, Any], refused: Refused, path: str, value: str
) -> None:
    """All that is accepted is shown by ``config show``, and named in messages."""
    lines = refused(tree, overrides={path: value})
    assert f"{path} (argument): a URL with a user name or password stands here" in "\n".join(lines)
    assert "hunter2" not in "\n".join(lines)


@pytest.mark.parametrize(
    "overrides",
    [
        {"events.endpoint": "tcp://127.0.0.1:*", "events.replay_endpoint": "tcp://127.0.0.1:*"},
        {"events.endpoint": "tcp://*:1", "events.replay_endpoint": "tcp://[::1]:65535"},
        {"events.endpoint": "ipc:///tmp/e", "events.replay_endpoint": "ipc:///tmp/f"},
        {"metrics.host": "::1"},
        {"metrics.host": "fe80::1%eth0"},
        {"metrics.host": "node-7.example"},
        {"ranks.tp_size": 2, "ranks.backend": "gloo", "ranks.address": "[::1]:65535"},
    ],
    ids=str,
)
def test_addresses_that_can_be_listened_on_are_taken(tree: dict[str, Any], overrides: dict[str, Any]) -> None:
    load_config(tree, environ={}, overrides=overrides)


@pytest.mark.parametrize(("tier", "words"), [("device", "shared, fixed,"), ("host", "shared,")])
@pytest.mark.parametrize("found", ["equal", 3])
def test_a_split_that_is_none_names_those_of_its_tier(
    tree: dict[str, Any], refused: Refused, tier: str, words: str, found: object
) -> None:
    (line,) = refused(tree, overrides={f"tiers.{tier}.split": found})
    assert line.endswith(f"expected {words} or a mapping with the share of each component")


def test_a_password_in_the_file_is_answered_with_the_remedy(tree: dict[str, Any], refused: Refused) -> None:
    (line,) = refused(tree, overrides={"tiers.stores": [{**REDIS, "password": "x"}]})
    assert line.startswith(
        "tiers.stores.0.password (argument): not allowed: a password never stands in a conf"
    )
    assert "password_env" in line


def test_every_refusal_of_a_real_file_is_one_line_in_the_error(
    tmp_path: Path, tree: dict[str, Any], refused: Refused
) -> None:
    path = tmp_path / "f.yaml"
    tree["model"]["page_size"] = "x\ny"
    path.write_text(yaml.safe_dump(tree))
    (line,) = refused(path)
    assert "\n" not in line
