"""What the configuration says that one page takes in a store, held against real stores."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from hicache.clock import MonotonicClock
from hicache.config import HiCacheConfig, load_config
from hicache.config.stored import stored_bytes
from hicache.errors import ConfigError
from hicache.stores import make_member
from hicache.testing.store_pages import make_page

KEY = "HICACHE_TEST_KEY"
PLACES = {"memory": {"kind": "memory"}, "disk": {"kind": "disk"}, "private": {"kind": "disk", "path": "auto"}}


def tree(store: dict[str, object], slot_bytes: int) -> dict[str, object]:
    full = {"rule": "path", "layers": 1, "bytes_per_token": slot_bytes}
    return {
        "model": {"name": "m", "page_size": 1, "components": {"full": full}},
        "tiers": {
            "device": {"kind": "cpu", "capacity": "1MiB"},
            "host": {"capacity": "1MiB"},
            "stores": [store],
        },
    }


def takes_one(config: HiCacheConfig, slot_bytes: int) -> bool:
    async def put() -> bool:
        store = make_member(config, 0, bytes(32), MonotonicClock())
        await store.open()
        try:
            return (await store.put([make_page("one", num_bytes=slot_bytes)]))[0]
        finally:
            await store.close()

    return asyncio.run(put())


@pytest.mark.parametrize("encryption", ["none", "aes-gcm"])
@pytest.mark.parametrize("slot_bytes", [1, 1000, 32_580, 32_607, 32_608, 100_000])
@pytest.mark.parametrize("kind", PLACES)
def test_a_store_holds_one_page_at_the_least_capacity_and_less_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, slot_bytes: int, encryption: str
) -> None:
    monkeypatch.setenv(KEY, os.urandom(32).hex())
    codec = {} if encryption == "none" else {"encryption": encryption, "key_env": KEY}
    store: dict[str, object] = {**PLACES[kind], "codec": codec, "capacity": "1MiB"}
    if kind == "disk":
        store["path"] = str(tmp_path / "pages")
    section = load_config(tree(store, slot_bytes), environ={}).tiers.stores[0]
    assert section.kind != "redis"
    least = stored_bytes(section, slot_bytes)

    config = load_config(tree(store | {"capacity": least}, slot_bytes), environ={})
    assert takes_one(config, slot_bytes)
    with pytest.raises(ConfigError, match=rf"takes {least} .* expected at least .*{least}"):
        load_config(tree(store | {"capacity": least - 1}, slot_bytes), environ={})
    starved = section.model_copy(update={"capacity": least - 1})
    tiers = config.tiers.model_copy(update={"stores": [starved]})
    assert not takes_one(config.model_copy(update={"tiers": tiers}), slot_bytes)
