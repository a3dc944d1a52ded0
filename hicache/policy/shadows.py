"""Which policy does best lately: a few of them serve a sample of the sessions, on metadata alone.

A *shadow* is what one order would hold, and stores no byte. All see the same requests, those of sessions whose
number hashes low enough, and have the cache's capacity scaled by the same share. A block of tokens stands in
them as one number, made of a few of its tokens and of all blocks before it. So they cost a bounded amount of
memory whatever the cache holds, and a small share of a turn. What turns are worth by sessions they are told by
the order that rates the cache's own.

``rust/hicache-radix/src/shadows.rs`` is the same for the Rust core, to the number.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hicache.policy.session_order import Followed, SessionOrder, make_session_order
from hicache.policy.shadow_tree import ShadowTree
from hicache.radix.core import EXTENSION
from hicache.radix.interface import Tokens
from hicache.radix.turns import POPULAR_GRACE, SHARED_GRACE
from hicache.types import LeaseId, SessionId

SHADOW_BLOCKS = 2048
"""A shadow holds so many at most; a larger cache's sessions are sampled."""
BLOCK_TOKENS = 64
"""Tokens a block, but never less than a page."""
LOOKS = 4
"""Of a block's tokens, how many are looked at, from its beginning."""
BATCH_SESSIONS = 3
"""A batch is requests in a row of so many sessions, for chance moves those of one session together,"""
BATCH = 8
"""or so many requests. What orders gain is judged batch by batch."""
DECAY = 0.9986146661010289
"""Of what is known, for each request: half of it is from the last 500."""
MARGIN = 0.01
"""So much of all blocks looked up lately must another policy have gained to be followed instead."""
SIGMAS = 2.0
"""And so many standard deviations of what chance makes of that,"""
SIGMAS_BACK = 1.5
"""or so many if that leads away from another policy than the first, which alone knows sessions."""
GRACES = {
    Followed.SESSION: None,
    Followed.RECENCY: 0,
    Followed.SHARED: SHARED_GRACE,
    Followed.POPULAR: POPULAR_GRACE,
}
"""By order: None by the worth of turns, else by recency with so much grace for what is shared."""
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def block_tokens_of(page_size: int) -> int:
    """Tokens a block of the shadows of a cache with such pages: whole pages."""
    return max(1, BLOCK_TOKENS // page_size) * page_size


def fingerprints(tokens: Tokens, block_tokens: int, seed: int) -> NDArray[np.int32]:
    """One number for each whole block, equal where a block's looked-at tokens and all before it are equal.

    What differs elsewhere alone is taken for equal, which a shadow may: it has no bytes to get wrong.
    """
    num_blocks = len(tokens) // block_tokens
    looks = tokens[: num_blocks * block_tokens].reshape(num_blocks, block_tokens)[:, :LOOKS]
    mixed = np.zeros(num_blocks, dtype=np.uint64)
    for look in looks.T.astype(np.uint64):
        mixed = (mixed << np.uint64(16) | mixed >> np.uint64(48)) ^ look
    chain = seed
    prints = np.empty(num_blocks, dtype=np.int32)
    for at, block in enumerate(mixed.tolist()):
        chain = ((chain ^ block) * _GOLDEN) & _WORD
        chain ^= chain >> 29
        prints[at] = chain >> 33
    return prints


class Shadows:
    """All shadows of one cache, and which policy is to be followed.

    Args:
        capacity_tokens: what L1 and L2 hold together.
        block_tokens: tokens a block.

    Attributes:
        hits: blocks of prompts that each order has hit so far, in the order of ``Followed``.
    """

    hits: tuple[int, ...]

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        blocks = max(1, capacity_tokens // block_tokens)
        self._capacity = min(blocks, SHADOW_BLOCKS)
        self._hash_limit = 2**32 * self._capacity // blocks
        self._tree = ShadowTree([GRACES[order] for order in Followed], self._capacity)
        self._restart()
        self.hits = (0,) * len(Followed)
        self._hits = [0] * len(Followed)  # of the batch that is being filled
        self._batch_len = 0
        self._batch_sessions: set[SessionId] = set()
        self._looked_up = 0.0
        self._best = 0

    def _restart(self) -> None:
        # What each has gained on the one that is followed since it was last not ahead; the squares, batch by batch.
        self._gains = [0.0] * len(Followed)
        self._squares = [0.0] * len(Followed)

    def samples(self, name: SessionId) -> bool:
        """Whether the session is of the sample."""
        return _mixed(name) < self._hash_limit

    def rate(self, lease: LeaseId, worth: int) -> None:
        """A turn is worth so much by sessions from now on; one of which no shadow has anything is none of theirs."""
        self._tree.rate(lease, worth)

    def watch(
        self, name: SessionId, lease: LeaseId | None, worth: int, tokens: Tokens, prompt_len: int, seed: int
    ) -> Followed:
        """Have a request of the sample served by all; returns the policy that does best."""
        blocks = fingerprints(tokens, self._block_tokens, seed)[: self._capacity].tolist()
        num_prompt = min(len(blocks), prompt_len // self._block_tokens)
        hits = self._tree.serve(name, lease, worth, blocks, num_prompt)
        self._hits = [before + now for before, now in zip(self._hits, hits, strict=True)]
        self.hits = tuple(before + now for before, now in zip(self.hits, hits, strict=True))
        self._looked_up = self._looked_up * DECAY + num_prompt
        self._squares = [square * DECAY for square in self._squares]
        self._batch_len += 1
        self._batch_sessions.add(name)
        if self._batch_len == BATCH or len(self._batch_sessions) == BATCH_SESSIONS:
            self._count_batch()
            self._judge()
        return tuple(Followed)[self._best]

    def _count_batch(self) -> None:
        for i, hits in enumerate(self._hits):
            gain = float(hits - self._hits[self._best])
            self._gains[i] = max(0.0, self._gains[i] + gain)
            self._squares[i] += gain * gain
        self._hits = [0] * len(Followed)
        self._batch_len = 0
        self._batch_sessions.clear()

    def _judge(self) -> None:
        """Follow the one that gained most if that is more than chance explains, and enough to matter.

        What was lost before is left out (Page's test), so a load that changes is noticed at once.
        """
        best = max(range(len(self._gains)), key=lambda i: (self._gains[i], -i))
        gain = self._gains[best]
        if gain <= MARGIN * self._looked_up:
            return
        sigmas = SIGMAS if self._best == 0 else SIGMAS_BACK
        if gain * gain > sigmas * sigmas * self._squares[best]:
            self._best = best
            self._restart()


def _mixed(name: SessionId) -> int:
    """32 bits that look as if drawn by chance (the end of splitmix64)."""
    mixed = ((name + 1) * _GOLDEN) & _WORD
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _WORD
    return (mixed ^ mixed >> 31) >> 32


def make_order(eviction: str, core: str, *, capacity_tokens: int, block_tokens: int) -> SessionOrder | None:
    """What rates turns for the eviction policy, beside a tree core ``rust`` or ``python``; None: nothing does."""
    if eviction == "session":
        return make_session_order(core)
    if eviction != "adaptive":
        return None
    if core == "python":
        return SessionOrder(Shadows(capacity_tokens, block_tokens))
    return cast(SessionOrder, import_module(EXTENSION).RustSessionOrder(capacity_tokens, block_tokens))
