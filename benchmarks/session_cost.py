"""What ``session`` and ``adaptive`` cost a turn, against ``lru``: whole turns on the bare tree core.

    python benchmarks/session_cost.py [--core rust] [--sessions 8] [--sessions 64] [--page-size 64] [--repeat 5]

The shapes are W1's (2,000 shared tokens, some 500 new ones a turn, a one-shot request beside each turn,
eviction from half-way) and one of short prompts. A turn is what it is in the design's targets: match, reserve,
slots, insert, release, the room that it needs, and with sessions all calls on the order. In brackets it is without
the slots, which are copied out once a turn and cost every policy the same. Time passes before every
request alike. Turns 176 to 200 count.

The machine is never quiet, and its neighbours slow whole seconds. So the policies serve in lock-step: each turn by one
after the other, another one first each time. The load is the same in each pass, so of a turn the fastest
of all passes counts; what is given is the median of these, and the mean, and their ratios.
"""

from __future__ import annotations

import argparse
import gc
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
    Shape("W1", turns=200, shared=2000, new=300, answer=200, one_shot=560, step_s=0.25),
    Shape("short", turns=200, shared=64, new=16, answer=16, one_shot=32, step_s=0.25),
)


class Server:
    """Serves turns on one core, and says how long each took, in microseconds."""

    def __init__(self, shape: Shape, sessions: int, policy: str, core: str, page_size: int) -> None:
        per_turn = shape.new + shape.answer + shape.one_shot
        tokens = shape.shared + int(0.6 * sessions * shape.turns * per_turn) + 8 * per_turn
        slots = {"full": tokens // page_size}
        self.core = make_core(TreeConfig(page_size, (ComponentSpec("full"),), slots, eviction=policy), core)
        block_tokens = block_tokens_of(page_size)
        self.order = make_order(policy, core, capacity_tokens=tokens, block_tokens=block_tokens)
        self.now_s = 0.0

    def serve(
        self, prompt: NDArray[np.int32], tokens: NDArray[np.int32], name: SessionId
    ) -> tuple[float, float]:
        """The whole turn, and its slots alone."""
        core, order = self.core, self.order
        begin_ns = time.perf_counter_ns()
        if order is None:
            matched = core.match(prompt)
        else:
            matched = core.match(prompt, session=name)
            order.begin(name, reused_turn(matched), self.now_s, core=core)
        lease = matched.lease
        core.reserve(lease, len(prompt) - matched.found.boundary)
        slots_ns = time.perf_counter_ns()
        core.lease_slots(lease, "full")
        slots_ns = time.perf_counter_ns() - slots_ns
        core.insert(lease, prompt, verified_len=len(prompt))
        core.reserve(lease, len(tokens) - len(prompt))
        core.release(lease, tokens, verified_len=len(prompt))
        if order is not None:
            order.end(name, lease, 0, self.now_s, core)
            order.watch(name, tokens, len(prompt), 0)
        return (time.perf_counter_ns() - begin_ns) / 1000, slots_ns / 1000


def run(shape: Shape, sessions: int, core: str, page_size: int) -> NDArray[np.float64]:
    """What the last turns took, whole and without the slots, in microseconds [turn, policy, 2]."""
    servers = [Server(shape, sessions, policy, core, page_size) for policy in POLICIES]
    rng = np.random.default_rng(7)

    def draw(count: int) -> NDArray[np.int32]:
        return rng.integers(0, 128_000, count, dtype=np.int32)

    def serve(prompt: NDArray[np.int32], tokens: NDArray[np.int32], name: SessionId) -> NDArray[np.float64]:
        took_us = np.empty((len(servers), 2))
        for i in range(len(servers)):
            at = (num_served + i) % len(servers)
            servers[at].now_s += shape.step_s
            whole, slots = servers[at].serve(prompt, tokens, name)
            took_us[at] = whole, whole - slots
        return took_us

    shared = draw(shape.shared)
    history = [shared] * sessions
    took_us = []
    inferred = -2
    num_served = 0
    gc.collect()
    gc.disable()
    for turn in range(shape.turns):
        for session in rng.permutation(sessions):
            prompt = np.concatenate([history[session], draw(shape.new)])
            tokens = np.concatenate([prompt, draw(shape.answer)])
            took = serve(prompt, tokens, SessionId(int(session)))
            if turn >= shape.turns - MEASURED_TURNS:
                took_us.append(took)
            history[session] = tokens
            other = np.concatenate([shared, draw(shape.one_shot)])
            serve(other, other, SessionId(inferred))
            inferred -= 1
            num_served += 1
    gc.enable()
    for server in servers:
        assert server.core.audit() == []
    return np.array(took_us)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--core", default="rust")
    parser.add_argument("--sessions", type=int, action="append")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    for shape in SHAPES:
        for sessions in arguments.sessions or [8, 64]:
            passes = [
                run(shape, sessions, arguments.core, arguments.page_size) for _ in range(arguments.repeat)
            ]
            took_us = np.minimum.reduce(passes)
            print(f"{shape.name}, {sessions} sessions, pages of {arguments.page_size}")
            for what, values in (("median", np.median(took_us, axis=0)), ("mean", np.mean(took_us, axis=0))):
                figures = (
                    f"{policy} {whole:.1f} us, {whole / values[0, 0]:.3f} x ({part:.1f}, {part / values[0, 1]:.3f} x)"
                    for policy, (whole, part) in zip(POLICIES, values, strict=True)
                )
                print(f"    {what}: {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
