"""The model of the published reference figures: full blocks, prompts only, one tier, no time.

A request is looked up whole, without keeping a token to compute; then all its blocks are stored; then
the policy trims from leaf tails, the running request's own blocks last. Only metadata moves: the real
tree core runs with one block as its token, so what is measured is its order, not a model of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hicache.errors import ConfigError
from hicache.policy.return_hazard import MAX_STOPS
from hicache.policy.session_order import SessionOrder, reused_turn
from hicache.policy.shadows import make_order
from hicache.radix.core import core_kind, make_core
from hicache.radix.interface import TreeConfig, TreeCore
from hicache.replay.bound import ClairvoyantBound
from hicache.replay.trace_tree import TraceTree
from hicache.replay.whole_leaves import whole_leaf_hits
from hicache.types import DEFAULT_TAIL_TOKENS, ComponentSpec, LeaseId, SessionId, Tier
from hicache.workload import Trace
from hicache.workload.tokens import BLOCK_TOKENS, prefix_hashes

FULL = "full"


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """One capacity. ``capacity_share`` is of the trace's distinct full prompt blocks."""

    policy: str
    core: str
    capacity_blocks: int
    capacity_share: float
    requests: int
    prompt_tokens: int
    hit_blocks: int
    infinite_hit_rate: float
    audit_errors: tuple[str, ...]
    wall_s: float
    bound_hit_blocks: int | None = None

    @property
    def bound_hit_rate(self) -> float | None:
        """What the clairvoyant bound hits at this capacity; None if that was not asked for."""
        if self.bound_hit_blocks is None:
            return None
        return BLOCK_TOKENS * self.bound_hit_blocks / self.prompt_tokens

    @property
    def token_hit_rate(self) -> float:
        return BLOCK_TOKENS * self.hit_blocks / self.prompt_tokens

    def as_json(self) -> Mapping[str, object]:
        """The object that ``--json`` writes; one tier, so all hits are the device's."""
        hit_tokens = BLOCK_TOKENS * self.hit_blocks
        return {
            "model": "reference",
            "policy": self.policy,
            "core": self.core,
            "capacity_blocks": self.capacity_blocks,
            "capacity_share": self.capacity_share,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": {"device": hit_tokens, "host": 0, "store": 0},
            "computed_tokens": self.prompt_tokens - hit_tokens,
            "token_hit_rate": self.token_hit_rate,
            "infinite_hit_rate": self.infinite_hit_rate,
            "bound_hit_rate": self.bound_hit_rate,
            "stamp_mismatches": 0,
            "audit_errors": len(self.audit_errors),
            "audit_findings": list(self.audit_errors),
            "wall_s": round(self.wall_s, 3),
        }


def block_sequences(trace: Trace) -> list[NDArray[np.int32]]:
    """Each prompt's full blocks as ids, equal exactly where the block and all before it are equal."""
    sequences: list[NDArray[np.int32]] = []
    known: dict[int, int] = {}
    for request in trace:
        if request.block_ids is not None:
            sequences.append(request.block_ids.astype(np.int32))
            continue
        tokens = request.prompt_tokens()
        whole = tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS]
        hashes = prefix_hashes(whole, BLOCK_TOKENS).tolist()
        ids = [known.setdefault(value, len(known)) for value in hashes]
        sequences.append(np.array(ids, dtype=np.int32))
    return sequences


