"""Encoded pages in a real Redis: whole, cut into parts, and beside plain ones."""

from __future__ import annotations

import asyncio
import os

import pytest

from hicache.testing.redis_server import RedisServer
from hicache.testing.store_pages import CODECS, SECRET, make_key
from hicache.tiers.codecs import Codec, CodecSettings
from hicache.tiers.encoded import EncodedStore
from hicache.tiers.redis import RedisStore
from hicache.tiers.store import PageTarget, StoredPage

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("value_bytes", [8 << 20, 1000], ids=["whole", "cut"])
def test_pages_of_every_codec_are_read_whatever_is_written_now(server: RedisServer, value_bytes: int) -> None:
    async def test() -> None:
        size = 20_000
        contents = {name: bytes(size // 2) + os.urandom(size // 2) for name in CODECS}
        for name, settings in CODECS.items():
            store = EncodedStore(RedisStore(server.url, value_bytes=value_bytes), Codec(settings))
            await store.open()
            page = StoredPage(make_key(name), None, "full", memoryview(contents[name]))
            assert await store.put([page]) == [True]
            await store.close()
        reader = EncodedStore(
            RedisStore(server.url, value_bytes=value_bytes), Codec(CodecSettings(key=SECRET))
        )
        await reader.open()
        parents: list[object] = []
        targets = [
            PageTarget(make_key(name), "full", memoryview(bytearray(size)), on_parent=parents.append)
            for name in contents
        ]
        assert await reader.get(targets) == [True] * len(contents)
        assert [bytes(target.payload) for target in targets] == list(contents.values())
        assert parents == [None] * len(contents)
        assert reader.stats().errors == {}
        await reader.close()

        keyless = EncodedStore(RedisStore(server.url, value_bytes=value_bytes), Codec())
        await keyless.open()
        assert await keyless.get(targets) == [True, True, True, False, False]
        assert keyless.stats().errors == {"unsupported": 2}
        await keyless.close()

    asyncio.run(asyncio.wait_for(test(), timeout=120))
