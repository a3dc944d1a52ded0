"""Bytes between a model's ``DynamicCache`` and the device pool: export while computing, import at a boundary."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from hicache.engines.transformers_geometry import CacheGeometry, StatePart, StateTensor, TokenPart
from hicache.engines.transformers_library import RecordingCache
from hicache.errors import TierUnavailableError
from hicache.lease import Lease
from hicache.radix.actions import Slots
from hicache.radix.rules.window import window_frontier
from hicache.tiers.device import DevicePool
from hicache.types import NO_SLOT, ReuseRule


class LoadLostError(TierUnavailableError):
    """A layer that was counted on did not arrive; the request is computed anew."""


class CachePayload:
    """Reads and writes one model's payload in a device pool.

    Args:
        geometry: what the model keeps.
        pool: where; on the model's device.
        page_size: tokens a page.

    *Thread*: calls for different leases may run at the same time.
    """

    def __init__(self, geometry: CacheGeometry, pool: DevicePool, page_size: int) -> None:
        self._geometry = geometry
        self._pool = pool
        self._page = page_size
        self._windows = {
            spec.name: spec.window_tokens for spec in geometry.specs if spec.rule == ReuseRule.WINDOW
        }

    # ---- export ------------------------------------------------------------------------------
    def write_pages(self, cache: RecordingCache, lease: Lease, begin: int, end: int) -> None:
        """Write the pages of tokens [begin, end), as far as a boundary at ``end`` or later can need them.

        What was recorded from ``end`` on stays recorded.

        *Caller guarantees*: both are page ends; ``cache.recorded`` begins at token ``begin``; the lease has reserved
        the slots.
        """
        slots = {spec.name: lease.slots(spec.name) for spec in self._geometry.specs if not spec.is_checkpoint}
        for part in self._geometry.tokens:
            keys, values = _joined(cache.recorded[part.layer])
            count = end - begin
            cache.recorded[part.layer] = _rest(keys, values, count)
            first = max(begin, self._needed_from(part.component, end))
            # A slot that a window has dropped already, or never got, takes nothing.
            pages = slots[part.component][first // self._page : end // self._page]
            held = np.flatnonzero(pages != NO_SLOT)
            if not held.size:
                continue
            rows = self._rows(part)
            to = self._index(pages[held])
            select = self._index(held)
            split = self._page * part.key_bytes
            written = slice(first - begin, count)
            rows[to, :split] = _to_bytes(keys[:, :, written], self._page)[select]
            rows[to, split : split + self._page * part.value_bytes] = _to_bytes(
                values[:, :, written], self._page
            )[select]

    def write_states(self, cache: RecordingCache, lease: Lease) -> None:
        """Write the states as they are now into the lease's private slot."""
        for part in self._geometry.states:
            row = self._state_row(part, lease)
            layer = cache.layers[part.layer]
            for tensor in part.tensors:
                held = _states(layer, tensor)[tensor.index]
                row[_area(tensor)] = held.contiguous().view(-1).view(torch.uint8)

    # ---- import ------------------------------------------------------------------------------
    def restore(self, cache: RecordingCache, lease: Lease, length: int) -> None:
        """Fill an empty cache with the boundary at ``length`` tokens.

        States now; keys and values of a layer when the model comes to it, so that it computes the layers before
        while this one arrives. Then ``LoadLostError`` may be raised out of the model's forward pass: a layer did
        not arrive, and the lease has come to nothing.
        """
        if not length:
            return
        slots = {spec.name: lease.slots(spec.name) for spec in self._geometry.specs if not spec.is_checkpoint}
        for state in self._geometry.states:
            self._restore_state(state, cache.layers[state.layer], lease)
        for part in self._geometry.tokens:
            layer = cache.layers[part.layer]
            self._begin_tokens(part, layer, length)
            cache.pending[part.layer] = partial(
                self._restore_tokens, part, layer, lease, slots[part.component], length
            )

    def _begin_tokens(self, part: TokenPart, layer: Any, length: int) -> None:
        """Keys and values of the right size without content: from their size, masks are made for all layers."""
        count = length if part.window is None else min(length, part.window - 1)
        device = self._geometry.device
        (key_heads, key_size), (value_heads, value_size) = part.key_shape, part.value_shape
        keys = torch.empty((1, key_heads, count, key_size), dtype=part.key_dtype, device=device)
        values = torch.empty((1, value_heads, count, value_size), dtype=part.value_dtype, device=device)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if part.window is not None:
            layer.cumulative_length = length

    def _restore_tokens(self, part: TokenPart, layer: Any, lease: Lease, slots: Slots, length: int) -> None:
        if not lease.wait_layer(part.row, part.component):
            raise LoadLostError(f"layer {part.layer} did not arrive")
        kept_from = 0 if part.window is None else max(0, length - (part.window - 1))
        first_page = kept_from // self._page
        rows = self._rows(part)[self._index(slots[first_page : length // self._page])]
        split = self._page * part.key_bytes
        skip = kept_from - first_page * self._page
        keys = _from_bytes(rows[:, :split], part.key_shape, part.key_dtype)[:, :, skip:]
        value_bytes = rows[:, split : split + self._page * part.value_bytes]
        values = _from_bytes(value_bytes, part.value_shape, part.value_dtype)[:, :, skip:]
        layer.keys.copy_(keys)
        layer.values.copy_(values)

    def _restore_state(self, part: StatePart, layer: Any, lease: Lease) -> None:
        row = self._state_row(part, lease)
        for tensor in part.tensors:
            held = row[_area(tensor)].clone().view(tensor.dtype).view(1, *tensor.shape)
            name = "conv_states" if tensor.is_conv else "recurrent_states"
            layer.lazy_initialization(**{name: held}, state_idx=tensor.index)
            _states(layer, tensor)[tensor.index].copy_(held)
        for index in part.carried:
            layer.has_previous_state[index] = True

    # ---- places ------------------------------------------------------------------------------
    def _needed_from(self, component: str, end: int) -> int:
        """First token that a boundary at ``end`` or later needs of a component."""
        window = self._windows.get(component)
        return 0 if window is None else window_frontier(end, window, self._page)

    def _rows(self, part: TokenPart) -> torch.Tensor:
        """uint8 [num_slots, layer_bytes]."""
        return self._pool[part.component][part.row]

    def _state_row(self, part: StatePart, lease: Lease) -> torch.Tensor:
        """uint8 [layer_bytes]: this layer's part of the request's own state."""
        return self._pool[part.component][part.row, lease.state(part.component)]

    def _index(self, slots: Slots) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(slots, dtype=np.int64)).to(self._geometry.device)


def _joined(recorded: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(recorded) == 1:
        return recorded[0]
    return torch.cat([keys for keys, _ in recorded], dim=2), torch.cat(
        [values for _, values in recorded], dim=2
    )


def _rest(keys: torch.Tensor, values: torch.Tensor, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What follows the first ``count`` tokens, in memory of its own: a view would keep the whole chunk."""
    if keys.shape[2] == count:
        return []
    return [(keys[:, :, count:].clone(), values[:, :, count:].clone())]


def _to_bytes(tensor: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[1, heads, num_tokens, size]`` to uint8 ``[num_pages, page_size * heads * size * itemsize]``."""
    _, heads, count, size = tensor.shape
    by_token = tensor[0].transpose(0, 1).reshape(count // page_size, page_size * heads * size)
    return by_token.contiguous().view(torch.uint8)


def _from_bytes(rows: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The way back: a view ``[1, heads, num_tokens, size]``."""
    return rows.contiguous().view(dtype).view(-1, *shape).transpose(0, 1).unsqueeze(0)


def _states(layer: Any, tensor: StateTensor) -> Any:
    return layer.conv_states if tensor.is_conv else layer.recurrent_states


def _area(tensor: StateTensor) -> slice:
    return slice(tensor.offset, tensor.offset + tensor.num_bytes)
