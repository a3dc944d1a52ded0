"""What a page takes in a store of ours, header and all: with less room than that the store holds nothing."""

from __future__ import annotations

from hicache.config.tiers import DiskStoreConfig, MemoryStoreConfig

# What the stores write, whose layers lie above this one; a test fills real stores to hold these against them.
HEADER_BYTES = 160
"""Before each payload."""
SEAL_BYTES = 28
"""What encryption adds."""
RECORDS_BYTES = 512
"""Of the journal, for each page of a folder that outlives its process."""
BLOCK_BYTES, LARGE_BYTES, SMALL_GRAIN = 4096, 32 << 10, 8
"""A disk's slots are whole blocks if they are large, and multiples of the grain if not."""


def stored_bytes(store: DiskStoreConfig | MemoryStoreConfig, slot_bytes: int) -> int:
    """Bytes of its capacity that one page or state of ``slot_bytes`` takes, not compressed."""
    sealed = 0 if store.codec.encryption == "none" else SEAL_BYTES
    frame = HEADER_BYTES + slot_bytes + sealed
    if isinstance(store, MemoryStoreConfig):
        return frame
    grain = BLOCK_BYTES if frame >= LARGE_BYTES else SMALL_GRAIN
    return -(-frame // grain) * grain + (0 if store.directory is None else RECORDS_BYTES)
