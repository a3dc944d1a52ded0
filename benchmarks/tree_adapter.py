"""Our tree cores as an `Adapter` for tree_workloads.py.

Variants (the text after the colon in --adapter): `rust`, `python`; with `-page` tails are trimmed page by
page (our default), without it whole leaves leave, as the peers' do, and a prefill that is to leave a state at a
fork pauses at a multiple of 64 tokens before it.

    python benchmarks/tree_workloads.py --adapter tree_adapter:rust --adapter tree_adapter:python --workload w1

The workloads speak of matches, locks and rows of slots; ours is one lease from match to release. So a match
opens a lease, `lock` and `unlock` count its holders, and the last one releases it. A row stands for what the
lease has reserved; the reservation itself, like every copy of a state, is inside the timed calls.
"""

from __future__ import annotations

import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import tree_workloads as tw  # noqa: E402

from hicache.radix.actions import Copy  # noqa: E402
from hicache.radix.core import make_core  # noqa: E402
from hicache.radix.interface import TreeConfig  # noqa: E402
from hicache.types import ComponentSpec, ReuseRule, Tier  # noqa: E402

DEVICE = Tier.DEVICE
PEER_PAUSE_TOKENS = 64


class Handle:
    """An open lease and how many hold it."""

    __slots__ = ("count", "lease", "published", "reserved")

    def __init__(self, lease: int, published: int):
        self.lease, self.published, self.reserved, self.count = lease, published, published, 1


class Owner:
    """Who a row belongs to; shared by its slices."""

    __slots__ = ("handle",)

    def __init__(self, handle: Handle | None):
        self.handle = handle


class Row:
    """Slots of a request, one a page; counted in tokens."""

    __slots__ = ("length", "owner", "slots")

    def __init__(self, owner: Owner, length: int, slots: np.ndarray | None = None):
        self.owner, self.length, self.slots = owner, length, slots

    def __len__(self):
        return self.length

    def __getitem__(self, part: slice):
        begin, end, _ = part.indices(self.length)
        return Row(self.owner, max(0, end - begin))


