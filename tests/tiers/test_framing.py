"""A header says what its page is, and any other bytes are noticed."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import CorruptPayloadError
from hicache.testing.store_pages import make_key
from hicache.tiers.framing import (
    HEADER_BYTES,
    PageHeader,
    UnsupportedFormatError,
    check_payload,
    decode_header,
    encode_header,
    payload_checksum,
)
from hicache.types import PageKey

KEY = make_key("a")
PAYLOAD = b"payload of a page"


def reseal(header: bytearray) -> bytes:
    """Give a changed header the checksum it would have had."""
    header[152:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(header[:152])))
    return bytes(header)


KEYS = st.binary(min_size=32, max_size=32).map(PageKey)


@given(
    key=KEYS,
    parent=st.none() | KEYS,
    component=st.text(st.characters(codec="utf-8"), min_size=1, max_size=14),
    payload=st.binary(),
)
def test_a_header_gives_back_what_it_was_made_of(
    key: PageKey, parent: PageKey | None, component: str, payload: bytes
) -> None:
    raw = encode_header(key, component, payload, parent=parent)
    assert len(raw) == HEADER_BYTES
    header = decode_header(raw)
    assert header == PageHeader(key, parent, component, len(payload), payload_checksum(payload))
    check_payload(header, payload)


def test_the_layout_is_the_documented_one() -> None:
    raw = encode_header(KEY, "full", PAYLOAD)
    assert raw[:24] == b"HICPAGE\0" + struct.pack("<HHHHQ", 1, 0, 4, 0, len(PAYLOAD))
    assert raw[24:32] == struct.pack("<Q", xxhash.xxh3_64_intdigest(PAYLOAD))
    assert raw[32:64] == KEY
    assert raw[64:120] == b"full".ljust(56, b"\0")
    assert raw[120:152] == bytes(32)
    assert raw[152:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(raw[:152]))
    below = encode_header(KEY, "full", PAYLOAD, parent=make_key("b"))
    assert (below[14:16], below[120:152]) == (b"\1\0", make_key("b"))


@pytest.mark.parametrize("bit", range(0, 8 * HEADER_BYTES, 7))
def test_any_flipped_bit_of_a_header_is_corruption(bit: int) -> None:
    raw = bytearray(encode_header(KEY, "full", PAYLOAD))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptPayloadError, match="differs"):
        decode_header(raw)


@pytest.mark.parametrize("num_bytes", [0, 1, 159])
def test_a_short_header_is_corruption(num_bytes: int) -> None:
    with pytest.raises(CorruptPayloadError, match=f"{num_bytes} bytes, 160 expected"):
        decode_header(encode_header(KEY, "full", PAYLOAD)[:num_bytes])


def test_a_whole_header_of_a_later_version_is_not_corruption() -> None:
    raw = bytearray(encode_header(KEY, "full", PAYLOAD))
    struct.pack_into("<H", raw, 8, 2)
    with pytest.raises(UnsupportedFormatError) as raised:
        decode_header(reseal(raw))
    assert not isinstance(raised.value, CorruptPayloadError)


@pytest.mark.parametrize("codec", [0, 2, 0x101, 0xFFFF])
def test_a_header_names_its_codec_known_or_not(codec: int) -> None:
    """Who decodes says what it knows: a store only keeps bytes."""
    assert decode_header(encode_header(KEY, "full", PAYLOAD, codec=codec)).codec == codec


@pytest.mark.parametrize(
    ("at", "value"),
    [(8, b"\0\0"), (12, b"\0\0"), (12, b"\xff\0"), (14, b"\2\0"), (100, b"x"), (64, b"\xff")],
    ids=["version-0", "no-name", "long-name", "flags", "padding", "not-utf-8"],
)
def test_a_sealed_header_with_impossible_fields_is_corruption(at: int, value: bytes) -> None:
    raw = bytearray(encode_header(KEY, "full", PAYLOAD))
    raw[at : at + len(value)] = value
    with pytest.raises(CorruptPayloadError):
        decode_header(reseal(raw))


def test_a_payload_of_another_length_or_content_is_named() -> None:
    header = decode_header(encode_header(KEY, "full", PAYLOAD))
    with pytest.raises(CorruptPayloadError, match="length differs: 16 bytes, header says 17"):
        check_payload(header, PAYLOAD[:-1])
    with pytest.raises(CorruptPayloadError, match="payload checksum differs"):
        check_payload(header, PAYLOAD[:-1] + b"X")


def test_a_header_of_another_page_is_named() -> None:
    header = decode_header(encode_header(KEY, "full", PAYLOAD))
    header.check_identity(KEY)
    with pytest.raises(CorruptPayloadError, match="key differs"):
        header.check_identity(make_key("b"))


def test_a_large_payload_has_the_checksum_of_its_bytes() -> None:
    payload = bytes(range(256)) * (40 << 10)  # 10 MiB: hashed in pieces
    assert payload_checksum(payload) == xxhash.xxh3_64_intdigest(payload)


@pytest.mark.parametrize(
    ("key", "component"),
    [(b"short", "full"), (bytes(32), ""), (bytes(32), "n" * 57)],
    ids=["short-key", "no-component", "long-component"],
)
def test_what_does_not_fit_a_header_is_refused(key: bytes, component: str) -> None:
    with pytest.raises(ValueError):
        encode_header(PageKey(key), component, PAYLOAD)
