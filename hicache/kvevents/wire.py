"""The shape of events that routers of vLLM, SGLang and Dynamo read.

::

    message   topic | sequence, 8 bytes big-endian | batch in msgpack
    batch     [seconds since 1970, [event, ...], data-parallel rank]
    event     {"type": "BlockStored", "block_hashes": [...], ...}    format "map"
              ["BlockStored", [...], ...]                            format "array", the same fields in this order

The fields of the peers come first, under their names and in their order; ``component``, ``tier`` and ``cause`` follow, which their
readers pass over. A block is a page, a block's hash its 32-byte page key. Salts are in the keys, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hicache.events import Cause, ResidencyChange, ResidencyEvent
from hicache.types import ComponentSpec, PageKey, ReuseRule, Tier

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""Sequence of the empty message that ends a replay."""
INT_HASH_BYTES = 8
STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"

_MEDIUM = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORE: "STORAGE"}
_KIND = {
    ReuseRule.PATH.value: "full_attention",
    ReuseRule.WINDOW.value: "sliding_window",
    ReuseRule.CHECKPOINT.value: "mamba",
}
_STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "component", "tier", "cause",
)  # fmt: skip
_REMOVED_FIELDS = (
    "block_hashes",
    "medium",
    "group_idx",
    "remaining_copy_counts",
    "component",
    "tier",
    "cause",
)
_FIELDS: Mapping[str, Sequence[str]] = {STORED: _STORED_FIELDS, REMOVED: _REMOVED_FIELDS, CLEARED: ()}


class BatchEncoder:
    """Writes batches.

    Args:
        specs: the model's components; a component's place is its group.
        page_size: tokens a page.
        is_map: events as maps; else as arrays.
        has_int_hashes: hashes as signed integers of a key's first 8 bytes, for readers that declare integers.
        rank: of data parallelism, if there is any.

    *Thread*: one at a time.
    """

    def __init__(
        self,
        specs: Sequence[ComponentSpec],
        page_size: int,
        *,
        is_map: bool,
        has_int_hashes: bool = False,
        rank: int | None = None,
    ) -> None:
        self._groups = {spec.name: (group, spec) for group, spec in enumerate(specs)}
        self._page_size = page_size
        self._is_map = is_map
        self._has_int_hashes = has_int_hashes
        self._rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Iterable[ResidencyEvent], written_s: float) -> bytes:
        """One batch; the removals of a reset are one AllBlocksCleared."""
        return self._batch(list(self._told(events)), written_s)

    def cleared(self, written_s: float) -> bytes:
        """A batch that says: nothing is anywhere."""
        return self._batch([self._event(CLEARED, ())], written_s)

    def _batch(self, events: list[object], written_s: float) -> bytes:
        return self._encoder.encode([written_s, events, self._rank])

    def _told(self, events: Iterable[ResidencyEvent]) -> Iterator[object]:
        was_cleared = False
        for event in events:
            is_reset = event.cause is Cause.RESET
            if not is_reset:
                yield self._change(event)
            elif not was_cleared:
                yield self._event(CLEARED, ())
            was_cleared = is_reset

    def _change(self, event: ResidencyEvent) -> object:
        group, spec = self._groups[event.component]
        ours = (event.component, event.tier.name.lower(), event.cause.value)
        medium = _MEDIUM[event.tier]
        if event.change is ResidencyChange.REMOVED:
            return self._event(REMOVED, (self._hashes(event.keys), medium, group, None, *ours))
        tokens = np.frombuffer(event.tokens, dtype="<i4").tolist()
        window = spec.window_tokens if spec.rule == ReuseRule.WINDOW else None
        lora = event.namespace.lora
        parent = None if event.parent is None else self._hashes((event.parent,))[0]
        head = (self._hashes(event.keys), parent, tokens, self._page_size, None, medium, lora, None)
        return self._event(STORED, (*head, group, _KIND.get(spec.rule), window, *ours))

    def _hashes(self, keys: Sequence[PageKey]) -> Sequence[bytes | int]:
        if not self._has_int_hashes:
            return keys
        return [int.from_bytes(key[:INT_HASH_BYTES], "big", signed=True) for key in keys]

    def _event(self, tag: str, values: Sequence[object]) -> object:
        if self._is_map:
            return {"type": tag, **dict(zip(_FIELDS[tag], values, strict=True))}
        return [tag, *values]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it was read.

    Args:
        sequence: its number; one more than the last, or something was lost.
        written_s: seconds since 1970.
        events: tag and fields by name.
    """

    sequence: int
    written_s: float
    events: tuple[tuple[str, Mapping[str, object]], ...]


def decode(sequence: int, payload: bytes) -> Batch:
    """Read a batch in either format. Raises ``ValueError`` for what is none."""
    try:
        written_s, events, *_ = msgspec.msgpack.decode(payload)
        return Batch(sequence, float(written_s), tuple(_read(event) for event in events))
    except (msgspec.DecodeError, TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"batch {sequence} of {len(payload)} bytes is not one of KV events: {error}"
        ) from error


def _read(event: object) -> tuple[str, Mapping[str, object]]:
    if isinstance(event, dict):
        fields = dict(event)
        return str(fields.pop("type")), fields
    if isinstance(event, list):
        tag, *values = event
        return str(tag), dict(zip(_FIELDS[str(tag)], values, strict=False))
    raise TypeError(f"an event is a map or an array, found {type(event).__name__}")


class Residency:
    """What is where, by the events alone."""

    def __init__(self) -> None:
        self.pages: set[tuple[Tier, str, PageKey]] = set()

    def apply(self, batch: Batch) -> None:
        """Take over one batch. Raises ``ValueError`` where it contradicts those before: one was missed."""
        for tag, fields in batch.events:
            if tag == CLEARED:
                self.pages.clear()
                continue
            keys = fields["block_hashes"]
            tier, component = Tier[str(fields["tier"]).upper()], str(fields["component"])
            assert isinstance(keys, list)
            named = {(tier, component, PageKey(key)) for key in keys}
            if tag == STORED and not named & self.pages:
                self.pages |= named
            elif tag == REMOVED and named <= self.pages:
                self.pages -= named
            else:
                raise ValueError(
                    f"batch {batch.sequence} does not follow from those before: {tag} in {tier.name}"
                )
