"""What the SGLang backend gives of its store's speed, beside SGLang's own file backend.

    .venv-sglang/bin/python benchmarks/engine_sglang.py [--pages 32] [--repeat 5] [--layout page_first]

One batch of pages (16 layers, 8 heads of 128, bfloat16, 64 tokens: 4 MiB a page) out of SGLang's host pool and back, files in the
page cache. Ways: ours by ``batch_set_v1`` and ``batch_get_v1``; our disk store alone, from memory in which each page is one run
(what copying nothing would give); SGLang's ``HiCacheFile`` by the generic calls, as its controller makes them. The ways alternate;
the best of all rounds counts. Every page that comes back is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from hicache.testing import sglang_pools
from hicache.testing.sglang_released import import_sglang
from hicache.testing.sglang_rig import SglangRig, storage_config
from hicache.tiers.disk import DiskStore
from hicache.tiers.store import PageTarget, StoredPage
from hicache.types import PageKey

PAGE_TOKENS = 64


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pages", type=int, default=32)
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--layout", default="page_first")
    given = options.parse_args()
    sglang_pools.HEADS = 8
    pool = sglang_pools.mha_pool(
        given.layout, page_size=PAGE_TOKENS, num_pages=2 * given.pages, num_layers=16, head_size=128
    )
    sglang_pools.fill(pool, 1)
    total = given.pages * len(sglang_pools.page_of(pool, 0))
    print(
        f"{given.layout}, {given.pages} pages, {total / 2**20:.0f} MiB, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    best: dict[tuple[str, str], float] = {}
    for number in range(given.repeat):
        for name, measure in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                for what, seconds in measure(pool, given.pages, folder, f"r{number}").items():
                    best[name, what] = min(best.get((name, what), 1e9), seconds)
            check(pool, given.pages)
    reference = {what: best["store alone", what] for what in ("write", "read")}
    for (name, what), seconds in best.items():
        print(
            f"{name:12} {what:6} {total / seconds / 1e9:6.2f} GB/s   {reference[what] / seconds:5.2f} of the store alone"
        )


def check(pool: Any, num_pages: int) -> None:
    for number in (0, num_pages // 2, num_pages - 1):
        assert sglang_pools.page_of(pool, number) == sglang_pools.page_of(pool, num_pages + number)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def ours(pool: Any, num_pages: int, folder: str, prefix: str) -> dict[str, float]:
    hashes = [f"{prefix}{number}" for number in range(num_pages)]
    disk = {"kind": "disk", "path": folder, "capacity": "8GiB"}
    with SglangRig(
        storage_config(disk, extra={"policy": {"store_timeout": "60s", "wait_limit": "60s"}}), pool
    ) as rig:
        rig.put(["a", "b"], [0, 1]), rig.get(["a", "b"], [0, 1])  # a server has its staging by then
        write = timed(lambda: rig.put(hashes, list(range(num_pages))))
        read = timed(lambda: rig.get(hashes, list(range(num_pages, 2 * num_pages))))
    return {"write": write, "read": read}


def alone(pool: Any, num_pages: int, folder: str, prefix: str) -> dict[str, float]:
    pages = [bytearray(sglang_pools.page_of(pool, number)) for number in range(num_pages)]
    back = [bytearray(len(page)) for page in pages]
    keys = [PageKey(f"{prefix}{number}".encode().ljust(32)) for number in range(num_pages)]

    async def run() -> dict[str, float]:
        store = DiskStore(folder)
        await store.open()
        began = time.perf_counter()
        assert all(
            await store.put(
                [StoredPage(key, None, "kv", memoryview(page)) for key, page in zip(keys, pages, strict=True)]
            )
        )
        middle = time.perf_counter()
        assert all(
            await store.get(
                [PageTarget(key, "kv", memoryview(page)) for key, page in zip(keys, back, strict=True)]
            )
        )
        ended = time.perf_counter()
        await store.close()
        assert back == pages
        return {"write": middle - began, "read": ended - middle}

    return asyncio.run(run())


def theirs(pool: Any, num_pages: int, folder: str, prefix: str) -> dict[str, float]:
    file = import_sglang().storage.HiCacheFile(storage_config(extra={"tiers": None}), folder)
    hashes = [f"{prefix}{number}" for number in range(num_pages)]

    def write() -> None:
        packed = [pool.get_data_page(number * PAGE_TOKENS) for number in range(num_pages)]
        assert file.batch_set(hashes, packed)

    def read() -> None:
        places = [pool.get_dummy_flat_data_page() for _ in hashes]
        for number, page in enumerate(file.batch_get(hashes, places)):
            pool.set_from_flat_data_page((num_pages + number) * PAGE_TOKENS, page)

    return {"write": timed(write), "read": timed(read)}


WAYS = {"ours": ours, "HiCacheFile": theirs, "store alone": alone}

if __name__ == "__main__":
    main()