class HiCacheAdapter(tw.Adapter):
    token_dtype = np.int32

    def __init__(self, cfg: tw.TreeConfig, kind: str, granularity: str):
        super().__init__(cfg)
        self.name = f"hicache-{kind}"
        self.page = cfg.page_size
        self.pause_tokens = max(PEER_PAUSE_TOKENS, self.page) if granularity == "leaf" else 1
        specs = [ComponentSpec("full", ReuseRule.PATH, bytes_per_token=8)]
        slots = {"full": cfg.full_capacity // self.page}
        if cfg.swa:
            specs.append(ComponentSpec("swa", ReuseRule.WINDOW, window_tokens=cfg.window, bytes_per_token=8))
            slots["swa"] = cfg.swa_capacity // self.page
        if cfg.mamba:
            specs.append(ComponentSpec("mamba", ReuseRule.CHECKPOINT, state_bytes=64))
            slots["mamba"] = cfg.mamba_slots
        self.core = make_core(TreeConfig(self.page, tuple(specs), slots, granularity=granularity), kind)
        self.names = [spec.name for spec in specs]
        self.promised = {"full": 0, "mamba": 0}  # allocated by the workload, not yet reserved
        self.loose: Handle | None = None  # nobody has locked it yet

    # ---- untimed
    def key(self, tokens):
        """With states, cut to whole pages: the workload hands over a state with each insert, as that of the
        last page's end, and the tree keeps one only where its tokens end with a page."""
        length = len(tokens) // self.page * self.page if self.cfg.mamba else len(tokens)
        return np.require(tokens[:length], np.int32, ["C", "A", "W"])

    def join(self, *rows):
        owner = next((row.owner for row in rows if row.owner.handle is not None), rows[0].owner)
        return Row(owner, sum(map(len, rows)))

    # ---- timed
    def match(self, key):
        self._drop_loose()
        found = self._open(key)
        fork = found.fork
        if fork is not None and self.cfg.mamba:
            fork = fork // self.pause_tokens * self.pause_tokens
        return tw.Match(self.loose, found.boundary, fork)

    def _open(self, key):
        result = self.core.match(key, cap=False)
        self._run(result.actions)
        self.loose = Handle(result.lease, result.found.boundary)
        return result.found

    def resolve(self, handle):
        slots = self.core.lease_slots(handle.lease, "full")
        return Row(Owner(handle), handle.published, slots)

    def lock(self, handle):
        if handle is self.loose:
            self.loose = None
        else:
            handle.count += 1
        return handle

    def unlock(self, handle):
        """The last one is released with the next call, since `resolve` may still ask for its slots."""
        if handle.count > 1:
            handle.count -= 1
            return
        self._drop_loose()
        self.loose = handle

    def insert(self, key, row, *, prev_len=0, swa_evicted=0, state=None, boundary=None):
        handle = row.owner.handle
        if handle is None or handle.published > prev_len:
            self._drop_loose()
            self._open(key)
            handle, self.loose = self.loose, None
        else:
            handle.count += 1
            self._drop_loose()
        had = handle.published
        if len(row) > handle.reserved:
            more = len(row) - handle.reserved
            reserved = self.core.reserve(handle.lease, more)
            self._run(reserved.actions)
            if reserved.short:
                raise RuntimeError(f"no room: {reserved.short}")
            handle.reserved = len(row)
            self.promised["full"] = max(0, self.promised["full"] - more // self.page)
        done = self.core.insert(handle.lease, key, verified_len=had)
        self._run(done.actions)
        if state is not None:
            self.promised["mamba"] = max(0, self.promised["mamba"] - 1)
        handle.published = done.published
        row.owner.handle = self.loose = handle
        return tw.Inserted(handle, had, True)

    def evict(self, full, swa=0, mamba=0):
        self._drop_loose()
        freed = []
        for name, count, per_slot in (
            ("full", full, self.page),
            ("swa", swa, self.page),
            ("mamba", mamba, 1),
        ):
            if not count:
                freed.append(0)
                continue
            _, free = self.core.free_slots(name, DEVICE)
            room = self.core.make_room(name, DEVICE, free + -(-count // per_slot))
            self._run(room.actions)
            freed.append((room.free_slots - free) * per_slot)
        return tuple(freed)

    def _drop_loose(self):
        handle, self.loose = self.loose, None
        if handle is None:
            return
        handle.count -= 1
        if not handle.count:
            self._run(self.core.release(handle.lease).actions)

    def _run(self, actions):
        """Copies of states end at once; no other transfer is begun without L2."""
        for action in actions:
            if isinstance(action, Copy):
                self.core.commit(action.ticket)

    # ---- slots
    def available(self):
        def left(name, per_slot, promised):
            if name not in self.names:
                return 0
            return (self.core.free_slots(name, DEVICE)[1] - self.promised[promised]) * per_slot

        return left("full", self.page, "full"), left("swa", self.page, "full"), left("mamba", 1, "mamba")

    def alloc(self, n):
        self.promised["full"] += n // self.page
        return Row(Owner(None), n)

    def alloc_state(self):
        if not self.cfg.mamba:
            return None
        self.promised["mamba"] += 1
        return self.promised["mamba"]

    def free(self, row):
        pass  # what was reserved goes back with the lease

    def free_swa(self, row):
        pass  # publishing drops what the window left behind

    # ---- untimed
    def check(self):
        findings = self.core.audit()
        counters = {key: count for key, count in self.core.counters().items() if "removed" in key}
        return {
            "audit": findings[:3],
            "nodes": len(self.core.snapshot()) if self.cfg.page_size else 0,
            **counters,
        }


def preload():
    make_core(TreeConfig(1, (ComponentSpec("full"),), {"full": 1}))


def make_adapter(variant: str, cfg: tw.TreeConfig) -> HiCacheAdapter:
    kind, _, granularity = variant.partition("-")
    return HiCacheAdapter(cfg, kind, granularity or "leaf")
