"""How a payload is written down in L3: compressed, encrypted, both, or as it is.

::

    payload ── shuffle ── compress ──> [width | compressed]
                                             └── encrypt ──> [nonce | ciphertext | tag]

    codec (16 bits, in the page's header)    bits 0-3   compression   0 none, 1 lz4, 2 zstd
                                             bits 8-11  encryption    0 none, 1 AES-256-GCM
                                             others     0

The header says which codec a page has, so pages of different codecs live side by side in one store, and
changing the setting needs no migration. *Byte shuffle* puts all first bytes of the numbers together, then
all second ones (the filter of Blosc and HDF5): the exponents of floating-point values are alike, their
mantissas are noise. A page that compression does not make smaller is written as it is.
"""

from __future__ import annotations

import base64
import importlib
import os
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from hicache.errors import ConfigError, CorruptPayloadError
from hicache.tiers.framing import CODEC_NONE, UnsupportedFormatError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from hicache.types import PageKey

NONE = "none"
LZ4 = "lz4"
ZSTD = "zstd"
COMPRESSIONS = (NONE, LZ4, ZSTD)

KEY_BYTES = 32
_NONCE_BYTES = 12
_AES = 1 << 8
_COMPRESSION_BITS = 0xF
_KNOWN_BITS = _COMPRESSION_BITS | _AES


@dataclass(frozen=True, slots=True)
class CodecSettings:
    """What is written; what is read is told by each page's header.

    Args:
        compression: ``none``, ``lz4`` or ``zstd``.
        level: of zstd, 1 (fast) to 19; lz4 has none.
        width: bytes of one number, for the byte shuffle before compression; 1 does not shuffle.
        key: 32 bytes, to read what was encrypted; None: such pages are misses.
        encrypts: encrypt with AES-256-GCM and that key, and read nothing else: whoever can write to the store
            could otherwise put pages there that carry no proof of where they come from.
    """

    compression: str = NONE
    level: int = 3
    width: int = 1
    key: bytes | None = None
    encrypts: bool = False

    def __post_init__(self) -> None:
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression is {self.compression!r}; known are {', '.join(COMPRESSIONS)}")
        if not 1 <= self.level <= 19:
            raise ValueError(f"level is {self.level}, 1 to 19 expected")
        if not 1 <= self.width <= 255:
            raise ValueError(f"width is {self.width}, 1 to 255 bytes expected")
        if self.key is not None and len(self.key) != KEY_BYTES:
            raise ValueError(f"the key has {len(self.key)} bytes, {KEY_BYTES} expected")
        if self.encrypts and self.key is None:
            raise ValueError("encryption needs a key")

    @property
    def is_plain(self) -> bool:
        """Pages are written as they are."""
        return self.compression == NONE and not self.encrypts


