"""What a scrape costs, and what explanations and events cost a request. Ratios within one run.

python benchmarks/metrics_cost.py [NUM_SESSIONS] [CORE]
"""

from __future__ import annotations

import sys
import time

import numpy as np
from prometheus_client import generate_latest

from hicache.cache import HiCache
from hicache.config import load_config
from hicache.metrics import CacheCollector, registry_of

PROMPT_LEN = 4096
ANSWER_LEN = 256
OFF: dict[str, object] = {}
VARIANTS = {
    "off": OFF,
    "explain": {"explain.enabled": True},
    "events": {"events.endpoint": "tcp://127.0.0.1:*"},
    "tracing": {"tracing.enabled": True},
}


def run(core: str, num_sessions: int, overrides: dict[str, object]) -> None:
    settings: dict[str, object] = {
        "model.page_size": 64,
        "tiers.device.capacity": "64MiB",
        "tiers.host.capacity": "128MiB",
        "policy.write": "write_back",
        "tiers.stores": [],
        **overrides,
    }
    draw = np.random.default_rng(1)
    shared = draw.integers(0, 50_000, PROMPT_LEN, dtype=np.int32)
    config = load_config("cpu", overrides=settings, environ={})
    with HiCache(config, core=core) as cache:
        spent_s = []
        for _ in range(num_sessions):
            prompt = np.concatenate(
                [shared[: PROMPT_LEN // 2], draw.integers(0, 50_000, PROMPT_LEN // 2, dtype=np.int32)]
            )
            tokens = np.concatenate([prompt, draw.integers(0, 50_000, ANSWER_LEN, dtype=np.int32)])
            began_s = time.perf_counter()
            with cache.match(prompt) as lease:
                lease.load()
                lease.reserve(len(tokens) - lease.reused)
                lease.release(tokens)
            spent_s.append(time.perf_counter() - began_s)
        registry = registry_of(CacheCollector(cache.stats, config.model.specs()))
        scrapes_s = []
        for _ in range(5):
            began_s = time.perf_counter()
            generate_latest(registry)
            scrapes_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        cache.stats()
        stats_s = time.perf_counter() - began_s
        pages = sum(c.evictable for c in cache.stats().pools.values())
        print(
            f"request {np.median(spent_s) * 1e6:8.1f} us (mean {np.mean(spent_s) * 1e6:8.1f});"
            f" scrape {min(scrapes_s) * 1e3:7.2f} ms, of it stats {stats_s * 1e3:7.2f} ms; {pages:,} slots held"
        )


def main() -> None:
    num_sessions = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    cores = sys.argv[2:] or ["rust", "python"]
    for core in cores:
        for name, overrides in VARIANTS.items():
            print(f"{core:6} {name:8} ", end="", flush=True)
            run(core, num_sessions, overrides)


if __name__ == "__main__":
    main()
