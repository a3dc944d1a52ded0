"""Check and measure everything that needs a GPU: under 4 minutes, no network, one JSON.

::

    python scripts/gpu_check.py [--out gpu_check.json] [--device 0] [--seconds 230]

In order: every way to copy, loads and copies down beside compute, whole caches under pressure, all tests marked
``gpu``, then speed. Exit code: 0 all right; 1 something is wrong; 2 the arguments are; 3 there is no CUDA device here.

``--cpu`` runs the checks that can be run without one, on CPU tensors, and exits with 0 or 1. It says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache.clock import MonotonicClock
from hicache.radix.actions import Copy
from hicache.testing.device_checks import Pools, all_checks, paths_of, wait_for_stream
from hicache.transfer.copy_paths import Batch, CopyPath
from hicache.transfer.engine import TransferEngine
from hicache.types import ComponentSpec, TicketId, Tier

NO_DEVICE = 3
TESTS = Path(__file__).resolve().parents[1] / "tests"
PAGES = ((64 << 10, 8), (256 << 10, 32), (1 << 20, 32), (4 << 20, 64))
"""Bytes of a page over all layers, layers."""
TOTALS = (1 << 20, 16 << 20, 256 << 20, 1 << 30)
"""Bytes of a batch."""
TARGETS = {
    "path / memcpy": 0.9,
    "both / one": 1.7,
    "host us a batch of 1000 pages": 10.0,
    "matmul slowed by": 0.05,
    "first layer x layers / whole": 1.5,
}
ROUNDS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description="check and measure what needs a GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=230.0, help="after this nothing more is measured")
    parser.add_argument("--cpu", action="store_true", help="only the checks, on CPU tensors")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "targets": TARGETS, "left_out": []}
    if not arguments.cpu and arguments.device >= (
        torch.cuda.device_count() if torch.cuda.is_available() else 0
    ):
        report["machine"]["device"] = None
        arguments.out.write_text(json.dumps(report, indent=1))
        print(
            f"there is no CUDA device {arguments.device} here; hicache doctor says why. --cpu checks the rest"
        )
        return NO_DEVICE
    began = time.monotonic()
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", arguments.device)
    report["checks"] = []
    for checked in all_checks(device, num_rounds=10 if arguments.cpu else 100):
        report["checks"].append(asdict(checked))
        print(f"{checked.name}: {checked.num_cases} cases, {len(checked.wrong)} wrong", flush=True)
    if not arguments.cpu:
        torch.cuda.set_device(device)
        report["machine"]["device"] = torch.cuda.get_device_name(device)
        report["gpu_tests"] = gpu_tests(limit_s=max(10.0, arguments.seconds / 2 - (time.monotonic() - began)))
        report["speed"] = speed(device, began + arguments.seconds, report["left_out"])
    report["seconds"] = round(time.monotonic() - began, 1)
    is_right = not any(each["wrong"] for each in report["checks"])
    is_right &= report.get("gpu_tests", {"code": 0})["code"] == 0
    report["is_right"] = is_right
    arguments.out.write_text(json.dumps(report, indent=1))
    print(f"{'all right' if is_right else 'WRONG'} after {report['seconds']} s; see {arguments.out}")
    return 0 if is_right else 1


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def gpu_tests(limit_s: float) -> dict[str, Any]:
    """All tests that need a device; plugins stay out that need what a bare machine may lack."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(TESTS)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"code": 124, "output": f"not done after {limit_s:.0f} s"}
    return {"code": done.returncode, "output": done.stdout[-4000:]}


# ---- speed -----------------------------------------------------------------------------------------------------------
def speed(device: torch.device, end: float, left_out: list[str]) -> dict[str, Any]:
    """The bandwidth table and what concerns whole engines; what does not fit the time is named in ``left_out``."""
    table: list[dict[str, Any]] = []
    engines: list[dict[str, Any]] = []
    for page_bytes, num_layers in PAGES:
        for total in TOTALS:
            if time.monotonic() > end - 20:
                left_out.append(f"pages of {page_bytes}, {total} bytes")
                continue
            table += paths_table(device, page_bytes, num_layers, total)
    for page_bytes, num_layers in PAGES:
        if time.monotonic() > end:
            left_out.append(f"engine with pages of {page_bytes}")
            continue
        engines.append(engine_speed(device, page_bytes, num_layers))
    return {"paths": table, "engine": engines}


