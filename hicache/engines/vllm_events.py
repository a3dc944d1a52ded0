"""Where HiCache's pages are, told as vLLM's KV events, so that they go out with vLLM's own.

::

    tier device, host   ->  medium CPU       both are host memory: stored when a page comes to the first of the
                                             two, removed when it has left the last
    tier store          ->  medium STORAGE

A block's hash is its page key, another than vLLM's own for the same tokens: readers that place prompts follow
``token_ids`` and ``parent_block_hash``. One event for each of vLLM's groups that a component stands for.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hicache.engines.vllm_geometry import Component, Geometry
from hicache.events import ResidencyChange, ResidencyEvent
from hicache.types import Namespace, PageKey, ReuseRule, Tier

_KIND = {
    ReuseRule.PATH: "full_attention",
    ReuseRule.WINDOW: "sliding_window",
    ReuseRule.CHECKPOINT: "mamba",
}
_BIT = {Tier.DEVICE: 1, Tier.HOST: 2, Tier.STORE: 4}
_MEMORY = _BIT[Tier.DEVICE] | _BIT[Tier.HOST]


class TierEvents:
    """Turns residency into vLLM's events.

    Pages of prompts with pictures are left out: their keys do not say at which token a picture stands, so no reader
    could place them. The memory is one entry for each page that is anywhere.

    Args:
        geometry: of the model.
        vllm: ``vllm.distributed.kv_events``.

    *Thread*: ``listen`` with the cache's lock held; ``take`` the scheduler's.
    """

    def __init__(self, geometry: Geometry, vllm: ModuleType) -> None:
        self._components = {component.name: component for component in geometry.components}
        self._page_size = geometry.page_size
        self._vllm = vllm
        self._tiers: dict[tuple[str, PageKey], int] = {}
        """Bits of the tiers that have a page."""
        self._waiting: deque[ResidencyEvent] = deque()

    def listen(self, events: Sequence[ResidencyEvent]) -> None:
        """Keep what has changed until the next step."""
        self._waiting.extend(events)

    def take(self) -> Iterator[Any]:  # Any: classes that exist only where vLLM does
        """What has changed since the last call, in order."""
        while self._waiting:
            event = self._waiting.popleft()
            component = self._components[event.component]
            if event.change is ResidencyChange.REMOVED:
                yield from self._removed(event, component)
            elif not _has_pictures(event.namespace):
                yield from self._stored(event, component)

    def _stored(self, event: ResidencyEvent, component: Component) -> Iterator[Any]:
        """One event for each run of pages that are new to the medium."""
        bit, medium = _BIT[event.tier], _medium(event.tier)
        tokens = np.frombuffer(event.tokens, dtype="<i4").tolist()
        parent, run, begin = event.parent, list[PageKey](), 0
        for page, key in enumerate(event.keys):
            before = self._tiers.get((event.component, key), 0)
            self._tiers[event.component, key] = before | bit
            if before & _siblings(bit):
                yield from self._run(
                    event, component, medium, run, tokens[begin : page * self._page_size], parent
                )
                parent, run, begin = key, [], (page + 1) * self._page_size
            else:
                run.append(key)
        yield from self._run(event, component, medium, run, tokens[begin:], parent)

    def _run(
        self,
        event: ResidencyEvent,
        component: Component,
        medium: str,
        keys: list[PageKey],
        tokens: list[int],
        parent: PageKey | None,
    ) -> Iterator[Any]:
        if not keys:
            return
        namespace = event.namespace
        lora = None if namespace.lora is None else str(json.loads(namespace.lora)[0])
        for group in component.groups:
            yield self._vllm.BlockStored(
                block_hashes=keys,
                parent_block_hash=parent,
                token_ids=tokens,
                block_size=self._page_size,
                lora_id=None,
                medium=medium,
                lora_name=lora,
                extra_keys=_extra_keys(lora, namespace.salt if parent is None else None, len(keys)),
                group_idx=group.index,
                kv_cache_spec_kind=_KIND[component.rule],
                kv_cache_spec_sliding_window=component.window_tokens or None,
            )

    def _removed(self, event: ResidencyEvent, component: Component) -> Iterator[Any]:
        bit = _BIT[event.tier]
        gone: list[PageKey] = []
        for key in event.keys:
            left = self._tiers.pop((event.component, key), 0)
            if not left & bit:
                continue  # of a prompt with pictures
            if left & ~bit:
                self._tiers[event.component, key] = left & ~bit
            if not left & _siblings(bit) & ~bit:
                gone.append(key)
        for group in component.groups if gone else ():
            yield self._vllm.BlockRemoved(
                block_hashes=gone, medium=_medium(event.tier), group_idx=group.index
            )


def _siblings(bit: int) -> int:
    """The tiers of the same medium."""
    return _MEMORY if bit & _MEMORY else bit


def _medium(tier: Tier) -> str:
    """As ``MEDIUM_CPU`` and ``MEDIUM_STORAGE`` of vLLM have it."""
    return "STORAGE" if tier is Tier.STORE else "CPU"


def _has_pictures(namespace: Namespace) -> bool:
    return namespace.extra is not None and bool(json.loads(namespace.extra)[1])


def _extra_keys(lora: str | None, salt: str | None, num_pages: int) -> list[tuple[str, ...] | None] | None:
    """What else went into vLLM's own hash of each block: the adapter in all, the salt in a prompt's first."""
    if lora is None and salt is None:
        return None
    each = () if lora is None else (lora,)
    first = each if salt is None else (*each, salt)
    return [first, *[each or None] * (num_pages - 1)]
