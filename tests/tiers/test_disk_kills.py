"""A writer is killed fifty times at random moments; what it had acknowledged is there, and nothing is wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hicache.testing.disk_folder import bytes_in, owners_in, pages_in, run_on_disk
from hicache.testing.store_pages import make_page, make_target
from hicache.tiers.disk import DiskStore
from hicache.tiers.folder_state import OVERHEAD_BYTES
from hicache.tiers.store import StoredPage

NUM_KILLS = 50
SIZES = (300, 5000, 40_000, 66_000)
BATCH = 6

# The writer forks a child for each round: a fresh process, without the imports' half second each time. A
# child says "put N" after the store has acknowledged batch N, and "del N" once batch N is deleted.
WRITER = """
import asyncio, os, sys
sys.path.insert(0, os.path.dirname(sys.argv[0]))
from hicache.tiers import page_ledger
from hicache.tiers.disk import DiskStore
from hicache.testing.store_pages import make_page

def batch(n, sizes, count):
    return [make_page(f"{n} {i}", None if i == 0 else f"{n} {i-1}", num_bytes=sizes[(n + i) % len(sizes)])
            for i in range(count)]

async def write(folder, capacity, first, sizes, count, out):
    store = DiskStore(folder, capacity, num_threads=2, direct=direct)
    await store.open()
    n = first
    while True:
        answers = await store.put(batch(n, sizes, count))
        os.write(out, f"put {n} {sum(answers)}\\n".encode())
        if n % 5 == 4:
            keys = [page.key for page in batch(n - 3, sizes, count)]
            os.write(out, f"deleting {n - 3}\\n".encode())
            await store.delete(keys)
        n += 1

folder, capacity, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
page_ledger.WINDOW_PAGES = int(sys.argv[5])
direct = sys.argv[6] == "True"
sizes = [int(size) for size in sys.argv[4].split(",")]
for line in sys.stdin:
    first = int(line)
    child = os.fork()
    if child == 0:
        asyncio.run(write(folder, capacity, first, sizes, count, 1))
    os.write(1, f"child {child}\\n".encode())  # at once: the child writes to the same pipe
    os.waitpid(child, 0)
    os.write(1, b"gone\\n")
"""


def batch(n: int) -> list[StoredPage]:
    return [
        make_page(f"{n} {i}", None if i == 0 else f"{n} {i - 1}", num_bytes=SIZES[(n + i) % len(SIZES)])
        for i in range(BATCH)
    ]


class Writer:
    """The parent of the children that are killed, and what these have acknowledged."""

    def __init__(self, folder: Path, capacity_bytes: int, window_pages: int, *, direct: bool) -> None:
        sizes = ",".join(map(str, SIZES))
        command = [
            sys.executable,
            "-c",
            WRITER,
            str(folder),
            str(capacity_bytes),
            str(BATCH),
            sizes,
            str(window_pages),
            str(direct),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.acknowledged: set[int] = set()
        self.next = 0

    def run_and_kill(self, num_batches: int, delay_s: float) -> None:
        """Let a child write some batches, and then a little more, and kill it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{self.next}\n")
        self._process.stdin.flush()
        child, num_seen, is_killed = 0, 0, False
        for line in self._process.stdout:
            verb, *rest = line.split()
            if verb == "child":
                child = int(rest[0])
            elif verb == "put":
                assert int(rest[1]) == BATCH, "there was room"
                self.acknowledged.add(int(rest[0]))
                self.next = max(self.next, int(rest[0]) + 1)
                num_seen += 1
            elif verb == "deleting":
                self.acknowledged.discard(int(rest[0]))
            else:
                assert verb == "gone"
                break
            if child and num_seen >= num_batches and not is_killed:
                time.sleep(delay_s)  # where in the next batch the kill falls is what is random here
                os.kill(child, signal.SIGKILL)
                is_killed = True
        assert is_killed
        self.next += 1  # the batch that was under way may be there in part

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=30) == 0
        self._process.stdout.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("capacity_bytes", "num_recent", "window_pages", "direct"),
    [
        pytest.param(256 << 20, 10**6, 1024, False, id="roomy"),
        pytest.param(4 << 20, 5, 1024, False, id="full"),
        pytest.param(256 << 20, 10**6, 3, False, id="two-windows-at-a-time"),
        pytest.param(4 << 20, 5, 3, True, id="full-past-the-page-cache"),
    ],
)
def test_fifty_kills_lose_nothing_that_was_acknowledged(
    root: Path,
    seeded_random: random.Random,
    capacity_bytes: int,
    num_recent: int,
    window_pages: int,
    *,
    direct: bool,
) -> None:
    """In the full store every write evicts and takes a used slot; what was written last must be there."""
    writer = Writer(root, capacity_bytes, window_pages, direct=direct)
    try:
        for _ in range(NUM_KILLS):
            writer.run_and_kill(seeded_random.randint(1, 4), seeded_random.random() * 0.01)
    finally:
        writer.close()
    assert len(writer.acknowledged) > 50
    expected = set(sorted(writer.acknowledged)[-num_recent:])

    async def test(store: DiskStore) -> None:
        assert owners_in(root) == 1
        lost = set()
        for n in range(writer.next):
            pages = batch(n)
            targets = [make_target(page.key, page.payload.nbytes) for page in pages]
            hits = await store.get(targets)
            assert hits == sorted(hits, reverse=True), "no suffix without its prefix"
            for page, target, hit in zip(pages, targets, hits, strict=True):
                assert not hit or target.payload == page.payload
            if n in expected and not all(hits):
                lost.add(n)
        assert lost == set()
        stats = store.stats()
        assert (stats.pages_corrupt, stats.errors) == (0, {})
        there = pages_in(root)
        assert stats.num_pages == len(there)
        assert stats.used_bytes == sum(entry.size_bytes for entry in there.values()) <= capacity_bytes
        retained_bytes = store.pages.ledger.slots.retained_bytes
        assert bytes_in(root) <= stats.used_bytes + retained_bytes + OVERHEAD_BYTES
        assert bytes_in(root) <= capacity_bytes + OVERHEAD_BYTES
        assert await store.clear() == len(there)
        assert bytes_in(root) <= OVERHEAD_BYTES

    run_on_disk(root, test, capacity_bytes, direct=direct)
