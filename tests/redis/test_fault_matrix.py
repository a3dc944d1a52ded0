"""Every fault at every store, in the middle of a verified replay: it ends, no byte is wrong, counters explain the loss.

Rounds 1 and 2 are whole, the fault begins in round 3 and ends before round 5; by round 7 everything is found again, and
where the machine is so busy that a call runs into its limit once more, in one of the two after it.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hicache.replay.result import ReplayResult
from hicache.replay.run import replay
from hicache.testing.redis_caches import PAGE_TOKENS, rounds, small_config
from hicache.testing.redis_server import RedisServer
from hicache.testing.store_pages import Corruption, spoil
from hicache.testing.tcp_proxy import TcpProxy
from hicache.tiers.frames import Frame, gather, scatter
from hicache.tiers.segment_files import SegmentFiles
from hicache.tiers.store import StoreStats

pytestmark = pytest.mark.redis

NUM_ROUNDS = 9
NUM_PROMPTS = 20
NUM_PAGES = 8
FULL = NUM_PAGES * PAGE_TOKENS / (NUM_PAGES * PAGE_TOKENS + 1)
LARGE_PAGE_BYTES = 36 << 10
"""Pages from 32 KiB on go past the page cache."""
LARGE = {
    "model__components__full__bytes_per_token": LARGE_PAGE_BYTES // PAGE_TOKENS,
    "tiers__device__capacity": 40 * LARGE_PAGE_BYTES,
    "tiers__host__capacity": 60 * LARGE_PAGE_BYTES,
}
PATIENCE = {"backoff": "10ms", "backoff_max": "10ms", "jitter": 0}


@dataclass
class Bench:
    """One replay's stores, and the hands on them."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    server: RedisServer
    proxy: TcpProxy
    waiting: threading.Event = field(default_factory=threading.Event)

    def disk(self) -> dict[str, object]:
        return {"kind": "disk", "path": str(self.folder / "pages"), "capacity": "4MiB", "breaker": PATIENCE}

    def direct(self) -> dict[str, object]:
        return {**self.disk(), "direct": True, "capacity": "64MiB"}

    def redis(self) -> dict[str, object]:
        url = f"redis://127.0.0.1:{self.proxy.port}"
        return {"kind": "redis", "url": url, "timeout": "700ms", "breaker": PATIENCE}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(tmp_path / "redis"))
        proxy = stack.enter_context(TcpProxy(server.port))
        yield Bench(tmp_path, monkeypatch, server, proxy)


Act = Callable[[Bench], None]
Reads = Generator[tuple[int, OSError | None], None, None]


def nothing(_bench: Bench) -> None:
    pass


# ---- the disk ----------------------------------------------------------------------------------------------------------
def on_read(change: Callable[[Sequence[Frame]], None]) -> Act:
    """Do something to what was read."""

    def begin(bench: Bench) -> None:
        read_many = SegmentFiles.read_many

        def changed(files: SegmentFiles, runs: Sequence[Sequence[Frame]]) -> Reads:
            for number, error in read_many(files, runs):
                change(runs[number])
                yield number, error

        bench.monkeypatch.setattr(SegmentFiles, "read_many", changed)

    return begin


def fail_reads(bench: Bench) -> None:
    def fail(_files: SegmentFiles, runs: Sequence[Sequence[Frame]]) -> Reads:
        for number in range(len(runs)):
            yield number, OSError(errno.EIO, os.strerror(errno.EIO))

    bench.monkeypatch.setattr(SegmentFiles, "read_many", fail)


def fail_writes(number: int) -> Act:
    def begin(bench: Bench) -> None:
        def fail(_files: SegmentFiles, _frames: Sequence[Frame]) -> None:
            raise OSError(number, os.strerror(number))

        bench.monkeypatch.setattr(SegmentFiles, "write", fail)

    return begin


def fail_all(bench: Bench) -> None:
    fail_reads(bench)
    fail_writes(errno.EIO)(bench)


