"""W1: chats behind one shared system prompt, next to one-shot traffic, with eviction from half-way on.

A chat's tokens lie in one buffer, which a turn extends, and are of the type that the adapter names: so the workload
itself does not copy a history between the timed calls, unless the cache needs another form (`Adapter.key`).
"""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass

import numpy as np
from tree_harness import NS, Adapter, Recorder, Timer, TreeConfig, ceil_page, floor_page, since


@dataclass
class W1Params:
    sessions: int = 8
    turns: int = 200
    system_tokens: int = 2000
    user_tokens: tuple[int, int] = (240, 360)
    output_tokens: tuple[int, int] = (160, 240)
    inflight: int = 4  # requests whose locks are held at the same time
    one_shot_tokens: int = 560  # unique suffix of one background request per session turn
    edge: int = 25  # turns in the first / last phase
    vocab: int = 128_000
    seed: int = 7


def w1_config(p: W1Params, page_size: int, components: tuple[str, ...], window: int) -> TreeConfig:
    per_turn = (sum(p.user_tokens) + sum(p.output_tokens)) // 2
    live = p.sessions * p.turns * per_turn + p.system_tokens
    full = ceil_page(int(live * 1.06) + p.inflight * 4 * per_turn, page_size)
    # window slots: every live session keeps one window plus a turn, and a quarter on top
    swa = ceil_page(int(1.25 * (p.sessions + p.inflight) * (window + 3 * per_turn)), page_size)
    # two states per session turn and one per one-shot request: room for two rounds
    mamba = 6 * p.sessions + 2 * p.inflight + 32
    return TreeConfig(page_size, components, window, full, swa, mamba)


class _History:
    """A session's tokens, with room for all that will come."""

    def __init__(self, system: np.ndarray, capacity: int):
        self.buffer = np.empty(len(system) + capacity, system.dtype)
        self.buffer[: len(system)] = system
        self.length = len(system)

    def with_more(self, tokens: np.ndarray) -> np.ndarray:
        """All tokens and then these, without a copy of what was there."""
        end = self.length + len(tokens)
        self.buffer[self.length : end] = tokens
        self.length = end
        return self.buffer[:end]


class _Req:
    __slots__ = ("s", "tokens", "prompt", "row", "lock", "prot", "swa_ev", "phase", "tot", "hit")


def _make_room(ad: Adapter, rec: Recorder, n: int, states: int, phase, acc, counters) -> None:
    cfg = ad.cfg
    f, w, m = ad.available()
    need_f = max(0, n - f)
    need_w = max(0, n - w) if cfg.swa else 0
    need_m = max(0, states - m) if cfg.mamba else 0
    if need_f or need_w or need_m:
        t = NS()
        got = ad.evict(need_f, need_w, need_m)
        d = since(t)
        rec.add(phase, "evict", d)
        if acc is not None:
            acc[0] += d
        for i in range(3):
            counters[phase][i] += got[i]


