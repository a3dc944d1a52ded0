"""W2, a wide tree; W3, a long prefix; and what comparing and copying cost on this machine."""

from __future__ import annotations

import ctypes
import gc
import time
from dataclasses import asdict, dataclass

import numpy as np
from tree_harness import NS, Adapter, Recorder, Timer, TreeConfig, ceil_page, floor_page, rss_bytes, since


@dataclass
class W2Params:
    leaves: int = 100_000
    prefix_tokens: int = 256
    leaf_tokens: int = 64
    fanout: int = 100  # leaves per shared prefix
    probes: int = 2000
    evict_calls: int = 200
    budget_s: float = 25.0  # stop one measurement after this long
    vocab: int = 128_000
    seed: int = 11


def w2_config(p: W2Params, page_size: int, components, window: int) -> TreeConfig:
    groups = -(-p.leaves // p.fanout)
    toks = groups * ceil_page(p.prefix_tokens, page_size)
    toks += (p.leaves + 3 * p.probes) * ceil_page(p.leaf_tokens, page_size)
    return TreeConfig(
        page_size,
        components,
        window,
        ceil_page(toks + 4096, page_size),
        ceil_page(toks + 4096, page_size),
        p.leaves + 3 * p.probes + groups + 64,
    )


def run_w2(ad: Adapter, p: W2Params, rec: Recorder) -> None:
    cfg = ad.cfg
    ps = cfg.page_size
    rng = np.random.default_rng(p.seed)
    plen, llen = ceil_page(p.prefix_tokens, ps), ceil_page(p.leaf_tokens, ps)
    groups = -(-p.leaves // p.fanout)
    prefixes = rng.integers(0, p.vocab, (groups, plen), dtype=np.int64)

    def leaf_tokens(i: int) -> np.ndarray:
        body = np.random.default_rng((p.seed << 32) + i).integers(0, p.vocab, llen, dtype=np.int64)
        return np.concatenate([prefixes[i % groups], body])

    gc.collect()
    gc.disable()
    rss0 = rss_bytes()

    def put(tokens: np.ndarray, phase: str) -> None:
        k = ad.key(tokens)
        m = ad.match(k)
        lk = ad.lock(m.node)
        pre = ad.resolve(m.node)
        new = ad.alloc(len(tokens) - m.length)
        st = ad.alloc_state() if cfg.mamba else None
        row = ad.join(pre[: m.length], new)
        t = NS()
        ins = ad.insert(k, row, prev_len=m.length, state=st)
        rec.add(phase, "insert", since(t))
        if st is not None and not ins.state_used:
            ad.free_state(st)
        ad.unlock(lk)

    t0 = time.time()
    for i in range(p.leaves):
        put(leaf_tokens(i), f"q{4 * i // p.leaves + 1}")
    build_s = time.time() - t0
    gc.collect()
    rss1 = rss_bytes()
    nodes = p.leaves + groups
    tokens = groups * plen + p.leaves * llen
    rec.emit(
        "mem",
        nodes=nodes,
        tokens=tokens,
        build_s=round(build_s, 2),
        rss_delta=rss1 - rss0,
        bytes_per_node=round((rss1 - rss0) / nodes, 1),
        # what the payload alone must cost: 8-byte key + 8-byte slot per token
        payload_bytes_per_node=round(16 * tokens / nodes, 1),
    )

    pick = rng.integers(0, p.leaves, p.probes)

    def probe(phase: str, op: str, make) -> None:
        t_end = time.time() + p.budget_s
        for i in pick:
            k = ad.key(make(int(i)))
            t = NS()
            ad.match(k)
            rec.add(phase, op, since(t))
            if time.time() > t_end:
                break

    probe("warm", "match_hit", leaf_tokens)
    probe("warm", "match_hit_x2", leaf_tokens)
    probe(
        "warm", "match_miss_root", lambda i: rng.integers(p.vocab, 2 * p.vocab, plen + llen, dtype=np.int64)
    )

    def miss_leaf(i: int) -> np.ndarray:
        x = leaf_tokens(i)
        x[plen:] = rng.integers(p.vocab, 2 * p.vocab, llen)
        return x

    probe("warm", "match_miss_leaf", miss_leaf)

    for i in pick[:500]:
        m = ad.match(ad.key(leaf_tokens(int(i))))
        with Timer(rec, "warm", "lock"):
            lk = ad.lock(m.node)
        with Timer(rec, "warm", "unlock"):
            ad.unlock(lk)
        with Timer(rec, "warm", "resolve"):
            ad.resolve(m.node)

    # evict one leaf at a time: exposes per-call work that depends on the number of leaves
    t_end = time.time() + p.budget_s
    freed = [0, 0, 0]
    for _ in range(p.evict_calls):
        t = NS()
        got = ad.evict(1)
        rec.add("evict", "evict_one_full", since(t))
        freed = [a + b for a, b in zip(freed, got)]
        if time.time() > t_end:
            break
    if cfg.swa:
        for _ in range(p.evict_calls):
            t = NS()
            got = ad.evict(0, 1)
            rec.add("evict", "evict_one_swa", since(t))
            freed = [a + b for a, b in zip(freed, got)]
    if cfg.mamba:
        for _ in range(p.evict_calls):
            t = NS()
            got = ad.evict(0, 0, 1)
            rec.add("evict", "evict_one_mamba", since(t))
            freed = [a + b for a, b in zip(freed, got)]
    # steady state: evict one leaf, insert one leaf
    t_end = time.time() + p.budget_s
    for j in range(p.evict_calls):
        t = NS()
        ad.evict(1)
        rec.add("churn", "evict_one_full", since(t))
        put(leaf_tokens(p.leaves + j), "churn")
        if time.time() > t_end:
            break
    # bulk: a tenth of the tree in one call
    t = NS()
    got = ad.evict(p.leaves // 10 * llen)
    d = since(t)
    per = d / max(1, got[0] // llen)
    rec.add("evict", "evict_bulk10pct_per_leaf", int(per))
    # split: diverge in the middle of surviving leaves (page-aligned)
    if llen >= 2 * ps:
        half = ceil_page(llen // 2, ps)

        def split_at(i: int) -> np.ndarray:
            x = leaf_tokens(i)
            x[plen + half :] = rng.integers(p.vocab, 2 * p.vocab, llen - half)
            return x

        probe("warm", "match_split", split_at)
    gc.enable()
    rec.flush()
    rec.emit(evicted=freed, config=asdict(cfg), params=asdict(p), **ad.check())


# --------------------------------------------------------------------------- W3 long prefix
@dataclass
class W3Params:
    length: int = 131_072
    chunk: int = 0  # 0: one node; else the prefix is inserted in steps of this many tokens
    reps: int = 15
    vocab: int = 128_000
    seed: int = 13


def w3_config(p: W3Params, page_size: int, components, window: int) -> TreeConfig:
    n = ceil_page(3 * p.length + 65536, page_size)
    return TreeConfig(page_size, components, window, n, n, 4096)


def run_w3(ad: Adapter, p: W3Params, rec: Recorder) -> None:
    cfg = ad.cfg
    ps = cfg.page_size
    rng = np.random.default_rng(p.seed)
    gc.collect()
    gc.disable()
    L = floor_page(p.length, ps)
    tok = rng.integers(0, p.vocab, L, dtype=np.int64)
    step = p.chunk or L
    ph = f"L{p.length}_c{p.chunk}"
    lk = None
    prot = 0
    row = ad.alloc(L)
    for end in list(range(step, L, step)) + [L]:
        k = ad.key(tok[:end])
        st = ad.alloc_state() if cfg.mamba else None
        t = NS()
        ins = ad.insert(k, row[:end], prev_len=prot, state=st)
        rec.add(ph, "insert_chunk" if p.chunk else "insert_new", since(t))
        new = ad.lock(ins.node)
        if lk is not None:
            ad.unlock(lk)
        lk, prot = new, floor_page(end, ps)
    full = ad.key(tok)
    m = ad.match(full)
    ours = tok.astype(np.int32)
    theirs = ours.copy()
    mine, other = ctypes.c_void_p(ours.ctypes.data), ctypes.c_void_p(theirs.ctypes.data)
    libc = ctypes.CDLL(None)
    for _ in range(p.reps):
        with Timer(rec, ph, "memcmp"):  # what comparing costs right here, with the caches as match finds them
            libc.memcmp(mine, other, ours.nbytes)
        with Timer(rec, ph, "resolve"):
            ad.resolve(m.node)
        with Timer(rec, ph, "match_full"):
            m = ad.match(full)
        assert m.length == L, (m.length, L)
        with Timer(rec, ph, "resolve"):
            ad.resolve(m.node)
        with Timer(rec, ph, "lock"):
            x = ad.lock(m.node)
        with Timer(rec, ph, "unlock"):
            ad.unlock(x)
    # what an appended turn pays: the whole prefix plus 300 unseen tokens
    ext = ad.key(np.concatenate([tok, rng.integers(0, p.vocab, 320, dtype=np.int64)]))
    for _ in range(p.reps):
        with Timer(rec, ph, "match_full_plus_new"):
            m = ad.match(ext)
    # duplicate insert (the request owns no new tokens): a pure walk
    for _ in range(p.reps):
        st = ad.alloc_state() if cfg.mamba else None
        with Timer(rec, ph, "insert_dup"):
            ins = ad.insert(full, row, prev_len=L, state=st)
        if st is not None and not ins.state_used:
            ad.free_state(st)
    # append one turn to the end of the prefix
    for j in range(p.reps):
        extra = rng.integers(0, p.vocab, ceil_page(320, ps), dtype=np.int64)
        k = ad.key(np.concatenate([tok, extra]))
        r2 = ad.join(row, ad.alloc(len(extra)))
        st = ad.alloc_state() if cfg.mamba else None
        with Timer(rec, ph, "insert_append"):
            ad.insert(k, r2, prev_len=L, state=st)
    # miss after k tokens: each probe diverges at a new page-aligned place, so it splits a node.
    # The divergence point is near the end so that almost the whole prefix is compared.
    pts = [L - ps * (7 * i + 3) for i in range(p.reps)]
    for q in pts:
        x = tok.copy()
        x[q:] += p.vocab
        k = ad.key(x)
        with Timer(rec, ph, "match_split_first"):
            m = ad.match(k)
        with Timer(rec, ph, "match_split_again"):
            m = ad.match(k)
    # a split in the middle of the largest remaining node
    for i in range(1, 6):
        q = floor_page(L >> i, ps)
        x = tok.copy()
        x[q:] += p.vocab
        with Timer(rec, ph, f"match_split_at_1/{1 << i}"):
            ad.match(ad.key(x))
    ad.unlock(lk)
    gc.enable()
    rec.flush()
    rec.emit(phase=ph, config=asdict(cfg), params=asdict(p), **ad.check())


# --------------------------------------------------------------------------- machine bounds
def run_mem(out) -> None:
    rec = Recorder({"adapter": "machine", "workload": "mem"}, out)
    libc = ctypes.CDLL(None)
    libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    for n in (512, 8192, 131_072, 1_048_576, 4_194_304):
        for width in (8, 4):
            a = np.random.default_rng(0).integers(0, 1 << 17, n).astype(np.int64 if width == 8 else np.int32)
            b = a.copy()
            reps = max(5, min(2000, 200_000_000 // (n * width)))
            libc.memcmp(a.ctypes.data, b.ctypes.data, n * width)
            pa, pb = a.ctypes.data, b.ctypes.data
            best = 1 << 62
            tot = 0
            for _ in range(reps):
                t = NS()
                libc.memcmp(pa, pb, n * width)
                d = since(t)
                best, tot = min(best, d), tot + d
            c = np.empty_like(a)
            t = NS()
            for _ in range(reps):
                np.copyto(c, a)
            cp = since(t) / reps
            rec.emit(
                "mem",
                tokens=n,
                width=width,
                memcmp_best_ns=best,
                memcmp_mean_ns=round(tot / reps, 1),
                memcmp_gb_s=round(2 * n * width / best, 2),
                copy_mean_ns=round(cp, 1),
                copy_gb_s=round(2 * n * width / cp, 2),
            )
