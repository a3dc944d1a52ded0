"""Policy against policy against the clairvoyant bound, in the reference's model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.replay.bound import ClairvoyantBound
from hicache.replay.capacity import parse_capacity
from hicache.replay.reference import block_sequences, reference_replay
from hicache.workload import Trace

POLICIES = ("adaptive", "lru", "lfu", "slru", "session")
CAPACITIES = ("1%", "2%", "5%", "10%", "20%", "50%")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Token hit rates over capacities.

    Args:
        capacities: as shares of the trace's distinct blocks, in words.
        blocks: the same in blocks of 512 tokens.
        rates: by policy, one rate a capacity.
        bound: what a clairvoyant policy would hit.
        infinite: what a cache without limits would hit.
    """

    capacities: tuple[str, ...]
    blocks: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    bound: tuple[float, ...]
    infinite: float


def compare(
    trace: Trace,
    *,
    policies: Sequence[str] = POLICIES,
    capacities: Sequence[str] = CAPACITIES,
    on_step: Callable[[int, int], None] | None = None,
    stop: threading.Event | None = None,
) -> Comparison | None:
    """Replay the trace's blocks once for each policy and capacity.

    Args:
        on_step: called with how many replays are done, of how many.

    Returns:
        None if there is nothing to compare (no whole block), or it was stopped.
    """
    fitting = [(word, parse_capacity(word).in_blocks(trace)) for word in capacities]
    fitting = [(word, blocks) for word, blocks in fitting if blocks]
    if not fitting:
        return None
    sequences = block_sequences(trace)
    bound = ClairvoyantBound(sequences)
    rates: dict[str, tuple[float, ...]] = {}
    bounds: tuple[float, ...] = ()
    done, total = 0, len(policies) * len(fitting)
    for policy in dict.fromkeys(policies):
        row = []
        for _, blocks in fitting:
            result = reference_replay(
                trace, blocks, policy=policy, sequences=sequences, bound=bound, stop=stop
            )
            if result.requests < trace.num_requests:
                return None
            row.append(result)
            done += 1
            if on_step is not None:
                on_step(done, total)
        rates[policy] = tuple(result.token_hit_rate for result in row)
        bounds = tuple(result.bound_hit_rate or 0.0 for result in row)
    words, blocks_each = zip(*fitting, strict=True)
    return Comparison(tuple(words), tuple(blocks_each), rates, bounds, trace.infinite_hit_rate)
