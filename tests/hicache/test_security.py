"""What docs/security.md promises, line by line; lines that are proved elsewhere name the test there."""

from __future__ import annotations

import ast
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hicache
from hicache.config import HiCacheConfig, dump_config, explain_config, load_config, preset_names
from hicache.errors import ConfigError
from hicache.types import Namespace

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig

ROOT = Path(hicache.__file__).resolve().parents[1]
SOURCES = ("hicache", "config", "radix", "tiers", "transfer")
PROMPT = range(1, 42)
KEY = "8f3c" * 16
OTHER_KEY = "1b2d" * 16
SALT = "tenant-a-secret-salt"
TENANTS = {
    "salts": (Namespace(salt="a"), Namespace(salt="b")),
    "salt and none": (Namespace(salt="a"), Namespace()),
    "empty and none": (Namespace(salt=""), Namespace()),
    "salt and lora": (Namespace(salt="a"), Namespace(lora="a")),
}


def stores(kind: str, folder: Path) -> list[dict[str, Any]]:  # Any: what a YAML may hold
    disk = {"kind": "disk", "path": str(folder / "pages"), "capacity": "8MiB", "min_free": 1}
    encrypted = {"encryption": "aes-gcm", "key_env": "HICACHE_TEST_KEY"}
    match kind:
        case "disk":
            return [disk]
        case "encrypted disk":
            return [disk | {"codec": encrypted}]
        case "stack":
            return [{"kind": "memory", "capacity": "4MiB", "name": "near"}, disk | {"name": "far"}]
    return [{"kind": "memory", "capacity": "8MiB"}]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_TEST_KEY", KEY)


def leave_in_store(rig: Rig, namespace: Namespace) -> None:
    rig.serve(PROMPT, namespace=namespace)
    assert rig.cache.flush()


# ---- tenants -------------------------------------------------------------------------------------------
# Redis: tests/redis/test_redis_cache.py::test_another_namespace_never_meets_our_pages
# engines: test_transformers_engine.py::test_namespaces_share_nothing, test_vllm_index.py and test_vllm_server.py on
# salts, test_sglang_tenants.py in every store
@pytest.mark.parametrize("pair", TENANTS)
@pytest.mark.parametrize("kind", ["memory", "disk", "encrypted disk", "stack"])
@pytest.mark.parametrize("model", ["full", "full+swa+mamba"])
def test_two_tenants_with_the_same_tokens_share_nothing_in_any_tier(
    make_rig: MakeRig, tmp_path: Path, model: str, kind: str, pair: str
) -> None:
    """In the tree, then with L1 and L2 emptied, so that only what L3 calls its pages stands between them."""
    ours, theirs = TENANTS[pair]
    rig = make_rig(model, device=256, host=256, tiers__stores=stores(kind, tmp_path))
    leave_in_store(rig, ours)
    assert rig.serve(PROMPT, namespace=theirs).source.total == 0
    rig.cache.drain()
    rig.cache.reset()
    other = Namespace(salt="nobody's")
    assert rig.serve(PROMPT, namespace=other).source.total == 0
    assert rig.serve(PROMPT, namespace=ours).source.store == 40


@pytest.mark.parametrize("kind", ["disk", "encrypted disk"])
def test_two_tenants_share_nothing_after_a_restart(make_rig: MakeRig, tmp_path: Path, kind: str) -> None:
    rig = make_rig("full+swa+mamba", device=64, host=64, tiers__stores=stores(kind, tmp_path))
    leave_in_store(rig, Namespace(salt="a"))
    rig.cache.close()
    again = make_rig("full+swa+mamba", device=64, host=64, tiers__stores=stores(kind, tmp_path))
    assert again.serve(PROMPT, namespace=Namespace(salt="b")).source.total == 0
    assert again.serve(PROMPT, namespace=Namespace(salt="a")).source.store == 40


# ---- code from data ------------------------------------------------------------------------------------
BANNED_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
BANNED_CALLS = {
    "eval", "exec", "compile", "__import__",
    "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "torch.load", "torch.save", "np.load",
    "os.system", "os.popen",
}  # fmt: skip


def files() -> Iterator[Path]:
    for folder in SOURCES:
        yield from (path for path in (ROOT / folder).rglob("*.py") if "testing" not in path.parts)


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in BANNED_MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in BANNED_MODULES:
                yield module
            case ast.Call(func=func) if ast.unparse(func) in BANNED_CALLS:
                yield ast.unparse(func)
            case ast.keyword(arg="shell" | "allow_pickle", value=ast.Constant(value=True)):
                yield str(node.arg)


def test_nothing_that_is_read_can_become_code() -> None:
    scanned = {path: list(findings(ast.parse(path.read_text(encoding="utf-8")))) for path in files()}
    assert len(scanned) > 100
    assert {str(path): found for path, found in scanned.items() if found} == {}


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from dill import loads", "eval('1')", "yaml.load(x)", "np.load(f, allow_pickle=True)"],
)
def test_the_search_for_it_finds_it(line: str) -> None:
    assert list(findings(ast.parse(line)))


@pytest.mark.parametrize(
    "tag",
    ["!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!include /etc/passwd"],
    ids=str,
)
def test_a_yaml_tag_is_refused(tmp_path: Path, tag: str) -> None:
    file = tmp_path / "tagged.yaml"
    file.write_text(f"model: {tag}\n")
    with pytest.raises(ConfigError):
        load_config(file, environ={})