class Codec:
    """Encodes payloads by one setting, decodes those of every setting.

    *Raises* ``ConfigError`` if a library is missing that the setting needs.

    *Thread*: any, several at once; the libraries release the interpreter lock.
    """

    def __init__(self, settings: CodecSettings | None = None) -> None:
        self.settings = settings or CodecSettings()
        self._local = threading.local()
        if self.settings.compression == LZ4:
            _lz4()
        if self.settings.key is not None:
            self._aes = _aes(self.settings.key)

    def encode(self, payload: memoryview, key: PageKey, component: str) -> tuple[int, memoryview]:
        """The codec and the bytes to store for a payload.

        Args:
            payload: contiguous bytes.
            key, component: whose payload it is; encryption binds the bytes to them.
        """
        settings = self.settings
        codec, stored = CODEC_NONE, payload.cast("B")
        if settings.compression != NONE:
            compressed = self._compress(stored)
            if len(compressed) < len(stored):
                codec = COMPRESSIONS.index(settings.compression)
                stored = memoryview(compressed)
        if settings.encrypts:
            codec |= _AES
            nonce = os.urandom(_NONCE_BYTES)
            stored = memoryview(nonce + self._aes.encrypt(nonce, stored, _bound(codec, key, component)))
        return codec, stored

    def decode(self, codec: int, stored: bytes, key: PageKey, component: str, into: memoryview) -> None:
        """Turn stored bytes back into the payload they were.

        Args:
            into: writable and contiguous; gets exactly its length. Unspecified after an error.

        Raises:
            CorruptPayloadError: they are not what was encoded for this page, of another length, or not
                encrypted where this setting encrypts.
            UnsupportedFormatError: a codec that this version, this machine or this key cannot read.
        """
        if codec & ~_KNOWN_BITS or codec & _COMPRESSION_BITS >= len(COMPRESSIONS):
            raise UnsupportedFormatError(f"codec {codec:#06x} is not known to this version")
        plain = stored
        if self.settings.encrypts and not codec & _AES:
            raise CorruptPayloadError("the page is not encrypted, and all pages of this store are")
        if codec & _AES:
            plain = self._decrypt(codec, stored, key, component)
        compression = COMPRESSIONS[codec & _COMPRESSION_BITS]
        if compression != NONE:
            self._decompress(compression, plain, into.cast("B"))
            return
        if len(plain) != into.nbytes:
            raise CorruptPayloadError(f"payload length differs: {len(plain)} bytes, {into.nbytes} expected")
        into.cast("B")[:] = plain

    # ---- encryption ------------------------------------------------------------------------------------------

    def _decrypt(self, codec: int, stored: bytes, key: PageKey, component: str) -> bytes:
        if self.settings.key is None:
            raise UnsupportedFormatError("the page is encrypted and no key is configured")
        from cryptography.exceptions import InvalidTag

        nonce, sealed = stored[:_NONCE_BYTES], stored[_NONCE_BYTES:]
        try:
            return self._aes.decrypt(nonce, sealed, _bound(codec, key, component))
        except (InvalidTag, ValueError):
            # The page's checksum was right, so these are the bytes somebody stored: with another key.
            raise UnsupportedFormatError("the page was encrypted with another key") from None

    # ---- compression -----------------------------------------------------------------------------------------

    def _compress(self, payload: memoryview) -> bytes:
        settings = self.settings
        shuffled = _shuffle(payload, settings.width)
        head = bytes([settings.width])
        if settings.compression == LZ4:
            compressed: bytes = _lz4().compress(shuffled, store_size=False)
            return head + compressed
        return head + self._zstd_compressor().compress(shuffled)

    def _decompress(self, compression: str, stored: bytes, into: memoryview) -> None:
        if not stored or not stored[0]:
            raise CorruptPayloadError("the compressed payload has no beginning")
        width, body = stored[0], memoryview(stored)[1:]
        try:
            if compression == LZ4:
                plain = _lz4().decompress(body, uncompressed_size=into.nbytes)
            else:
                plain = self._zstd_decompressor().decompress(body, max_output_size=into.nbytes)
        except ConfigError as error:
            raise UnsupportedFormatError(str(error)) from None
        except Exception as error:  # each library has a type of its own; none of them knows more than this
            raise CorruptPayloadError(f"the payload cannot be decompressed: {error}") from error
        if len(plain) != into.nbytes:
            raise CorruptPayloadError(f"payload length differs: {len(plain)} bytes, {into.nbytes} expected")
        _unshuffle(plain, width, into)

    # A compressor must not be used by two threads at once, and making one for every page is slow.

    def _zstd_compressor(self) -> zstandard.ZstdCompressor:
        found = getattr(self._local, "compressor", None)
        if found is None:
            found = self._local.compressor = zstandard.ZstdCompressor(level=self.settings.level)
        return found

    def _zstd_decompressor(self) -> zstandard.ZstdDecompressor:
        found = getattr(self._local, "decompressor", None)
        if found is None:
            found = self._local.decompressor = zstandard.ZstdDecompressor()
        return found


def parse_key(text: str) -> bytes:
    """A key of 32 bytes, written as 64 hexadecimal digits or in base64.

    Raises ``ValueError`` with what is wrong; never with the key.
    """
    word = text.strip()
    try:
        if len(word) == 2 * KEY_BYTES:
            return bytes.fromhex(word)
        key = base64.b64decode(word, validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"not a key of {KEY_BYTES} bytes; write 64 hexadecimal digits, as openssl rand -hex 32 does, or base64"
        )
    return key


def _bound(codec: int, key: PageKey, component: str) -> bytes:
    """What encryption authenticates beside the payload: a page cannot be passed off as another."""
    return codec.to_bytes(2, "little") + key + component.encode()


def _shuffle(payload: memoryview, width: int) -> memoryview:
    """First bytes of all numbers, then second bytes, …; an odd rest stays at the end."""
    if width == 1:
        return payload
    whole = len(payload) // width * width
    data = np.frombuffer(payload, dtype=np.uint8)
    shuffled = np.empty(len(payload), dtype=np.uint8)
    shuffled[:whole].reshape(width, -1)[:] = data[:whole].reshape(-1, width).T
    shuffled[whole:] = data[whole:]
    return shuffled.data


def _unshuffle(data: bytes, width: int, into: memoryview) -> None:
    if width == 1:
        into[:] = data
        return
    whole = len(data) // width * width
    shuffled = np.frombuffer(data, dtype=np.uint8)
    plain = np.frombuffer(into, dtype=np.uint8)
    plain[:whole].reshape(-1, width)[:] = shuffled[:whole].reshape(width, -1).T
    plain[whole:] = shuffled[whole:]


def _lz4() -> ModuleType:
    try:
        return importlib.import_module("lz4.block")
    except ModuleNotFoundError:
        raise ConfigError(["compression lz4 needs the package lz4; pip install 'hicache[codecs]'"]) from None


def _aes(key: bytes) -> AESGCM:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError:
        raise ConfigError(
            ["encryption needs the package cryptography; pip install 'hicache[codecs]'"]
        ) from None
    return AESGCM(key)