def cut_short(frames: Sequence[Frame]) -> None:
    for frame in frames:
        frame.payload[len(frame.payload) // 2 :] = bytes(len(frame.payload) - len(frame.payload) // 2)


def flip(frames: Sequence[Frame]) -> None:
    for frame in frames:
        frame.payload[0] ^= 1


class OtherPage:
    """Hands out the first page that was read in place of all others."""

    def __init__(self) -> None:
        self._first: tuple[bytes, bytes] | None = None

    def __call__(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if self._first is None:
                self._first = bytes(frame.header), bytes(frame.payload)
            elif len(frame.payload) == len(self._first[1]):
                memoryview(frame.header)[:], frame.payload[:] = self._first


def slow(_frames: Sequence[Frame]) -> None:
    time.sleep(0.002)  # a hundred times what a read of the page cache takes


def hang(bench: Bench) -> None:
    read_many = SegmentFiles.read_many

    def stuck(files: SegmentFiles, runs: Sequence[Sequence[Frame]]) -> Reads:
        bench.waiting.wait(60)
        return read_many(files, runs)

    bench.waiting.clear()
    bench.monkeypatch.setattr(SegmentFiles, "read_many", stuck)


def unpatch(bench: Bench) -> None:
    bench.waiting.set()
    bench.monkeypatch.undo()


def remove_folder(bench: Bench) -> None:
    shutil.rmtree(bench.folder / "pages")


DISK: dict[str, tuple[Act, Act]] = {
    "no space": (fail_writes(errno.ENOSPC), unpatch),
    "I/O error": (fail_all, unpatch),
    "short read": (on_read(cut_short), unpatch),
    "flipped bit": (on_read(flip), unpatch),
    "header of another key": (on_read(OtherPage()), unpatch),
    "slow": (on_read(slow), unpatch),
    "hang": (hang, unpatch),
    "folder deleted": (remove_folder, nothing),
}


# ---- Redis -------------------------------------------------------------------------------------------------------------
def spoilt(how: Corruption) -> Act:
    def begin(bench: Bench) -> None:
        for name in bench.server.names()[::3]:
            raw = spoil(bench.server.ask("GET", name), how)
            assert raw is not None
            bench.server.ask("SET", name, raw)

    return begin


def set_memory(num_bytes: int) -> Act:
    def act(bench: Bench) -> None:
        bench.server.ask("CONFIG", "SET", "maxmemory", num_bytes)

    return act


def restart(bench: Bench) -> None:
    bench.server.kill()
    bench.server.start()


REDIS: dict[str, tuple[Act, Act]] = {
    "no space": (set_memory(1), set_memory(0)),
    "short read": (spoilt(Corruption.TRUNCATED), nothing),
    "flipped bit": (spoilt(Corruption.FLIPPED_PAYLOAD), nothing),
    "header of another key": (spoilt(Corruption.OTHER_KEY), nothing),
    "slow": (lambda bench: bench.proxy.slow_down(0.01), lambda bench: bench.proxy.slow_down(0)),
    "hang": (lambda bench: bench.proxy.hold(), lambda bench: bench.proxy.release()),
    "connection reset": (lambda bench: bench.proxy.reset(), lambda bench: bench.proxy.accept()),
    "wrong password": (
        lambda bench: bench.server.change_password("changed"),
        lambda bench: bench.server.change_password(None),
    ),
    "server restart": (restart, nothing),
}

STORES: dict[str, Callable[[Bench], list[dict[str, object]]]] = {
    "disk": lambda bench: [bench.disk()],
    "direct": lambda bench: [bench.direct()],
    "redis": lambda bench: [bench.redis()],
    "stacked": lambda bench: [bench.disk(), bench.redis()],
}
MATRIX = [
    *(pytest.param("disk", *acts, id=f"disk: {name}") for name, acts in DISK.items()),
    *(pytest.param("direct", *acts, id=f"disk past the page cache: {name}") for name, acts in DISK.items()),
    *(pytest.param("redis", *acts, id=f"redis: {name}") for name, acts in REDIS.items()),
    *(pytest.param("stacked", *acts, id=f"stacked: {name} of the disk") for name, acts in DISK.items()),
    *(pytest.param("stacked", *acts, id=f"stacked: {name} of Redis") for name, acts in REDIS.items()),
]


def trouble(stats: StoreStats) -> int:
    """What a store and those of a stack counted that can shorten a hit."""
    own = stats.pages_missed + stats.pages_corrupt + stats.pages_refused + sum(stats.errors.values())
    rejected = 0 if stats.breaker is None else stats.breaker.num_rejected
    return own + rejected + sum(trouble(store) for store in stats.stores)


def has_direct_io(folder: Path) -> bool:
    """Whether the file system can bypass the page cache; else the store uses it, which serves as well."""
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def noted_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What goes past the page cache from now on."""
    noted: list[str] = []

    def read(piece: memoryview, frames: Sequence[Frame], begin: int) -> None:
        noted.append("read")
        scatter(piece, frames, begin)

    def write(frames: Sequence[Frame], piece: memoryview, begin: int) -> None:
        noted.append("write")
        gather(frames, piece, begin)

    monkeypatch.setattr("hicache.tiers.direct_io.scatter", read)
    monkeypatch.setattr("hicache.tiers.direct_io.gather", write)
    return noted


@pytest.mark.parametrize(("stores", "begin", "end"), MATRIX)
def test_a_fault_in_a_replay_costs_hits_and_no_more(bench: Bench, stores: str, begin: Act, end: Act) -> None:
    def between(result: ReplayResult) -> None:
        match result.requests / NUM_PROMPTS:
            case 2.5:
                begin(bench)
            case 4.0:
                end(bench)

    config = small_config(
        STORES[stores](bench),
        policy__store_timeout="1s",
        policy__prefetch__timeout_base="1500ms",
        tiers__stack__write="all",
        policy__eviction="lru",  # each round reads all of L3; other orders come upon a bad page later
        **(LARGE if stores == "direct" else {}),
    )
    past_cache = noted_reads_and_writes(bench.monkeypatch)
    result = replay(rounds(NUM_ROUNDS, NUM_PROMPTS, NUM_PAGES), config, on_request=between)
    assert (result.requests, result.stamp_mismatches, result.audit_errors) == (
        NUM_ROUNDS * NUM_PROMPTS,
        0,
        [],
    )
    assert result.pages_checked > 0
    assert set(past_cache) == (
        {"read", "write"} if stores == "direct" and has_direct_io(bench.folder) else set()
    )
    assert result.hit_tokens + result.computed_tokens == result.prompt_tokens
    rates = [counts.tokens.hit_rate for _, counts in sorted(result.turns.items())]
    assert rates[0] == 0
    assert rates[1] == pytest.approx(FULL)
    assert max(rates[6:]) == pytest.approx(FULL), f"not found again: {rates}"
    stats = result.stats
    assert stats is not None
    assert stats.store is not None
    if min(rates[1:]) < FULL - 1e-9:  # whatever was lost is counted; round 1 found nothing, too
        absent = stats.transfers.absent_pages - NUM_PROMPTS * NUM_PAGES
        failures = sum(stats.transfers.failures.values()) + sum(stats.faults.values())
        assert absent + failures + trouble(stats.store) > 0