def paths_table(
    device: torch.device, page_bytes: int, num_layers: int, total: int
) -> Iterator[dict[str, Any]]:
    """Each way in both directions, as a share of one pinned ``cudaMemcpyAsync`` of the same bytes."""
    spec = ComponentSpec("c", num_layers=num_layers, bytes_per_token=page_bytes)
    num_pages = max(1, total // page_bytes)
    shuffle = np.random.default_rng(1)
    with Pools((spec,), {"c": 2 * num_pages}, device) as pools:
        on_device, on_host = pools.slot_first("c")
        flat_device = pools.on_device["c"].view(-1)[: num_pages * page_bytes]
        flat_host = pools.on_host["c"].view(-1)[: num_pages * page_bytes]
        for to_host in (True, False):
            pair = (flat_host, flat_device) if to_host else (flat_device, flat_host)
            memcpy_s = fastest(device, lambda pair=pair: pair[0].copy_(pair[1], non_blocking=True))
            source, target = (on_device, on_host) if to_host else (on_host, on_device)
            tables = [shuffle.permutation(2 * num_pages)[:num_pages].astype(np.int64) for _ in range(2)]
            batch = Batch(source, tables[0], target, tables[1], to_host)
            for path in paths_of(device):
                if not path.can_copy(batch):
                    continue
                seconds, host_s = timed_path(device, path, batch)
                yield {
                    "path": path.name,
                    "direction": "to_host" if to_host else "to_device",
                    "page_bytes": page_bytes,
                    "layers": num_layers,
                    "bytes": batch.num_bytes,
                    "GB_per_s": round(batch.num_bytes / seconds / 1e9, 2),
                    "path / memcpy": round(memcpy_s / seconds, 3),
                    "host us a batch": round(host_s * 1e6, 1),
                }


def timed_path(device: torch.device, path: CopyPath, batch: Batch) -> tuple[float, float]:
    """Fastest seconds on the device, and median seconds of the host until it was given."""
    host: list[float] = []

    def copy() -> None:
        began = time.perf_counter()
        path.copy(batch)
        host.append(time.perf_counter() - began)

    return fastest(device, copy), statistics.median(host)


def fastest(device: torch.device, work: Callable[[], Any]) -> float:
    """The fastest of a few rounds, by events; the first one warms up."""
    seconds = []
    for _ in range(ROUNDS + 1):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        wait_for_stream(device)
        seconds.append(began.elapsed_time(ended) / 1e3)
    return min(seconds[1:])


def engine_speed(device: torch.device, page_bytes: int, num_layers: int) -> dict[str, Any]:
    """Both directions at once, the first layer, and a matrix product beside a load; 512 MiB each."""
    spec = ComponentSpec("c", num_layers=num_layers, bytes_per_token=page_bytes)
    num_pages = (512 << 20) // page_bytes
    shuffle = np.random.default_rng(1)
    slots = [shuffle.permutation(2 * num_pages).astype(np.int64) for _ in range(2)]
    numbers = iter(range(1_000_000))
    with (
        Pools((spec,), {"c": 2 * num_pages}, device) as pools,
        TransferEngine(
            specs=(spec,), page_size=1, device=pools.on_device, host=pools.on_host, store=None,
            clock=MonotonicClock(), store_queue_bytes=0, prefetch_queue_bytes=0, store_timeout_s=1.0,
        ) as engine,
    ):  # fmt: skip

        def load() -> Copy:
            pages = slots[0][:num_pages], slots[1][:num_pages]
            return Copy(TicketId(next(numbers)), "c", Tier.HOST, pages[0], Tier.DEVICE, pages[1])

        def store() -> Copy:
            pages = slots[1][num_pages:], slots[0][num_pages:]
            return Copy(TicketId(next(numbers)), "c", Tier.DEVICE, pages[0], Tier.HOST, pages[1])

        def run(*copies: Copy) -> float:
            began = time.perf_counter()
            for copy in copies:
                engine.submit(copy)
            engine.wait([copy.ticket for copy in copies], 60)
            return time.perf_counter() - began

        for _ in range(10):  # each way is tried, then the choice stands
            run(load()), run(store())
        up, down, both = (min(run(*make()) for _ in range(ROUNDS)) for make in
                          (lambda: [load()], lambda: [store()], lambda: [load(), store()]))  # fmt: skip
        first, whole = by_layer(engine, load, num_layers, device)
        return {
            "page_bytes": page_bytes,
            "layers": num_layers,
            "to_device_GB_per_s": round(num_pages * page_bytes / up / 1e9, 2),
            "to_host_GB_per_s": round(num_pages * page_bytes / down / 1e9, 2),
            "both / one": round((up + down) / both, 2),
            "first layer x layers / whole": round(first / up * num_layers, 2),
            "all layers / whole": round(whole / up, 2),
            "matmul slowed by": round(slowed(engine, load, device), 3),
        }


def by_layer(
    engine: TransferEngine, load: Callable[[], Copy], num_layers: int, device: torch.device
) -> tuple[float, float]:
    """Fastest seconds until a stream that waits for the first layer, and for the last, goes on."""
    times: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 10):
        copy = load()
        began = time.perf_counter()
        engine.submit_by_layer([copy])
        ends = []
        for layer in (0, num_layers - 1):
            engine.wait_layer([copy.ticket], layer, 60)
            wait_for_stream(device)
            ends.append(time.perf_counter() - began)
        engine.wait([copy.ticket], 60)
        times.append((ends[0], ends[1]))
    best = times[10:]
    return min(first for first, _ in best), min(last for _, last in best)


def slowed(engine: TransferEngine, load: Callable[[], Copy], device: torch.device) -> float:
    """By which share a row of matrix products takes longer while loads run."""
    left = torch.randn((8192, 8192), device=device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(20):
            left @ left

    alone = fastest(device, products)
    beside = []
    for _ in range(ROUNDS):
        copies = [load() for _ in range(4)]
        for copy in copies:
            engine.submit(copy)
        beside.append(fastest_once(device, products))
        engine.wait([copy.ticket for copy in copies], 60)
    return statistics.median(beside) / alone - 1


def fastest_once(device: torch.device, work: Callable[[], Any]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    wait_for_stream(device)
    return began.elapsed_time(ended) / 1e3


if __name__ == "__main__":
    sys.exit(main())
