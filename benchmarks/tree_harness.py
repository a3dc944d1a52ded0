"""What the tree workloads share: clocks, the contract of a cache under test, and how figures are written."""

from __future__ import annotations

import ctypes
import json
import os
import time
from array import array
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

CLOCKS = {"cpu": time.thread_time_ns, "wall": time.perf_counter_ns}
_raw = time.thread_time_ns
_cost = 0


def use_clock(name: str) -> None:
    """Select the clock and measure what two back-to-back readings cost."""
    global _raw, _cost
    _raw, _cost = CLOCKS[name], 0
    d = []
    for _ in range(20_000):
        t = _raw()
        d.append(since(t))
    _cost = int(np.median(d))


_swept = np.empty(0)  # what `make_cold` reads


def use_cold_caches(num_bytes: int) -> None:
    """Have every timed call find its caches swept by so much other data; 0: as the workload left them."""
    global _swept
    _swept = np.ones(num_bytes // 8)


def make_cold() -> None:
    if len(_swept):
        _swept.sum()


def NS() -> int:
    make_cold()
    return _raw()


def since(t: int) -> int:
    return max(0, _raw() - t - _cost)


# --------------------------------------------------------------------------- adapter contract
@dataclass
class TreeConfig:
    page_size: int = 1
    components: tuple[str, ...] = ("full",)  # subset of full, swa, mamba; "full" always present
    window: int = 1024
    full_capacity: int = 1 << 20  # token slots
    swa_capacity: int = 1 << 20  # token slots
    mamba_slots: int = 1 << 12  # state slots

    @property
    def swa(self) -> bool:
        return "swa" in self.components

    @property
    def mamba(self) -> bool:
        return "mamba" in self.components


@dataclass
class Match:
    node: object  # opaque; accepted by lock() and resolve()
    length: int  # reusable tokens (all components agree)
    branch: int | None = None  # a longer FULL-only hit ends here: worth a window / state checkpoint


@dataclass
class Inserted:
    node: object
    prefix_len: int = 0  # tokens the tree already had
    state_used: bool = True  # False: the tree kept its own recurrent state, ours must be freed


class Adapter:
    """What a cache must offer to be measured.  Slots are opaque arrays supporting len() and
    slicing; a "row" is the request's slot array, one entry per token."""

    name = "abstract"
    token_dtype: type[np.integer] = np.int64  # in which the workload keeps its tokens

    def __init__(self, cfg: TreeConfig):
        self.cfg = cfg

    # ---- untimed conversions
    def key(self, tokens: np.ndarray):  # token ids -> whatever match/insert take
        raise NotImplementedError

    def join(self, *rows):
        raise NotImplementedError

    # ---- timed
    def match(self, key) -> Match:
        raise NotImplementedError

    def resolve(self, node):
        """Slots of the whole path root..node, in order."""
        raise NotImplementedError

    def lock(self, node):
        raise NotImplementedError

    def unlock(self, lock) -> None:
        raise NotImplementedError

    def insert(self, key, row, *, prev_len=0, swa_evicted=0, state=None, boundary=None) -> Inserted:
        """Publish row[0:len(key)] (page-floored) under key.  prev_len: the caller already owns a
        lock on [0, prev_len).  swa_evicted: window slots below this offset are gone.  boundary:
        prompt length; a cache that wants an eviction boundary there may create one."""
        raise NotImplementedError

    def evict(self, full: int, swa: int = 0, mamba: int = 0) -> tuple[int, int, int]:
        """Free at least this much from each component's pool if possible."""
        raise NotImplementedError

    # ---- slot bookkeeping (timed as 'alloc' / 'free', reported apart from tree operations)
    def available(self) -> tuple[int, int, int]:
        raise NotImplementedError

    def alloc(self, n: int):
        raise NotImplementedError

    def alloc_state(self):
        return None

    def free(self, row) -> None:
        raise NotImplementedError

    def free_swa(self, row) -> None:
        raise NotImplementedError

    def free_state(self, state) -> None:
        pass

    # ---- untimed
    def check(self) -> dict:
        """Invariants; returned dict is printed as info."""
        return {}


# --------------------------------------------------------------------------- recording
class Recorder:
    def __init__(self, tags: dict, out):
        self.tags, self.out = tags, out
        # Arrays, because a list of ints would add 40 bytes a sample to the memory that W2 measures.
        self.data: dict[tuple[str, str], array[int]] = defaultdict(lambda: array("q"))

    def add(self, phase: str, op: str, ns: int) -> None:
        self.data[phase, op].append(ns)

    def emit(self, kind: str = "info", **kw) -> None:
        print(json.dumps({"kind": kind, **self.tags, **kw}), file=self.out, flush=True)

    def flush(self) -> None:
        for (phase, op), v in sorted(self.data.items()):
            a = np.asarray(v, dtype=np.float64)
            self.emit(
                "op",
                phase=phase,
                op=op,
                n=len(v),
                mean_ns=round(float(a.mean()), 1),
                p50_ns=round(float(np.percentile(a, 50)), 1),
                p99_ns=round(float(np.percentile(a, 99)), 1),
                max_ns=round(float(a.max()), 1),
                ops_per_s=round(1e9 / max(float(a.mean()), 1e-9), 1),
            )
        self.data.clear()


def keep_heap() -> None:
    """Ask glibc malloc not to hand freed memory back to the kernel.  Otherwise every multi-megabyte
    temporary costs one page fault per 4 KiB (several us each inside a VM) and the figures describe
    the hypervisor instead of the cache."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    libc.mallopt(-1, 2_000_000_000)  # M_TRIM_THRESHOLD
    libc.mallopt(-2, 64 << 20)  # M_TOP_PAD


def rss_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def floor_page(n: int, p: int) -> int:
    return n // p * p


def ceil_page(n: int, p: int) -> int:
    return -(-n // p) * p


class Timer:
    """with Timer(rec, phase, op): ..."""

    __slots__ = ("rec", "phase", "op", "t", "acc")

    def __init__(self, rec, phase, op, acc=None):
        self.rec, self.phase, self.op, self.acc = rec, phase, op, acc

    def __enter__(self):
        self.t = NS()

    def __exit__(self, *exc):
        d = since(self.t)
        if self.phase is not None:
            self.rec.add(self.phase, self.op, d)
        if self.acc is not None:
            self.acc[0] += d
        return False
