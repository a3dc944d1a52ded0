"""Codecs: what went in comes out, and what was not put in that way does not."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import CorruptPayloadError
from hicache.tiers.codecs import COMPRESSIONS, Codec, CodecSettings, parse_key
from hicache.tiers.framing import CODEC_NONE, UnsupportedFormatError
from hicache.types import PageKey

KEY = PageKey(bytes(range(32)))
OTHER = PageKey(bytes(32))
SECRET = bytes(range(100, 132))

SETTINGS = [
    CodecSettings(compression, width=width, key=key, encrypts=key is not None)
    for compression in COMPRESSIONS
    for width in (1, 2, 4)
    for key in (None, SECRET)
]


def halves(num: int) -> bytes:
    """bfloat16 values as a model has them: exponents alike, mantissas noise."""
    values = np.random.default_rng(7).normal(size=num).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def decoded(
    codec: Codec, number: int, stored: bytes, length: int, key: PageKey = KEY, name: str = "full"
) -> bytes:
    target = bytearray(length)
    codec.decode(number, stored, key, name, memoryview(target))
    return bytes(target)


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: f"{s.compression}-{s.width}-{'key' if s.key else 'open'}"
)
@given(payload=st.one_of(st.binary(min_size=1, max_size=600), st.integers(1, 4096).map(bytes)))
def test_what_goes_in_comes_out(settings: CodecSettings, payload: bytes) -> None:
    codec = Codec(settings)
    number, stored = codec.encode(memoryview(payload), KEY, "full")
    assert decoded(codec, number, bytes(stored), len(payload)) == payload
    if settings.key is None:
        assert len(stored) <= len(payload)  # what does not shrink is kept as it is


def test_a_codec_reads_what_every_other_wrote() -> None:
    payload = halves(2048)
    reader = Codec(CodecSettings(key=SECRET))
    numbers = set()
    for settings in SETTINGS:
        number, stored = Codec(settings).encode(memoryview(payload), KEY, "full")
        assert decoded(reader, number, bytes(stored), len(payload)) == payload
        numbers.add(number)
    assert len(numbers) > 3


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: f"{s.compression}-{'key' if s.encrypts else 'open'}"
)
def test_a_codec_that_encrypts_reads_nothing_that_is_not(settings: CodecSettings) -> None:
    """Otherwise who can write to the store could pass off bytes that no key vouches for."""
    payload = halves(2048)
    reader = Codec(CodecSettings(key=SECRET, encrypts=True))
    number, stored = Codec(settings).encode(memoryview(payload), KEY, "full")
    if settings.encrypts:
        assert decoded(reader, number, bytes(stored), len(payload)) == payload
    else:
        with pytest.raises(CorruptPayloadError, match="not encrypted"):
            decoded(reader, number, bytes(stored), len(payload))


def test_the_byte_shuffle_makes_numbers_smaller() -> None:
    payload = memoryview(halves(32 << 10))
    sizes = {
        width: len(Codec(CodecSettings("zstd", width=width)).encode(payload, KEY, "full")[1])
        for width in (1, 2)
    }
    assert sizes[2] < 0.97 * sizes[1] < 0.8 * len(payload)


def test_noise_is_kept_as_it_is() -> None:
    payload = os.urandom(4096)
    number, stored = Codec(CodecSettings("zstd")).encode(memoryview(payload), KEY, "full")
    assert (number, bytes(stored)) == (CODEC_NONE, payload)


def test_the_same_payload_is_encrypted_differently_each_time() -> None:
    codec = Codec(CodecSettings(key=SECRET, encrypts=True))
    first, second = (bytes(codec.encode(memoryview(b"same"), KEY, "full")[1]) for _ in range(2))
    assert first != second
    assert b"same" not in first


@pytest.mark.parametrize(("key", "name"), [(OTHER, "full"), (KEY, "swa")])
def test_an_encrypted_page_cannot_be_passed_off_as_another(key: PageKey, name: str) -> None:
    codec = Codec(CodecSettings(key=SECRET, encrypts=True))
    number, stored = codec.encode(memoryview(b"payload"), KEY, "full")
    with pytest.raises(UnsupportedFormatError):
        decoded(codec, number, bytes(stored), 7, key, name)


@pytest.mark.parametrize("reader", [None, bytes(32)], ids=["no key", "another key"])
def test_an_encrypted_page_is_left_to_who_has_its_key(reader: bytes | None) -> None:
    number, stored = Codec(CodecSettings(key=SECRET, encrypts=True)).encode(
        memoryview(b"payload"), KEY, "full"
    )
    with pytest.raises(UnsupportedFormatError, match="key"):
        decoded(Codec(CodecSettings(key=reader)), number, bytes(stored), 7)


@pytest.mark.parametrize("number", [3, 0xF, 1 << 4, 1 << 9, 1 << 15])
def test_a_codec_of_a_newer_version_is_not_touched(number: int) -> None:
    with pytest.raises(UnsupportedFormatError, match="not known"):
        decoded(Codec(), number, b"abc", 3)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("spoil", ["empty", "no width", "cut", "flipped", "too long", "too short"])
def test_damage_is_told(compression: str, spoil: str) -> None:
    payload = bytes(1000) + os.urandom(200)
    codec = Codec(CodecSettings(compression))
    number, encoded = codec.encode(memoryview(payload), KEY, "full")
    assert number
    stored = bytearray(encoded)
    length = len(payload)
    match spoil:
        case "empty":
            stored.clear()
        case "no width":
            stored[0] = 0
        case "cut":
            del stored[-5:]
        case "flipped":
            stored[1:6] = b"\xff\xff\xff\xff\xff"
        case "too long":
            length += 1
        case "too short":
            length -= 1
    with pytest.raises(CorruptPayloadError):
        decoded(codec, number, bytes(stored), length)


def test_keys_are_hexadecimal_or_base64_and_never_shown() -> None:
    assert parse_key(SECRET.hex() + "\n") == SECRET
    assert parse_key("ZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXp7fH1+f4CBgoM=") == SECRET
    for wrong in ("", "secret", SECRET.hex()[:-2], SECRET.hex()[:-1] + "g", "ZGVm"):
        with pytest.raises(ValueError, match="32 bytes") as told:
            parse_key(wrong)
        assert not wrong or wrong not in str(told.value)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"compression": "gzip"}, "zstd"),
        ({"level": 20}, "1 to 19"),
        ({"width": 0}, "1 to 255"),
        ({"key": b"short"}, "32"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        CodecSettings(**wrong)  # type: ignore[arg-type]
