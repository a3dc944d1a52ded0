"""Hit rates of hybrid models over sizes and splits: the real tree core on a trace's pages, metadata alone.

    python benchmarks/hybrid_pools.py [TRACE ...] [--page-size 512] [--models full+mamba=2 ...] [--sizes 0.05 ...]
        [--shares shared fixed 0.05 ...] [--host 0.05] [--policy adaptive] [--requests N]

A page is one token of the core, requests do what the verified replay's engine does (marks at the last page of prompt
and answer, at forks, and spare ones; prefill by chunks), and copies take no time: within some tenths of a point of
``hicache replay``, in a fiftieth of its time. Costs are in blocks of 512 tokens of path payload, as in ``hicache
replay --components``; sizes are shares of the trace's distinct pages. L1 is one budget (``shared``), is split by what
conversations cost (``fixed``), or has that share for all marks together. With ``--host`` L2 is one budget of that
size. TRACE may be ``chats``, 600 synthetic short ones.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hicache.config.marks import keeps_marks, mark_bytes, spacing_of
from hicache.config.sizing import needed_slots, pool_problems, share_out, share_units
from hicache.config.tiers import PoolConfig
from hicache.policy.return_hazard import MAX_STOPS
from hicache.policy.session_order import reused_turn
from hicache.policy.shadows import make_order
from hicache.policy.watermarks import Watermark
from hicache.radix.actions import Action, Copy
from hicache.radix.core import core_kind, make_core
from hicache.radix.interface import TreeConfig
from hicache.replay.components import UNITS, HybridComponents, parse_components
from hicache.types import ComponentSpec, LeaseId, SessionId, Tier
from hicache.workload import Request, read_trace
from hicache.workload.synthetic import SessionSource
from hicache.workload.tokens import BLOCK_TOKENS, prefix_hashes

TRACE = Path(__file__).resolve().parents[1] / "traces" / "cc_agentic_small.jsonl.zst"
TOKEN_BYTES = 64
CHUNK_TOKENS = 8192
WATERMARK = Watermark(0.02, 0.05)


@dataclass(frozen=True, slots=True)
class PagedRequest:
    """Pages by number, equal where they and all before them are equal: int32 [pages of prompt and answer]."""

    ids: NDArray[np.int32]
    last: int  # pages of the prompt that may be reused: a token is always computed
    session: SessionId
    stop: int
    arrival_s: float


@dataclass(frozen=True, slots=True)
class PagedTrace:
    """Of a trace, or of a synthetic load."""

    requests: Sequence[PagedRequest]
    page_size: int
    prompt_tokens: int

    @property
    def footprint_pages(self) -> int:
        """Distinct pages of prompts."""
        return len({page for request in self.requests for page in request.ids[: request.last].tolist()})


def paged(requests: Iterable[Request], page_size: int) -> PagedTrace:
    """Requests as pages."""
    known: dict[int, int] = {}
    names: dict[object, int] = {}
    stops: dict[str, int] = {}
    pages, prompt_tokens = [], 0
    for request in requests:
        prompt, answer = request.prompt_tokens(), request.answer_tokens()
        prompt_tokens += len(prompt)
        hashes = prefix_hashes(np.concatenate([prompt, answer[:-1]]), page_size).tolist()
        pages.append(
            PagedRequest(
                np.array([known.setdefault(value, len(known)) for value in hashes], dtype=np.int32),
                (len(prompt) - 1) // page_size,
                SessionId(names.setdefault(request.session or request.index, len(names))),
                stops.setdefault(request.stop, len(stops)) % MAX_STOPS,
                request.arrival_s,
            )
        )
    return PagedTrace(pages, page_size, prompt_tokens)


def chats(num_sessions: int, *, at_once: int, seed: int = 0) -> Iterator[Request]:
    """Short chats: 3 to 15 turns of some 100 tokens and answers of some 200, so many at once, none shared."""
    rng = random.Random(seed)
    running: list[tuple[float, int, int, int, int]] = []  # due, session, turn, turns, length so far
    now, begun, index = 0.0, 0, 0
    while begun < num_sessions or running:
        while begun < num_sessions and len(running) < at_once:
            begun += 1
            heapq.heappush(running, (now + rng.expovariate(1 / 30), begun, 1, rng.randint(3, 15), 0))
        now, session, turn, turns, length = heapq.heappop(running)
        end = length + 20 + int(rng.expovariate(1 / 100))
        answer = end + 20 + int(rng.expovariate(1 / 200))
        yield Request(
            index,
            now,
            SessionSource(0, session, 0, end, seed),
            SessionSource(0, session, end, answer, seed),
            session=f"chat-{session}",
            turn=turn,
        )
        index += 1
        if turn < turns:
            heapq.heappush(running, (now + rng.expovariate(1 / 60), session, turn + 1, turns, answer))


def model_specs(components: HybridComponents) -> tuple[ComponentSpec, ...]:
    """The model in tokens, as a configuration has it: costs are in blocks of 512 tokens of path payload."""
    specs = [ComponentSpec("full", "path", 0, 1, TOKEN_BYTES)]
    if components.state_units:
        state_bytes = components.state_units * TOKEN_BYTES * BLOCK_TOKENS // UNITS
        specs.append(ComponentSpec("mamba", "checkpoint", 0, 1, 0, state_bytes))
    for i, window in enumerate(components.windows):
        units = window.units * TOKEN_BYTES // UNITS
        specs.append(ComponentSpec(f"swa{i or ''}", "window", window.blocks * BLOCK_TOKENS, 1, units))
    return tuple(specs)


@dataclass(slots=True)
class Pools:
    """Slots of L1 and of L2, each or the units that all share."""

    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)
    host_units: int = 0
    host_costs: Mapping[str, int] = field(default_factory=dict)
    device_units: int = 0
    device_costs: Mapping[str, int] = field(default_factory=dict)


class Bench:
    """One run of one model on one set of pools."""

    def __init__(
        self,
        specs: Sequence[ComponentSpec],
        page_size: int,
        pools: Pools,
        *,
        policy: str = "adaptive",
        write: str = "write_through",
        core: str | None = None,
    ) -> None:
        in_pages = tuple(
            replace(
                spec,
                window_tokens=-(-spec.window_tokens // page_size),
                bytes_per_token=spec.bytes_per_token * page_size,
            )
            for spec in specs
        )
        self.names = [spec.name for spec in specs]
        self.states = [spec.name for spec in specs if spec.is_checkpoint]
        self.spacing = spacing_of(specs, page_size) // page_size
        self.chunk = max(1, CHUNK_TOKENS // page_size)
        self.page_size = page_size
        self.tiers = (Tier.DEVICE, Tier.HOST) if pools.host else (Tier.DEVICE,)
        self.tree = make_core(
            TreeConfig(
                page_size=1,
                components=in_pages,
                device_slots=pools.device,
                host_slots=pools.host,
                host_units=pools.host_units,
                host_costs=pools.host_costs,
                device_units=pools.device_units,
                device_costs=pools.device_costs,
                eviction=policy,
                write=write,
                mark_spacing=self.spacing,
            ),
            core,
        )
        held = pools.device["full"] + pools.host.get("full", 0)
        self.order = make_order(
            policy, core_kind(core)[0], capacity_tokens=held, block_tokens=max(1, 64 // page_size)
        )
        self.num_refused = 0
        self.blocked_pages = 0

    def hit_rate(self, trace: PagedTrace) -> float:
        """Token hit rate of the whole trace."""
        hits = sum(self.serve(request) for request in trace.requests)
        found = self.tree.audit()
        if found:
            raise SystemExit(f"the audit found {found}")
        return hits * self.page_size / trace.prompt_tokens

    def held(self) -> dict[str, int]:
        """Slots of L1 in use."""
        return {name: self.tree.held_slots(name, Tier.DEVICE) for name in self.names}

    def run(self, actions: Iterable[Action]) -> None:
        """Every copy ends at once."""
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            if isinstance(action, Copy):
                waiting.extend(self.tree.commit(action.ticket))

    def serve(self, request: PagedRequest) -> int:
        """One request; returns the pages that it reused."""
        tree, order, ids = self.tree, self.order, request.ids
        matched = tree.match(ids[: request.last], cap=False, session=request.session)
        self.run(matched.actions)
        if order is not None:
            order.begin(request.session, reused_turn(matched), request.arrival_s, core=tree)
        while started := tree.load(matched.lease):
            self.run(started.actions)
            if not started.tickets:
                break
        settled = tree.settle(matched.lease)
        self.run(settled.actions)
        fork = matched.found.fork or 0
        self.blocked_pages += max(0, fork - matched.found.boundary)
        done = self._compute(matched.lease, ids, settled.boundary, request.last, fork)
        self.run(tree.release(matched.lease, ids[:done]).actions)
        if order is not None:
            order.end(request.session, matched.lease, request.stop, request.arrival_s)
            order.watch(request.session, ids[:done], request.last, 0)
            order.tell(tree, request.arrival_s)
        self._demote_ahead()
        return settled.boundary

    def _compute(self, lease: LeaseId, ids: NDArray[np.int32], reused: int, last: int, fork: int) -> int:
        """Prefill and decode; how far that came."""
        marks = {last, fork, len(ids)} if len(self.names) > 1 else {last}
        if self.spacing:
            marks.update(range(self.spacing, last, self.spacing))
        done = reused
        for pause in sorted({*marks, *range(reused + self.chunk, last, self.chunk), len(ids)}):
            if pause <= done:
                continue
            if not self._reserve(lease, pause - done):
                self.num_refused += 1
                break
            for name in self.states if pause in marks else ():
                if not self.tree.free_slots(name, Tier.DEVICE)[1]:
                    self.run(self.tree.make_room(name, Tier.DEVICE, 1).actions)
            self.run(self.tree.insert(lease, ids[:pause], mark=pause in marks).actions)
            done = pause
        return done

    def _reserve(self, lease: LeaseId, num_pages: int) -> bool:
        while True:
            reserved = self.tree.reserve(lease, num_pages)
            self.run(reserved.actions)
            if not reserved.short or not reserved.tickets:
                return not reserved.short

    def _demote_ahead(self) -> None:
        for name in self.names:
            for tier in self.tiers[:-1]:  # what leaves the lowest is dropped when room is needed
                capacity, free = self.tree.free_slots(name, tier)
                wanted = WATERMARK.wanted_free(free_slots=free, capacity_slots=capacity)
                if wanted is not None:
                    self.run(self.tree.make_room(name, tier, wanted).actions)


# ---- sizes and splits ------------------------------------------------------------------------------
def device_pools(
    specs: Sequence[ComponentSpec], page_size: int, capacity_bytes: int, share: str
) -> Pools | None:
    """L1: one budget, split by the code, or with that share for all marks; None where no request could run."""
    if share in ("shared", "fixed"):
        pool = PoolConfig(capacity=capacity_bytes)
        if any(pool_problems(pool, specs, page_size, num_ranks=1)):
            return None
        if share == "fixed":
            return Pools(share_out(specs, page_size, capacity_bytes=capacity_bytes))
        costs = {spec.name: spec.slot_bytes(page_size) for spec in specs}
        slots = {name: capacity_bytes // cost for name, cost in costs.items()}
        return Pools(slots, device_units=capacity_bytes, device_costs=costs)
    marks = [spec for spec in specs if keeps_marks(spec)]
    total = sum(mark_bytes(spec, page_size) for spec in marks)
    slots: dict[str, int] = {}
    left_bytes = capacity_bytes
    for spec in marks:
        wanted = int(capacity_bytes * float(share) * mark_bytes(spec, page_size) / total)
        slots[spec.name] = max(needed_slots(spec, page_size), wanted // spec.slot_bytes(page_size))
        left_bytes -= slots[spec.name] * spec.slot_bytes(page_size)
    slots["full"] = left_bytes // specs[0].slot_bytes(page_size)
    return Pools(slots) if slots["full"] > 0 else None


def read(name: str, page_size: int, limit: int | None) -> PagedTrace:
    requests = chats(600, at_once=60) if name == "chats" else read_trace(name, limit=limit)
    return paged(requests, page_size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", default=[str(TRACE)])
    parser.add_argument("--page-size", type=int, default=512)
    parser.add_argument("--models", nargs="+", default=["full+mamba=2", "full+mamba=16", "full+swa=0.5x2"])
    parser.add_argument("--sizes", nargs="+", type=float, default=[0.05, 0.1])
    parser.add_argument(
        "--shares", nargs="+", default=["shared", "fixed", "0.04", "0.08", "0.16", "0.25", "0.5"]
    )
    parser.add_argument("--host", type=float, default=0.0)
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--requests", type=int, default=None)
    given = parser.parse_args()
    for name in given.traces:
        trace = read(name, given.page_size, given.requests)
        for model in given.models:
            specs = model_specs(parse_components(model))
            for size in given.sizes:
                page_bytes = specs[0].slot_bytes(given.page_size)
                sizes = [int(part * trace.footprint_pages) * page_bytes for part in (size, given.host)]
                for share in given.shares:
                    pools = device_pools(specs, given.page_size, sizes[0], share)
                    if pools is None:
                        continue
                    if given.host:
                        budget = share_units(specs, given.page_size, sizes[1])
                        pools.host, pools.host_units = budget.slots, budget.num_units
                        pools.host_costs = budget.costs
                    bench = Bench(specs, given.page_size, pools, policy=given.policy)
                    rate = bench.hit_rate(trace)
                    print(
                        f"{Path(name).stem:24} {model:26} {size:5.0%} {share:>8} {rate:.4f} {bench.held()}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
