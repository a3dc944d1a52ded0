"""What ``session`` and ``adaptive`` cost a turn, against ``lru``, in one run: whole turns on the bare tree core.

    python benchmarks/session_cost.py [--core rust] [--sessions 8] [--sessions 64] [--repeat 5]

The shapes are W1's (2,000 shared tokens, some 500 new ones a turn, a one-shot request beside each turn,
eviction from half-way) and one of short prompts. A turn is match, reserve, insert, release, the room that
it needs, and with sessions all calls on the order. Turns 176 to 200 count. Policies alternate, the best
pass of each counts: the machine is never quiet.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hicache.policy.session_order import reused_turn
from hicache.policy.shadows import block_tokens_of, make_order
from hicache.radix.core import make_core
from hicache.radix.interface import TreeConfig
from hicache.types import ComponentSpec, SessionId

MEASURED_TURNS = 25
POLICIES = ("lru", "session", "adaptive")


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens."""

    name: str
    turns: int
    shared: int
    new: int
    answer: int
    one_shot: int
    step_s: float  # between two requests


SHAPES = (
    Shape("W1", turns=200, shared=2000, new=300, answer=200, one_shot=560, step_s=0.5),
    Shape("short", turns=200, shared=64, new=16, answer=16, one_shot=32, step_s=0.5),
)


class Server:
    """Serves turns on one core, and says how long each took, in microseconds."""

    def __init__(self, shape: Shape, sessions: int, policy: str, core: str) -> None:
        per_turn = shape.new + shape.answer + shape.one_shot
        slots = shape.shared + int(0.6 * sessions * shape.turns * per_turn) + 8 * per_turn
        config = TreeConfig(1, (ComponentSpec("full"),), {"full": slots}, eviction=policy)
        self.core = make_core(config, core)
        self.order = make_order(policy, core, capacity_tokens=slots, block_tokens=block_tokens_of(1))
        self.now_s = 0.0

    def serve(self, prompt: NDArray[np.int32], tokens: NDArray[np.int32], name: SessionId) -> float:
        core, order = self.core, self.order
        begin_ns = time.perf_counter_ns()
        if order is None:
            matched = core.match(prompt)
        else:
            order.tell(core, self.now_s)
            matched = core.match(prompt, session=name)
            order.begin(name, reused_turn(matched), self.now_s)
        lease = matched.lease
        core.reserve(lease, len(prompt) - matched.found.boundary)
        core.insert(lease, prompt, verified_len=len(prompt))
        core.reserve(lease, len(tokens) - len(prompt))
        core.release(lease, tokens, verified_len=len(prompt))
        if order is not None:
            order.end(name, lease, 0, self.now_s)
            order.watch(name, tokens, len(prompt), 0, 0, self.now_s)
            order.tell(core, self.now_s)
        return (time.perf_counter_ns() - begin_ns) / 1000


def run(shape: Shape, sessions: int, policy: str, core: str) -> float:
    """Median of the last turns, in microseconds."""
    server = Server(shape, sessions, policy, core)
    rng = np.random.default_rng(7)

    def draw(count: int) -> NDArray[np.int32]:
        return rng.integers(0, 128_000, count, dtype=np.int32)

    shared = draw(shape.shared)
    history = [shared] * sessions
    took_us = []
    inferred = -2
    gc.collect()
    gc.disable()
    for turn in range(shape.turns):
        for session in rng.permutation(sessions):
            server.now_s += shape.step_s
            prompt = np.concatenate([history[session], draw(shape.new)])
            tokens = np.concatenate([prompt, draw(shape.answer)])
            took = server.serve(prompt, tokens, SessionId(int(session)))
            if turn >= shape.turns - MEASURED_TURNS:
                took_us.append(took)
            history[session] = tokens
            other = np.concatenate([shared, draw(shape.one_shot)])
            server.serve(other, other, SessionId(inferred))
            inferred -= 1
    gc.enable()
    assert server.core.audit() == []
    return statistics.median(took_us)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--core", default="rust")
    parser.add_argument("--sessions", type=int, action="append")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    for shape in SHAPES:
        for sessions in arguments.sessions or [8, 64]:
            best = dict.fromkeys(POLICIES, float("inf"))
            for _ in range(arguments.repeat):
                for policy in POLICIES:
                    best[policy] = min(best[policy], run(shape, sessions, policy, arguments.core))
            figures = ", ".join(
                f"{policy} {took_us:.1f} us ({took_us / best['lru']:.2f})" for policy, took_us in best.items()
            )
            print(f"{shape.name}, {sessions} sessions: {figures}", flush=True)


if __name__ == "__main__":
    main()