def run_w1(ad: Adapter, p: W1Params, rec: Recorder, verbose: bool = False) -> None:
    cfg = ad.cfg
    ps = cfg.page_size
    rng = np.random.default_rng(p.seed)
    dtype = getattr(ad, "token_dtype", np.int64)
    system = rng.integers(0, p.vocab, p.system_tokens, dtype=np.int64).astype(dtype)
    longest = p.turns * (p.user_tokens[1] + p.output_tokens[1])
    hist = [_History(system, longest) for _ in range(p.sessions)]
    counters = defaultdict(lambda: [0, 0, 0])
    hits = defaultdict(lambda: [0, 0])
    checksum = 0
    gc.collect()
    gc.disable()
    t_start = time.time()

    def take(n_tokens: int, states: int, phase, acc):
        _make_room(ad, rec, n_tokens, states, phase, acc, counters)
        with Timer(rec, phase, "alloc", acc):
            row = ad.alloc(n_tokens) if n_tokens else None
            st = ad.alloc_state() if states else None
        return row, st

    def trim_window(r: _Req, length: int) -> None:
        # same rule as an engine: slots behind the window that the request (not the tree) owns
        if not cfg.swa or length - cfg.window < r.swa_ev + 1:
            return
        lo = max(r.swa_ev, r.prot)
        hi = max(lo, floor_page(length - ceil_page(max(cfg.window, ps), ps), ps))
        if hi > lo:
            with Timer(rec, r.phase, "free", r.tot):
                ad.free_swa(r.row[lo:hi])
        r.swa_ev = hi

    def begin(s: int, tokens: np.ndarray, phase: str) -> _Req:
        nonlocal checksum
        r = _Req()
        r.s, r.tokens, r.prompt, r.phase, r.tot, r.swa_ev = s, tokens, len(tokens), phase, [0], 0
        k = ad.key(tokens)
        with Timer(rec, phase, "match", r.tot):
            m = ad.match(k)
        with Timer(rec, phase, "lock", r.tot):
            r.lock = ad.lock(m.node)
        with Timer(rec, phase, "resolve", r.tot):
            pre = ad.resolve(m.node)
        r.hit = r.prot = m.length
        checksum = (checksum * 1000003 + m.length) & 0xFFFFFFFFFFFF
        hits[phase][0] += m.length
        hits[phase][1] += len(tokens)
        new, st = take(ceil_page(r.prompt, ps) - m.length, int(cfg.mamba), phase, r.tot)
        r.row = ad.join(pre[: m.length], new)
        if m.branch is not None and m.length < m.branch < r.prompt:
            # prefill pauses at the fork so that the shared prefix gets its own window and state
            trim_window(r, m.branch - 1)
            bst = take(0, 1, phase, r.tot)[1] if cfg.mamba else None
            publish(r, ad.key(tokens[: m.branch]), m.branch, "insert_branch", bst, None)
        trim_window(r, r.prompt - 1)
        publish(r, k, r.prompt, "insert_prefill", st, None)
        return r

    def publish(r: _Req, key, length: int, op: str, st, boundary) -> None:
        al = floor_page(length, ps)
        with Timer(rec, r.phase, op, r.tot):
            ins = ad.insert(key, r.row, prev_len=r.prot, swa_evicted=r.swa_ev, state=st, boundary=boundary)
        if st is not None and not ins.state_used:
            ad.free_state(st)
        with Timer(rec, r.phase, "relock", r.tot):
            ad.unlock(r.lock)
            r.lock = ad.lock(ins.node)
        with Timer(rec, r.phase, "resolve", r.tot):
            path = ad.resolve(ins.node)
        assert len(path) == al, (len(path), al)
        r.row = ad.join(path, r.row[al:])
        r.prot = al

    def finish(r: _Req, out_tokens: np.ndarray) -> None:
        tokens = hist[r.s].with_more(out_tokens) if r.s >= 0 else r.tokens
        have = len(r.row)
        need = ceil_page(len(tokens), ps) - have
        new, st = take(need, int(cfg.mamba), r.phase, r.tot)
        r.row = ad.join(r.row, new) if need else r.row
        trim_window(r, len(tokens) - 1)
        publish(r, ad.key(tokens), len(tokens), "insert_finish", st, r.prompt)
        with Timer(rec, r.phase, "unlock", r.tot):
            ad.unlock(r.lock)
        tail = r.row[floor_page(len(tokens), ps) :]
        if len(tail):
            ad.free(tail)
        if r.s >= 0:
            rec.add(r.phase, "turn_total", r.tot[0])

    for t in range(p.turns):
        phase = "first" if t < p.edge else "last" if t >= p.turns - p.edge else f"mid{t // p.edge}"
        order = rng.permutation(p.sessions)
        for b in range(0, p.sessions, p.inflight):
            live: list[tuple[_Req, np.ndarray]] = []
            for s in order[b : b + p.inflight]:
                user = rng.integers(0, p.vocab, rng.integers(*p.user_tokens), dtype=np.int64)
                outp = rng.integers(0, p.vocab, rng.integers(*p.output_tokens), dtype=np.int64)
                live.append((begin(int(s), hist[s].with_more(user), phase), outp))
            for _ in order[b : b + p.inflight]:  # background one-shot traffic
                one = rng.integers(0, p.vocab, p.one_shot_tokens, dtype=np.int64).astype(dtype)
                bg = begin(-1, np.concatenate([system, one]), "bg_" + phase)
                finish(bg, np.empty(0, dtype=np.int64)) if not cfg.mamba else _drop(ad, bg, ps)
            for r, outp in live:
                finish(r, outp)
        if verbose and t % 25 == 24:
            print(f"# turn {t + 1} {time.time() - t_start:.1f}s", file=sys.stderr)
    gc.enable()
    rec.flush()
    for ph, (h, n) in sorted(hits.items()):
        rec.emit(
            phase=ph,
            hit_tokens=h,
            asked_tokens=n,
            hit_rate=round(h / max(n, 1), 5),
            evicted_full=counters[ph][0],
            evicted_swa=counters[ph][1],
            evicted_mamba=counters[ph][2],
        )
    rec.emit(
        match_checksum=checksum,
        wall_s=round(time.time() - t_start, 2),
        config=asdict(cfg),
        params=asdict(p),
        **ad.check(),
    )


def _drop(ad: Adapter, r: _Req, ps: int) -> None:
    ad.unlock(r.lock)
    tail = r.row[floor_page(r.prompt, ps) :]
    if len(tail):
        ad.free(tail)