# ---- files and ports -----------------------------------------------------------------------------------
def test_every_file_is_0600_and_every_folder_0700_whatever_the_umask(
    make_rig: MakeRig, socket_folder: Path
) -> None:
    before = os.umask(0)
    try:
        rig = make_rig(
            device=64,
            host=64,
            tiers__stores=stores("disk", socket_folder),
            admin__socket=str(socket_folder / "admin" / "a.sock"),
        )
        leave_in_store(rig, Namespace())
        found = list(socket_folder.rglob("*"))
        modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in found}
        expected = {path: 0o700 if path.is_dir() else 0o600 for path in found}
        assert {path.name for path in found} > {"admin", "a.sock", "pages"}
        assert len(found) > 4
        assert modes == expected
    finally:
        os.umask(before)


@pytest.mark.parametrize("preset", preset_names())
def test_no_preset_opens_a_port_or_a_socket(preset: str) -> None:
    config = load_config(preset, environ={})
    assert config.metrics.port is None
    assert config.metrics.host == "127.0.0.1"
    assert config.admin.path is None
    assert config.events.endpoint is config.events.replay_endpoint is None


# ---- secrets -------------------------------------------------------------------------------------------
# A password: tests/redis/test_redis.py::test_nothing_secret_is_logged_or_said, tests/config/test_cli.py::
# test_show_never_prints_the_password, tests/config/test_refusal.py::test_a_refusal_never_repeats_a_secret
# Events: tests/kvevents/test_kvevents.py::test_salts_are_not_told
def what_is_said(rig: Rig, config: HiCacheConfig) -> str:
    """All that an operator can ask for."""
    with rig.cache.match(PROMPT, namespace=Namespace(salt="other")) as lease:
        lease.load()
        explanation = lease.explain()
    return "\n".join(
        [
            dump_config(config),
            repr(config),
            str(explain_config(config.model_dump(mode="json", exclude_none=True), environ={})),
            str(rig.cache.admin.status()),
            str(rig.cache.admin.numbers()),
            str(rig.cache.stats()),
            str(explanation),
            repr(vars(rig.cache)),
            repr([vars(store) for store in rig.cache._stores.members.values()]),
        ]
    )


def test_keys_and_salts_are_nowhere_in_what_a_cache_says(
    make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    settings: dict[str, Any] = {"device": 16, "host": 16, "tiers__stores": stores("encrypted disk", tmp_path)}
    rig = make_rig(explain__enabled=True, **settings)
    leave_in_store(rig, Namespace(salt=SALT))
    said = what_is_said(rig, rig.config)
    rig.cache.close()
    # With another key, its pages are misses that are counted and logged.
    monkeypatch.setenv("HICACHE_TEST_KEY", OTHER_KEY)
    other = make_rig(explain__enabled=True, **settings)
    assert other.serve(PROMPT, namespace=Namespace(salt=SALT)).source.total == 0
    said += what_is_said(other, other.config) + caplog.text
    for secret in (KEY, OTHER_KEY, str(bytes.fromhex(KEY)), SALT):
        assert secret not in said
    assert "HICACHE_TEST_KEY" in said


@pytest.mark.parametrize("wrong", ["8f3c8f3c", "not a key at all", "8f3c" * 15 + "zzzz"])
def test_a_key_that_is_none_is_refused_without_being_repeated(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("HICACHE_TEST_KEY", wrong)
    with pytest.raises(ConfigError, match=r"tiers\.stores\.0\.codec\.key_env: not a key") as caught:
        make_rig(device=16, host=16, tiers__stores=stores("encrypted disk", tmp_path))
    assert wrong not in str(caught.value)


# ---- encryption ----------------------------------------------------------------------------------------
# The codec's own part: tests/tiers/test_codecs.py (bound to key and component, another key, a fresh nonce) and
# tests/tiers/test_encoded.py (a page that is not encrypted is a miss)
def everything_under(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("kind", ["disk", "encrypted disk"])
def test_who_reads_an_encrypted_disk_sees_no_payload(make_rig: MakeRig, tmp_path: Path, kind: str) -> None:
    rig = make_rig(device=64, host=64, tiers__stores=stores(kind, tmp_path))
    leave_in_store(rig, Namespace())
    payload = rig.stamps(PROMPT).pages("full", 0, 1).tobytes()
    rig.cache.close()
    assert (payload in everything_under(tmp_path)) == (kind == "disk")


def test_a_page_that_somebody_planted_is_a_miss_where_all_are_encrypted(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    """Who can write to the folder knows no key, but may know how pages are named and framed."""
    planted = make_rig(device=64, host=64, tiers__stores=stores("disk", tmp_path))
    leave_in_store(planted, Namespace())
    planted.cache.close()
    rig = make_rig(device=64, host=64, tiers__stores=stores("encrypted disk", tmp_path))
    assert rig.serve(PROMPT).source.total == 0
    # Pages that the tree still believes in are not written again before a request has missed them.
    rig.cache.drain()
    rig.cache.reset()
    rig.serve(PROMPT)
    rig.cache.drain()
    rig.cache.reset()
    assert rig.serve(PROMPT).source.store == 40, "what was planted was not replaced"
