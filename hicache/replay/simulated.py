"""An engine without a model: it writes stamps where attention would write, and checks what it reuses.

It does what a real engine does with a lease, in the same order: match, load, prefill in chunks with a
pause wherever the lease asks for a checkpoint, decode, release.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hicache.cache import HiCache
from hicache.config.sizing import chunk_pages
from hicache.errors import CapacityError
from hicache.explain import Explanation
from hicache.lease import Lease
from hicache.radix.rules.window import window_frontier
from hicache.replay.stamps import POISON, Stamps
from hicache.types import DEFAULT_NAMESPACE, NO_SLOT, Namespace, ReuseRule, TierTokens

DEFAULT_CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Served:
    """What one request got.

    Args:
        prompt_tokens: its length.
        source: reused prompt tokens by tier.
        by_component: reused payload per component, in tokens, by tier.
        blocked_tokens: path payload that was there but could not be used, for lack of a state or window.
        shortened_tokens: promised by the match, lost to a failed or late transfer.
        pages_checked, mismatches: pages and states compared, and how many were wrong.
        explanation: why no more was reused, if the cache keeps that.
        unkept_tokens: tokens the pool refused slots for, so that they were not computed here or kept.
    """

    prompt_tokens: int
    source: TierTokens
    by_component: dict[str, TierTokens] = field(default_factory=dict)
    blocked_tokens: int = 0
    shortened_tokens: int = 0
    pages_checked: int = 0
    mismatches: int = 0
    unkept_tokens: int = 0
    explanation: Explanation | None = None


class SimulatedEngine:
    """Serves requests on a cache, one at a time.

    Args:
        cache: whose payload it writes and checks.
        chunk_tokens: prefill chunk, in tokens; rounded down to pages, fewer where L1 is small (``chunk_pages``).
        by_layer: load layer by layer, and wait for each as a model would.
    """

    def __init__(
        self, cache: HiCache, *, chunk_tokens: int = DEFAULT_CHUNK_TOKENS, by_layer: bool = False
    ) -> None:
        self._by_layer = by_layer
        self._cache = cache
        self._page = cache.page_size
        self._chunk = chunk_pages(cache.config, chunk_tokens) * self._page
        self._specs = cache.config.model.specs()

    def serve(
        self,
        prompt: NDArray[np.int32],
        answer: NDArray[np.int32],
        *,
        session: str | None = None,
        stop: str = "",
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> Served:
        """Run one request; the answer's last token is sampled but never fed back, so it has no payload.

        Args:
            prompt: int32 [num_tokens], at least one.
            answer: int32 [num_tokens], may be empty.
        """
        stamps = Stamps(self._cache.identity, self._specs, self._page, namespace)
        stamps.extend(prompt)
        with self._cache.match(prompt, session=session, namespace=namespace) as lease:
            promised = lease.reused
            reused = self._load(lease)
            checked, wrong = self._check(lease, stamps, reused)
            blocked = max(0, (lease.checkpoint_hint or 0) - promised)
            source, by_component = lease.source, dict(lease.by_component)
            tokens = np.concatenate([prompt, answer]) if len(answer) else prompt
            stamps.extend(tokens)
            written = len(tokens) - 1 if len(answer) else len(tokens)
            done = self._compute(lease, stamps, tokens, len(prompt), written)
            explanation = lease.explain() if self._cache.config.explain.enabled else None
            lease.release(tokens, written=done, stop=stop)
        return Served(
            len(prompt),
            source,
            by_component,
            blocked,
            promised - reused,
            checked,
            wrong,
            written - done,
            explanation,
        )

    def _load(self, lease: Lease) -> int:
        if not self._by_layer:
            return lease.load()
        lease.load_by_layer()
        for layer in range(max(spec.num_layers for spec in self._specs)):
            lease.wait_layer(layer)
        return lease.reused

    def _compute(
        self, lease: Lease, stamps: Stamps, tokens: NDArray[np.int32], prompt_len: int, written: int
    ) -> int:
        """Prefill and decode, pausing where something is published; the length that was computed."""
        marks = {*lease.checkpoints, prompt_len}
        if self._cache.is_hybrid:
            marks.add(written // self._page * self._page)  # the last state the next turn can use
        chunks = range(lease.reused + self._chunk, prompt_len, self._chunk)
        position = lease.reused
        for pause in sorted({*marks, *chunks, written}):
            if pause <= position:
                continue
            try:
                lease.reserve(pause - position)
            except CapacityError:
                return position
            self._write(lease, stamps, position, pause)
            if pause < written:
                lease.checkpoint(pause, tokens, mark=pause in marks)
            position = pause
        return position

    def _write(self, lease: Lease, stamps: Stamps, begin: int, end: int) -> None:
        """Payload of the pages that [begin, end) completes, and the state after ``end`` tokens."""
        device = self._cache.device
        first, last = begin // self._page, end // self._page
        for spec in self._specs:
            if spec.is_checkpoint:
                slot = np.array([lease.state(spec.name)], dtype=np.int64)
                if end % self._page:
                    payload = np.full((1, spec.state_bytes), POISON, dtype=np.uint8)
                else:
                    payload = stamps.state(spec.name, end)
                device.write_many(spec.name, slot, payload)
            elif last > first:
                slots = lease.slots(spec.name)[first:last]
                device.write_many(spec.name, slots, stamps.pages(spec.name, first, last))

    def _check(self, lease: Lease, stamps: Stamps, reused: int) -> tuple[int, int]:
        """Compare everything the lease lets the engine reuse; (compared, wrong)."""
        device = self._cache.device
        checked = wrong = 0
        if not reused:
            return 0, 0
        last = reused // self._page
        for spec in self._specs:
            if spec.is_checkpoint:
                slots = np.array([lease.state(spec.name)], dtype=np.int64)
                expected = stamps.state(spec.name, reused)
            elif spec.rule in (ReuseRule.PATH, ReuseRule.WINDOW):
                first = 0
                if spec.rule == ReuseRule.WINDOW:
                    first = window_frontier(reused, spec.window_tokens, self._page) // self._page
                slots = lease.slots(spec.name)[first:last]
                expected = stamps.pages(spec.name, first, last)
            else:  # a rule of the user's own: what it keeps
                slots = lease.slots(spec.name)[:last]
                is_kept = slots != NO_SLOT
                slots, expected = slots[is_kept], stamps.pages(spec.name, 0, last)[is_kept]
            got = device.read_many(spec.name, slots)
            checked += len(slots)
            wrong += int((got != expected).any(axis=1).sum())
        return checked, wrong
