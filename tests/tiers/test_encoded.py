"""Encoded stores: the contract of every store, on every medium; pages of all codecs side by side."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hicache.testing.store_contract import StoreContract, UnboundedStoreContract
from hicache.testing.store_pages import CODECS, SECRET, Corruption, make_key, spoil
from hicache.tiers.codecs import Codec, CodecSettings
from hicache.tiers.disk import DiskStore
from hicache.tiers.encoded import EncodedStore
from hicache.tiers.framing import HEADER_BYTES
from hicache.tiers.memory import MemoryStore
from hicache.tiers.store import PageTarget, Store, StoredPage
from hicache.types import PageKey

MakeStore = Callable[[], Store]


@pytest.fixture(params=["memory", "disk"])
def behind(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Makes the store behind; on a disk each finds what the one before left."""
    if request.param == "disk":
        return lambda: DiskStore(tmp_path / "pages", 64 << 20)
    return MemoryStore


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, timeout=30)

    asyncio.run(bounded())


def payload(number: int, size: int) -> bytes:
    """Half of it can be compressed."""
    return bytes([number]) * (size // 2) + os.urandom(size - size // 2)


async def put(store: Store, *pages: tuple[str, bytes]) -> list[bool]:
    keys = [make_key(name) for name, _ in pages]
    parents = [None, *keys]
    return await store.put(
        [
            StoredPage(key, parent, "full", memoryview(content))
            for key, parent, (_, content) in zip(keys, parents, pages, strict=False)
        ]
    )


async def get(store: Store, **sizes: int) -> dict[str, bytes | None]:
    targets = [
        PageTarget(make_key(name), "full", memoryview(bytearray(size))) for name, size in sizes.items()
    ]
    answers = await store.get(targets)
    return {
        name: bytes(target.payload) if hit else None
        for name, target, hit in zip(sizes, targets, answers, strict=True)
    }


@pytest.mark.parametrize("size", [1, 64, 4096, 65536, 200_001])
@pytest.mark.parametrize("name", CODECS)
def test_pages_come_back_as_they_were(behind: MakeStore, name: str, size: int) -> None:
    async def test() -> None:
        store = EncodedStore(behind(), Codec(CODECS[name]))
        await store.open()
        contents = {f"p{n}": payload(n, size) for n in range(5)}
        assert await put(store, *contents.items()) == [True] * 5
        assert await get(store, **dict.fromkeys(contents, size), nowhere=size) == contents | {"nowhere": None}
        parents: list[object] = []
        target = PageTarget(make_key("p1"), "full", memoryview(bytearray(size)), on_parent=parents.append)
        assert await store.get([target]) == [True]
        assert parents == [make_key("p0")]
        await store.close()

    run(test())


def test_pages_of_every_codec_are_read_whatever_is_written_now(tmp_path: Path) -> None:
    async def test() -> None:
        contents = {name: payload(n, 5000) for n, name in enumerate(CODECS)}
        for name, settings in CODECS.items():
            store = EncodedStore(DiskStore(tmp_path, 64 << 20), Codec(settings))
            await store.open()
            assert await put(store, (name, contents[name])) == [True]
            await store.close()
        reader = EncodedStore(DiskStore(tmp_path, 64 << 20), Codec(CodecSettings(key=SECRET)))
        await reader.open()
        assert await get(reader, **dict.fromkeys(contents, 5000)) == contents
        await reader.close()

    run(test())


@pytest.mark.parametrize("name", CODECS)
def test_where_all_is_encrypted_a_page_that_is_not_is_a_miss_and_removed(
    behind: MakeStore, name: str
) -> None:
    """So that nobody who can write to the store passes off bytes, and what stays there is encrypted anew."""

    async def test() -> None:
        inner = behind()
        writer = EncodedStore(inner, Codec(CODECS[name]))
        await writer.open()
        content = payload(1, 5000)
        assert await put(writer, ("p", content)) == [True]
        reader = EncodedStore(inner, Codec(CodecSettings(key=SECRET, encrypts=True)))
        is_encrypted = CODECS[name].encrypts
        assert await get(reader, p=5000) == {"p": content if is_encrypted else None}
        assert await reader.exists([make_key("p")]) == [is_encrypted]
        assert reader.stats().errors.get("corrupt", 0) == (not is_encrypted)
        assert await put(reader, ("p", content)) == [True]
        assert await get(reader, p=5000) == {"p": content}
        await reader.close()
        await writer.close()

    run(test())


def test_compression_saves_room(behind: MakeStore) -> None:
    async def test() -> None:
        sizes = {}
        for name in ("plain", "zstd"):
            store = EncodedStore(MemoryStore(), Codec(CODECS[name]))
            await store.open()
            await put(store, ("a", bytes(100_000)))
            sizes[name] = store.stats().used_bytes
            await store.close()
        assert sizes["plain"] == 100_000 + HEADER_BYTES
        assert sizes["zstd"] < 1000

    run(test())


@pytest.mark.parametrize(
    "reader", [None, CodecSettings(), CodecSettings(key=bytes(32))], ids=["store", "no key", "wrong key"]
)
def test_a_page_that_cannot_be_decoded_here_is_a_miss_and_stays(
    tmp_path: Path, reader: CodecSettings | None
) -> None:
    async def test() -> None:
        writer = EncodedStore(DiskStore(tmp_path, 64 << 20), Codec(CODECS["aes"]))
        await writer.open()
        await put(writer, ("a", b"x" * 3000))
        await writer.close()
        plain = DiskStore(tmp_path, 64 << 20)
        other: Store = plain if reader is None else EncodedStore(plain, Codec(reader))
        await other.open()
        assert await get(other, a=3000) == {"a": None}
        assert other.stats().errors == {"unsupported": 1}
        assert other.stats().pages_corrupt == 0
        await other.close()
        await writer.open()
        assert await get(writer, a=3000) == {"a": b"x" * 3000}
        await writer.close()

    run(test())


def test_a_page_of_another_length_is_corrupt_and_removed(behind: MakeStore) -> None:
    async def test() -> None:
        store = EncodedStore(behind(), Codec(CODECS["zstd"]))
        await store.open()
        await put(store, ("a", bytes(5000)))
        assert await get(store, a=4000) == {"a": None}
        assert store.stats().errors == {"corrupt": 1}
        assert store.stats().pages_corrupt == 1
        assert await store.exists([make_key("a")]) == [False]
        await store.close()

    run(test())


class TestEncodedMemoryStore(StoreContract):
    """Quotas and all: random payloads do not shrink, so they are kept as they are."""

    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = EncodedStore(MemoryStore(capacity_bytes), Codec(CODECS["zstd"]))
        await store.open()
        return store

    def raw_bytes(self, store: Store, key: PageKey) -> bytes | None:
        raw = memory_behind(store).raw(key)
        return None if raw is None else bytes(raw)

    def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None:
        behind = memory_behind(store)
        raw = behind.raw(key)
        assert raw is not None
        spoilt = spoil(bytes(raw), how)
        if spoilt is None:
            del behind._blobs[key]
        else:
            raw[:] = spoilt


class TestEncryptedMemoryStore(UnboundedStoreContract):
    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = EncodedStore(MemoryStore(capacity_bytes), Codec(CODECS["aes"]))
        await store.open()
        return store


def memory_behind(store: Store) -> MemoryStore:
    assert isinstance(store, EncodedStore)
    assert isinstance(store.inner, MemoryStore)
    return store.inner