def reference_replay(
    trace: Trace,
    capacity_blocks: int,
    *,
    policy: str = "lru",
    granularity: str = "page",
    core: str | None = None,
    sequences: Sequence[NDArray[np.int32]] | None = None,
    bound: ClairvoyantBound | None = None,
    ends: Collection[int] = (),
    stop: threading.Event | None = None,
) -> ReferenceResult:
    """Replay in the reference's model at one capacity.

    Args:
        capacity_blocks: slots of the single tier, at least 1.
        granularity: ``leaf`` frees whole leaves of the core's tree of the moment; for the published
            ``lru-leaf``, see ``whole_leaf_replay``.
        ends: with ``session`` or ``adaptive``, the requests after which the client says that the session is over.
        bound: ``ClairvoyantBound(sequences)``, to have its hits in the result, too.
        sequences: ``block_sequences(trace)``, to make them once for several capacities.
        stop: once set, the replay ends early; ``requests`` of the result says how far it came.
    """
    if capacity_blocks < 1:
        raise ConfigError([f"capacity: {capacity_blocks} blocks; expected at least 1"])
    began_s = time.monotonic()
    blocks = block_sequences(trace) if sequences is None else sequences
    # With sessions a request's own blocks compete with the rest, so all of them are stored first and the
    # tier is trimmed after; every other policy would take its own last anyway.
    order = make_order(policy, core_kind(core)[0], capacity_tokens=capacity_blocks, block_tokens=1)
    names: dict[object, SessionId] = {}
    stops: dict[str, int] = {}
    spare_blocks = 0 if order is None else max((len(ids) for ids in blocks), default=0)
    tree = make_core(
        TreeConfig(
            page_size=1,
            components=(ComponentSpec(FULL),),
            device_slots={FULL: capacity_blocks + spare_blocks},
            eviction=policy,
            granularity=granularity,
            tail_tokens=DEFAULT_TAIL_TOKENS // BLOCK_TOKENS,  # a block is the core's token here
        ),
        core,
    )
    hit_blocks = requests = 0
    for request, ids in zip(trace, blocks, strict=True):
        if stop is not None and stop.is_set():
            break
        if order is None:
            hit_blocks += _serve(tree, ids)
        else:
            name = names.setdefault(request.session or request.index, SessionId(len(names)))
            reason = stops.setdefault(request.stop, len(stops)) % MAX_STOPS
            is_last = request.index in ends
            hit_blocks += _serve_in_session(
                tree, order, name, reason, request.arrival_s, ids, is_last=is_last
            )
            tree.make_room(FULL, Tier.DEVICE, spare_blocks)
        requests += 1
    return ReferenceResult(
        policy=policy,
        core=core_kind(core)[0],
        capacity_blocks=capacity_blocks,
        capacity_share=capacity_blocks / trace.distinct_blocks,
        requests=requests,
        prompt_tokens=trace.prompt_tokens,
        hit_blocks=hit_blocks,
        infinite_hit_rate=trace.infinite_hit_rate,
        audit_errors=tuple(tree.audit()),
        wall_s=time.monotonic() - began_s,
        bound_hit_blocks=None if bound is None else bound.hit_blocks(capacity_blocks),
    )


def whole_leaf_replay(
    trace: Trace, capacity_blocks: int, tree: TraceTree, *, bound: ClairvoyantBound | None = None
) -> ReferenceResult:
    """LRU by whole leaves of the whole trace's tree: the published ``lru-leaf``. No core runs.

    Args:
        tree: ``TraceTree(block_sequences(trace))``, to make it once for several capacities.
    """
    if capacity_blocks < 1:
        raise ConfigError([f"capacity: {capacity_blocks} blocks; expected at least 1"])
    began_s = time.monotonic()
    hit_blocks = whole_leaf_hits(tree, capacity_blocks)
    return ReferenceResult(
        policy="lru-leaf",
        core="no",
        capacity_blocks=capacity_blocks,
        capacity_share=capacity_blocks / trace.distinct_blocks,
        requests=trace.num_requests,
        prompt_tokens=trace.prompt_tokens,
        hit_blocks=hit_blocks,
        infinite_hit_rate=trace.infinite_hit_rate,
        audit_errors=(),
        wall_s=time.monotonic() - began_s,
        bound_hit_blocks=None if bound is None else bound.hit_blocks(capacity_blocks),
    )


def _serve(tree: TreeCore, ids: NDArray[np.int32]) -> int:
    matched = tree.match(ids, cap=False)
    reused = matched.found.boundary
    stored = reused + _reserve(tree, matched.lease, len(ids) - reused)
    tree.release(matched.lease, ids[:stored])
    return reused


def told_ends(trace: Trace, every: int = 2) -> frozenset[int]:
    """The last requests of every second session (or every so many), in order of their first requests."""
    last: dict[str | None, int] = {}
    for request in trace:
        last[request.session] = request.index
    return frozenset(list(last.values())[::every])


def _serve_in_session(
    tree: TreeCore,
    order: SessionOrder,
    name: SessionId,
    stop: int,
    now_s: float,
    ids: NDArray[np.int32],
    *,
    is_last: bool,
) -> int:
    """Service takes no time, so the turn ends when it begins."""
    matched = tree.match(ids, cap=False, session=name)
    order.begin(name, reused_turn(matched), now_s, core=tree)
    reused = matched.found.boundary
    stored = reused + _reserve(tree, matched.lease, len(ids) - reused)
    tree.release(matched.lease, ids[:stored])
    order.end(name, matched.lease, stop, now_s)
    order.watch(name, ids, len(ids), 0)
    if is_last:
        order.close(name)
    order.tell(tree, now_s)
    return reused


def _reserve(tree: TreeCore, lease: LeaseId, wanted: int) -> int:
    """Slots for as many of ``wanted`` blocks as the pool can give; the tail is what is left out."""
    if not tree.reserve(lease, wanted).short:
        return wanted
    _, free = tree.free_slots(FULL, Tier.DEVICE)
    tree.reserve(lease, free)
    return free
