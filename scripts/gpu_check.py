"""Check and measure everything that needs a GPU: under 4 minutes, no network, one JSON.

::

    python scripts/gpu_check.py [--out gpu_check.json] [--device 0] [--seconds 230]

In order: every way to copy, loads and copies down beside compute, whole caches under pressure, all tests marked
``gpu``, then speed. The JSON is written after each of them, and a fault in one is no reason to leave out the next:
``errors`` names it. ``reached`` has the worst case of each target. Exit code: 0 all right; 1 something is wrong; 2 the arguments are; 3 there is no CUDA device here.

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
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache.clock import MonotonicClock
from hicache.radix.actions import Copy
from hicache.testing.device_checks import Checked, Pools, all_checks, paths_of, wait_for_stream
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
MANY_PAGES = 1000
LARGE_BYTES = 16 << 20
"""From here on a copy's start counts for nothing."""
ENGINE_BYTES = 512 << 20
MATRIX = 8192
CHECKS_SHARE, TESTS_SHARE = 0.35, 0.2
"""Of the time."""
ENGINE_S, TABLE_S = 15.0, 20.0
"""What is not begun when less than so many seconds are left."""


def main() -> int:
    parser = argparse.ArgumentParser(description="check and measure what needs a GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=230.0, help="after this nothing more is begun")
    parser.add_argument("--cpu", action="store_true", help="only the checks, on CPU tensors")
    arguments = parser.parse_args()
    report = Report(arguments.out)
    if not arguments.cpu and arguments.device >= (
        torch.cuda.device_count() if torch.cuda.is_available() else 0
    ):
        report.facts["machine"]["device"] = None
        report.write()
        print(
            f"there is no CUDA device {arguments.device} here; hicache doctor says why. --cpu checks the rest"
        )
        return NO_DEVICE
    if arguments.cpu:
        checks(torch.device("cpu"), report, num_rounds=10, seconds=arguments.seconds)
    else:
        device = torch.device("cuda", arguments.device)
        torch.cuda.set_device(device)
        report.facts["machine"]["device"] = torch.cuda.get_device_name(device)
        # On a stream of its own: not all that copies do is allowed in the default one.
        with torch.cuda.stream(torch.cuda.Stream(device)):
            everything(device, report, arguments.seconds)
    is_right = report.close()
    seconds = report.facts["seconds"]
    print(f"{'all right' if is_right else 'WRONG'} after {seconds} s; see {arguments.out}")
    return 0 if is_right else 1


class Report:
    """What came out so far. Written after each stage: whoever stops the script finds what it knew."""

    def __init__(self, path: Path) -> None:
        self.began = time.monotonic()
        self._path = path
        self.facts: dict[str, Any] = {
            "machine": machine(), "targets": TARGETS, "left_out": [], "checks": [], "errors": {},
            "is_right": False,
        }  # fmt: skip

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def stage(self, name: str, work: Callable[[], object]) -> None:
        """Do a part; a fault in it is noted, and the next one begins."""
        try:
            work()
        except Exception:  # noqa: BLE001  whatever it is, it is in the report
            self.facts["errors"][name] = traceback.format_exc()[-4000:]
            print(f"{name}: {self.facts['errors'][name]}", file=sys.stderr, flush=True)
        self.write()

    def close(self) -> bool:
        """Whether all was right."""
        facts = self.facts
        is_right = bool(facts["checks"]) and not facts["errors"]
        is_right &= not any(each["wrong"] for each in facts["checks"])
        is_right &= facts.get("gpu_tests", {"code": 0})["code"] == 0
        facts["is_right"] = is_right
        self.write()
        return is_right

    def write(self) -> None:
        self.facts["seconds"] = round(self.seconds, 1)
        self._path.write_text(json.dumps(self.facts, indent=1))


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def everything(device: torch.device, report: Report, seconds: float) -> None:
    """Checks, tests and speed, each within its share of the time."""
    checks(device, report, num_rounds=100, seconds=CHECKS_SHARE * seconds)

    def test() -> None:
        report.facts["gpu_tests"] = gpu_tests(max(20.0, TESTS_SHARE * seconds))

    report.stage("gpu tests", test)
    speed(device, report, seconds)
    report.facts["reached"] = reached(report.facts)


def checks(device: torch.device, report: Report, *, num_rounds: int, seconds: float) -> None:
    """Every check; after so many seconds those that are left make one round."""

    def is_over() -> bool:
        return report.seconds > seconds

    def each(check: Callable[[], Checked]) -> None:
        checked = check()
        report.facts["checks"].append(asdict(checked))
        print(f"{checked.name}: {checked.num_cases} cases, {len(checked.wrong)} wrong", flush=True)

    for number, check in enumerate(all_checks(device, num_rounds=num_rounds, is_over=is_over)):
        report.stage(f"check {number}", partial(each, check))


def gpu_tests(limit_s: float) -> dict[str, Any]:
    """All tests that need a device. Only their files are read, and plugins may be missing: a bare machine has neither all engines nor all tools."""
    files = [
        str(path) for path in sorted(TESTS.rglob("test_*.py")) if "\n@pytest.mark.gpu\n" in path.read_text()
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning", *files]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"code": 124, "output": f"not done after {limit_s:.0f} s"}
    return {"code": done.returncode, "output": (done.stdout + done.stderr)[-4000:]}


# ---- speed -----------------------------------------------------------------------------------------------------------
def speed(device: torch.device, report: Report, end_s: float) -> None:
    """What concerns whole engines, and the bandwidth table; what does not fit the time is named in ``left_out``."""
    facts: dict[str, list[dict[str, Any]]] = {"engine": [], "paths": []}
    report.facts["speed"] = facts
    for page_bytes, num_layers in PAGES:
        name = f"engine with pages of {page_bytes}"
        if report.seconds > end_s - ENGINE_S:
            report.facts["left_out"].append(name)
            continue
        report.stage(
            name, lambda of=(page_bytes, num_layers): facts["engine"].append(engine_speed(device, *of))
        )
    for page_bytes, num_layers in PAGES:
        for total in (*TOTALS, MANY_PAGES * page_bytes) if page_bytes == PAGES[0][0] else TOTALS:
            name = f"pages of {page_bytes}, {total} bytes"
            if report.seconds > end_s - TABLE_S:
                report.facts["left_out"].append(name)
                continue
            of = page_bytes, num_layers, total
            report.stage(name, lambda of=of: facts["paths"].extend(paths_table(device, *of)))


def reached(facts: dict[str, Any]) -> dict[str, float]:
    """The worst case of each target, by the best way where there are several; nothing of what was not measured."""
    engines = facts["speed"]["engine"]
    rows = [row for row in facts["speed"]["paths"] if "error" not in row]
    best: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        best.setdefault((row["direction"], row["page_bytes"], row["bytes"]), []).append(row)
    shares = [
        max(row["path / memcpy"] for row in group) for of, group in best.items() if of[2] >= LARGE_BYTES
    ]
    many = [
        min(row["host us a batch"] for row in group)
        for group in best.values()
        if group[0]["pages"] == MANY_PAGES
    ]
    found = {
        "path / memcpy": min(shares, default=None),
        "host us a batch of 1000 pages": max(many, default=None),
        "both / one": min((each["both / one"] for each in engines), default=None),
        "matmul slowed by": max((each["matmul slowed by"] for each in engines), default=None),
        "first layer x layers / whole": max(
            (each["first layer x layers / whole"] for each in engines), default=None
        ),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


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
            memcpy_s = fastest(lambda pair=pair: pair[0].copy_(pair[1], non_blocking=True))
            source, target = (on_device, on_host) if to_host else (on_host, on_device)
            tables = [shuffle.permutation(2 * num_pages)[:num_pages].astype(np.int64) for _ in range(2)]
            batch = Batch(source, tables[0], target, tables[1], to_host)
            for path in paths_of(device):
                if not path.can_copy(batch):
                    continue
                row = {
                    "path": path.name,
                    "direction": "to_host" if to_host else "to_device",
                    "page_bytes": page_bytes,
                    "layers": num_layers,
                    "pages": num_pages,
                    "bytes": batch.num_bytes,
                }
                try:
                    seconds, host_s = timed_path(path, batch)
                except Exception as error:  # noqa: BLE001  the other ways are to be measured all the same
                    yield row | {"error": repr(error)}
                    continue
                yield row | {
                    "GB_per_s": round(batch.num_bytes / seconds / 1e9, 2),
                    "path / memcpy": round(memcpy_s / seconds, 3),
                    "host us a batch": round(host_s * 1e6, 1),
                }


def timed_path(path: CopyPath, batch: Batch) -> tuple[float, float]:
    """Fastest seconds on the device, and median seconds of the host until it was given."""
    host: list[float] = []

    def copy() -> None:
        began = time.perf_counter()
        path.copy(batch)
        host.append(time.perf_counter() - began)

    return fastest(copy), statistics.median(host)


def fastest(work: Callable[[], Any]) -> float:
    """The fastest of a few rounds; the first one warms up."""
    return min([timed(work) for _ in range(ROUNDS + 1)][1:])


def timed(work: Callable[[], Any]) -> float:
    """Seconds on the current stream, by events."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def engine_speed(device: torch.device, page_bytes: int, num_layers: int) -> dict[str, Any]:
    """Both directions at once, the first layer, and a matrix product beside a load."""
    spec = ComponentSpec("c", num_layers=num_layers, bytes_per_token=page_bytes)
    num_pages = ENGINE_BYTES // page_bytes
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
            seconds = time.perf_counter() - began
            all_done(engine, len(copies))
            return seconds

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


def all_done(engine: TransferEngine, count: int) -> None:
    """So many copies have ended, and well: one that failed would be the fastest of all."""
    ended = engine.completions()
    if len(ended) != count or not all(each.is_complete for each in ended):
        raise RuntimeError(f"{count} copies were to end, and ended as {ended}")


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
        all_done(engine, 1)
        times.append((ends[0], ends[1]))
    best = times[10:]
    return min(first for first, _ in best), min(last for _, last in best)


def slowed(engine: TransferEngine, load: Callable[[], Copy], device: torch.device) -> float:
    """By which share a row of matrix products takes longer while loads run."""
    left = torch.randn((MATRIX, MATRIX), device=device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(20):
            left @ left

    alone = fastest(products)
    beside = []
    for _ in range(ROUNDS):
        copies = [load() for _ in range(4)]
        for copy in copies:
            engine.submit(copy)
        beside.append(timed(products))
        engine.wait([copy.ticket for copy in copies], 60)
        all_done(engine, len(copies))
    return statistics.median(beside) / alone - 1


if __name__ == "__main__":
    sys.exit(main())
