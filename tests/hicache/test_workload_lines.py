import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from hicache.errors import TraceError
from hicache.workload import Request, lines, read_trace

FIRST = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
SECOND = {"timestamp": 10, "input_length": 1100, "output_length": 7, "hash_ids": [1, 3, 4]}


def as_bytes(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def written(folder: Path, data: bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def prompts(requests: Iterable[Request]) -> list[list[int]]:
    return [request.prompt_tokens().tolist() for request in requests]


def refused(path: Path) -> TraceError:
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    return raised.value


def test_a_byte_order_mark_and_windows_line_ends_are_read_over(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + as_bytes(FIRST, SECOND).replace(b"\n", b"\r\n")
    assert read_trace(written(tmp_path, data)).num_requests == 2


def test_the_last_line_needs_no_end(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, as_bytes(FIRST, SECOND)[:-1])).num_requests == 2


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(data)


packed = pytest.mark.parametrize("pack", [zstd, gzip.compress], ids=["zstd", "gzip"])
Pack = Callable[[bytes], bytes]


@packed
def test_compression_is_told_by_content_and_not_by_name(tmp_path: Path, pack: Pack) -> None:
    data = as_bytes(FIRST, SECOND)
    plain = read_trace(written(tmp_path, data, "plain.jsonl.zst"))
    unpacked = read_trace(written(tmp_path, pack(data), "packed.txt"))
    assert prompts(plain) == prompts(unpacked)


@packed
def test_frames_that_follow_one_another_are_one_trace(tmp_path: Path, pack: Pack) -> None:
    data = pack(as_bytes(FIRST)) + pack(as_bytes(SECOND))
    assert read_trace(written(tmp_path, data)).num_requests == 2


def test_zeros_behind_a_gzip_file_are_padding(tmp_path: Path) -> None:
    data = gzip.compress(as_bytes(FIRST, SECOND)) + bytes(10_000)
    assert read_trace(written(tmp_path, data)).num_requests == 2


def long_trace(num_requests: int) -> bytes:
    numbers = np.random.default_rng(1).integers(0, 2**40, num_requests).tolist()
    return as_bytes(*(FIRST | {"timestamp": n, "hash_ids": [1, number]} for n, number in enumerate(numbers)))


@packed
def test_a_truncated_file_is_refused_where_it_ends(tmp_path: Path, pack: Pack) -> None:
    data = pack(long_trace(20_000))
    error = refused(written(tmp_path, data[: len(data) // 2]))
    assert "ends early" in error.reason
    assert 2 < error.line < 20_000


@packed
def test_what_stands_before_a_truncation_can_be_used(tmp_path: Path, pack: Pack) -> None:
    data = pack(long_trace(20_000))
    trace = read_trace(written(tmp_path, data[: len(data) // 2]), skip_bad=True)
    whole = read_trace(written(tmp_path, data))
    ((line, reason),) = trace.skipped
    assert "ends early" in reason
    assert trace.num_requests == line - 1
    assert prompts(trace) == prompts(whole.requests[: trace.num_requests])


@packed
def test_a_damaged_file_counts_up_to_the_damage(tmp_path: Path, pack: Pack) -> None:
    data = bytearray(pack(long_trace(20_000)))
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    path = written(tmp_path, bytes(data))
    assert refused(path).line > 2
    trace = read_trace(path, skip_bad=True)
    assert trace.num_requests > 0
    assert "stream is damaged" in trace.skipped[-1].reason


@packed
def test_other_bytes_behind_a_packed_file_are_damage(tmp_path: Path, pack: Pack) -> None:
    path = written(tmp_path, pack(as_bytes(FIRST)) + b"garbage")
    assert "stream is damaged" in refused(path).reason
    assert read_trace(path, skip_bad=True).num_requests == 1


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10_000)
    error = refused(written(tmp_path, as_bytes(FIRST) + b" " * 20_000))
    assert (error.line, error.reason) == (2, "line is longer than 10000 bytes")
