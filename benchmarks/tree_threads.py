"""Calls on different trees from several threads at once, and how long a call holds the GIL.

    python benchmarks/tree_threads.py [--tokens 131072] [--calls 300] [--threads 2]

Each thread has a tree of its own that holds one prompt, and matches and releases it over and over. ``speedup``
is the calls a second of all threads together against one thread alone: 1 where a lock serialises them. As many
processes, which share no lock, show what the machine has cores for at that moment. ``longest wait`` is how long
a thread that only asks for the GIL every now and then had to wait for it (and for a core). ``waits a call`` is how
often a thread gave up its core to wait, mostly for the GIL; that and the CPU time depend little on what else runs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hicache.radix.core import make_core
from hicache.radix.interface import TreeConfig, TreeCore
from hicache.types import ComponentSpec


class Start(Protocol):
    """A barrier between threads or processes."""

    def wait(self) -> int: ...


def filled(tokens: np.ndarray, kind: str) -> TreeCore:
    """A tree that holds the prompt."""
    core = make_core(TreeConfig(1, (ComponentSpec("full", bytes_per_token=8),), {"full": len(tokens)}), kind)
    lease = core.match(tokens, cap=False).lease
    core.reserve(lease, len(tokens))
    core.release(lease, tokens)
    return core


def work(core: TreeCore, tokens: np.ndarray, calls: int, start: Start) -> None:
    start.wait()
    for _ in range(calls):
        core.release(core.match(tokens, cap=False).lease)


@dataclass(frozen=True)
class Outcome:
    """Of threads that call at once: calls a second, the longest time in which another thread did not get the GIL,
    and, for each call, CPU time and how often a thread waited."""

    calls_per_s: float
    longest_s: float
    cpu_us: float
    waits: float


def run(cores: list[TreeCore], prompts: list[np.ndarray], calls: int) -> Outcome:
    start = threading.Barrier(len(cores) + 1)
    threads = [
        threading.Thread(target=work, args=(core, prompt, calls, start))
        for core, prompt in zip(cores, prompts, strict=True)
    ]
    for thread in threads:
        thread.start()
    before_all = resource.getrusage(resource.RUSAGE_SELF)
    start.wait()
    begun = time.perf_counter()
    longest, nap_s, naps = 0.0, 0.0002, 0
    while any(thread.is_alive() for thread in threads):
        before = time.perf_counter()
        time.sleep(nap_s)
        longest = max(longest, time.perf_counter() - before - nap_s)
        naps += 1
    took = time.perf_counter() - begun
    for thread in threads:
        thread.join()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime - before_all.ru_utime + after.ru_stime - before_all.ru_stime
    waits = max(0, after.ru_nvcsw - before_all.ru_nvcsw - naps)
    num = len(cores) * calls
    return Outcome(num / took, longest, 1e6 * cpu_s / num, waits / num)


def run_processes(cores: list[TreeCore], prompts: list[np.ndarray], calls: int) -> float:
    """Calls a second of as many processes."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(len(cores) + 1)
    workers = [
        context.Process(target=work, args=(core, prompt, calls, start))
        for core, prompt in zip(cores, prompts, strict=True)
    ]
    for worker in workers:
        worker.start()
    start.wait()
    begun = time.perf_counter()
    for worker in workers:
        worker.join()
    return len(cores) * calls / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--core", default="rust", choices=["rust", "python"])
    args = parser.parse_args()
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 128_000, args.tokens).astype(np.int32) for _ in range(args.threads)]
    cores = [filled(prompt, args.core) for prompt in prompts]
    for _ in range(args.repeat):
        alone = run(cores[:1], prompts[:1], args.calls)
        apart = run_processes(cores, prompts, args.calls)
        together = run(cores, prompts, args.calls)
        sys.stdout.write(
            f"{args.core} {args.tokens} tokens: {1e6 / alone.calls_per_s:.1f} us a match and release alone; "
            f"{args.threads} threads: speedup {together.calls_per_s / alone.calls_per_s:.2f} "
            f"(processes {apart / alone.calls_per_s:.2f}); "
            f"CPU {alone.cpu_us:.1f} us a call alone, {together.cpu_us:.1f} together; "
            f"waits a call {alone.waits:.3f} alone, {together.waits:.3f} together; "
            f"longest wait {1e3 * alone.longest_s:.2f} ms alone, {1e3 * together.longest_s:.2f} ms together\n"
        )


if __name__ == "__main__":
    main()
