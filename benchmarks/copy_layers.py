"""How soon a load's first layer is there, against the whole load (DESIGN section 6; issue: <= 1.5 / layers).

::

    python benchmarks/copy_layers.py [--mib 128] [--rounds 9]

Each line: time to the first layer / time of a whole load of the same pages, times the number of layers (1.00:
exactly its share; wanted at most 1.5), and time of all layers one by one / time of the whole load. Both go through
the transfer engine and its CPU stream, whole and by layer in turn; the fastest round of each counts.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from hicache.clock import MonotonicClock
from hicache.radix.actions import Copy
from hicache.transfer.engine import TransferEngine
from hicache.types import ComponentSpec, TicketId, Tier

SHAPES = ((64 << 10, 8), (64 << 10, 32), (256 << 10, 8), (256 << 10, 32), (1 << 20, 12), (2 << 20, 64))
"""Bytes of a page over all layers, layers."""
LIMIT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=128, help="bytes a load moves")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    print(f"{arguments.mib} MiB a load, scattered pages; fastest of {arguments.rounds} rounds")
    print("page KiB  layers  pages   first layer x layers   all layers / whole   whole GB/s")
    for page_bytes, num_layers in SHAPES:
        print(measure(page_bytes, num_layers, arguments.mib << 20, arguments.rounds), flush=True)


def measure(page_bytes: int, num_layers: int, total_bytes: int, num_rounds: int) -> str:
    spec = ComponentSpec("full", num_layers=num_layers, bytes_per_token=page_bytes)
    num_pages = max(4, total_bytes // page_bytes)
    device = torch.ones((num_layers, 2 * num_pages, page_bytes // num_layers), dtype=torch.uint8)
    host = torch.ones((2 * num_pages, num_layers, page_bytes // num_layers), dtype=torch.uint8)
    random = np.random.default_rng(1)
    with TransferEngine(
        specs=(spec,), page_size=1, device={"full": device}, host={"full": host}, store=None,
        clock=MonotonicClock(), store_queue_bytes=0, prefetch_queue_bytes=0, store_timeout_s=1.0,
    ) as engine:  # fmt: skip
        whole, first, every = [], [], []
        for number in range(num_rounds + 1):
            source, target = (
                random.permutation(2 * num_pages)[:num_pages].astype(np.int64) for _ in range(2)
            )
            copies = [
                Copy(TicketId(2 * number + i), "full", Tier.HOST, source, Tier.DEVICE, target) for i in (0, 1)
            ]
            began = time.perf_counter()
            engine.submit(copies[0])
            engine.wait([copies[0].ticket], LIMIT_S)
            whole.append(time.perf_counter() - began)
            began = time.perf_counter()
            engine.submit_by_layer([copies[1]])
            engine.wait_layer([copies[1].ticket], 0, LIMIT_S)
            first.append(time.perf_counter() - began)
            engine.wait([copies[1].ticket], LIMIT_S)
            every.append(time.perf_counter() - began)
            assert all(done.is_complete for done in engine.completions())
    best, soon, layered = (min(times[1:]) for times in (whole, first, every))  # the first one warms up
    speed = num_pages * page_bytes / best / 1e9
    return (
        f"{page_bytes >> 10:8}  {num_layers:6}  {num_pages:5}   {soon / best * num_layers:20.2f}   "
        f"{layered / best:18.2f}   {speed:10.1f}"
    )


if __name__ == "__main__":
    main()
