"""How close copies between L1 and L2 come to one memcpy of the same bytes, on the CPU.

    python benchmarks/copy_cpu.py [--mib 256] [--rounds 9] [--fastest]

Every round times the memcpy and each copy back to back, so that a change of the machine's load hits
both; a line gives the median over the rounds of memcpy time / copy time (1.00: as fast as memcpy). On a
machine that others keep busy, ``--fastest`` compares the fastest round of each instead: with all cores
taken, two threads have no more than the memcpy's one.
The reference is libc's memmove of one block, in one thread. Target: 0.80 for scattered slots of at
least 64 KiB.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.transfer.copy import PageCopier
from hicache.transfer.layout import Layout, SlotView
from hicache.types import ComponentSpec, Tier

SHAPES = ((4 << 10, 1), (16 << 10, 4), (64 << 10, 1), (64 << 10, 8), (64 << 10, 32), (256 << 10, 8), (1 << 20, 12), (19 << 20, 36))  # fmt: skip
"""Bytes of a slot, layers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=256, help="bytes a copy moves")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--fastest", action="store_true", help="compare the fastest rounds, not the median")
    arguments = parser.parse_args()
    total_bytes = arguments.mib << 20
    way = "fastest" if arguments.fastest else "median"
    with PageCopier() as copier:
        print(f"memcpy time / copy time; {arguments.mib} MiB a copy; {way} of {arguments.rounds} rounds")
        print("slot KiB  layers  slots        to host   to device   naive loop   memcpy GB/s")
        for slot_bytes, num_layers in SHAPES:
            for line in measure(
                copier, slot_bytes, num_layers, total_bytes, arguments.rounds, fastest=arguments.fastest
            ):
                print(line, flush=True)


def measure(
    copier: PageCopier,
    slot_bytes: int,
    num_layers: int,
    total_bytes: int,
    num_rounds: int,
    *,
    fastest: bool,
) -> Iterator[str]:
    layer_bytes = slot_bytes // num_layers // 8 * 8
    spec = ComponentSpec("full", num_layers=num_layers, bytes_per_token=layer_bytes * num_layers)
    num_slots = max(4, total_bytes // spec.bytes_per_token)
    pool_slots = 2 * num_slots
    device = torch.ones((num_layers, pool_slots, layer_bytes), dtype=torch.uint8)
    host = torch.ones((pool_slots, num_layers, layer_bytes), dtype=torch.uint8)
    layout = Layout((spec,), 1, device={"full": device}, host={"full": host})
    l1, l2 = layout.view("full", Tier.DEVICE), layout.view("full", Tier.HOST)
    moved_bytes = num_slots * spec.bytes_per_token
    block = torch.ones(2 * moved_bytes, dtype=torch.uint8)

    def memcpy() -> None:
        ctypes.memmove(block.data_ptr(), block.data_ptr() + moved_bytes, moved_bytes)

    random = np.random.default_rng(1)
    for name, source, target in slot_patterns(random, num_slots):
        candidates: list[Callable[[], None]] = [
            memcpy,
            lambda s=source, t=target: copier.copy(l1, s, l2, t),  # type: ignore[misc]
            lambda s=source, t=target: copier.copy(l2, s, l1, t),  # type: ignore[misc]
            lambda s=source, t=target: page_by_page(l1, s, l2, t),  # type: ignore[misc]
        ]
        seconds = [[timed(candidate) for candidate in candidates] for _ in range(num_rounds + 1)][1:]
        if fastest:
            best = [min(row[i] for row in seconds) for i in range(4)]
            ratios = [best[0] / best[i] for i in (1, 2, 3)]
        else:
            ratios = [statistics.median(row[0] / row[i] for row in seconds) for i in (1, 2, 3)]
        speed = moved_bytes / statistics.median(row[0] for row in seconds) / 1e9
        kib = spec.bytes_per_token / 1024
        yield f"{kib:8.0f}  {num_layers:6}  {name:11}  {ratios[0]:7.2f}  {ratios[1]:10.2f}  {ratios[2]:11.2f}  {speed:12.1f}"


def slot_patterns(
    random: np.random.Generator, num_slots: int
) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
    def scattered() -> NDArray[np.int64]:
        return random.permutation(2 * num_slots)[:num_slots].astype(np.int64)

    def eights() -> NDArray[np.int64]:
        starts = random.permutation(2 * num_slots // 8)[: num_slots // 8] * 8
        return np.asarray((starts[:, None] + np.arange(8)).reshape(-1), dtype=np.int64)

    yield "scattered", scattered(), scattered()
    if num_slots % 8 == 0:
        yield "runs of 8", eights(), eights()
    yield "one run", np.arange(num_slots), np.arange(num_slots)


def page_by_page(source: SlotView, source_slots: NDArray[np.int64], target: SlotView, target_slots: NDArray[np.int64]) -> None:  # fmt: skip
    for s, t in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
        target.payload[t].copy_(source.payload[s])


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
