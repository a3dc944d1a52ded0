"""A process ends, whoever forgot to close its cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hicache

OPENS = """
import sys, threading
from hicache import HiCache

store = {"kind": "disk", "path": sys.argv[1], "capacity": "1GiB"}
cache = HiCache.from_yaml("cpu", overrides={"tiers": {"stores": [store]}, "policy": {"write": sys.argv[2]}})

def serve(begin):
    prompt = list(range(begin, begin + 600))
    with cache.match(prompt) as lease:
        lease.reserve(len(prompt))
        lease.release(prompt, written=len(prompt))

serve(0)
"""
RAISES = OPENS + "raise SystemExit(7)\n"
FORKS = (
    OPENS
    + """
import os
if os.fork() == 0:
    sys.exit(0)
print(os.wait()[1], cache.flush(), cache.audit())
cache.close()
"""
)
LOOKS = """
import sys
from hicache import HiCache

store = {"kind": "disk", "path": sys.argv[1], "capacity": "1GiB"}
with HiCache.from_yaml("cpu", overrides={"tiers": {"stores": [store]}}) as cache, cache.match(list(range(600))) as lease:
    lease.load()
    print(lease.reused)
"""
SERVES_ON = (
    OPENS
    + """
def serve_on():
    threading.main_thread().join()
    serve(10_000)
    print(cache.probe(list(range(10_000, 10_600))).source.device)

threading.Thread(target=serve_on).start()
"""
)

NOT_CLOSED = "a cache was not closed before the end of the process; use it in a with block"


def run(script: str, folder: Path, write: str) -> subprocess.CompletedProcess[str]:
    """Run a script; one that hangs fails the test."""
    root = Path(hicache.__file__).resolve().parents[1]
    return subprocess.run(
        [sys.executable, "-c", script, str(folder), write],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_script_that_fails_before_it_closes_its_cache_ends(tmp_path: Path, write: str) -> None:
    done = run(RAISES, tmp_path / "pages", write)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.strip().splitlines() == [NOT_CLOSED]
    assert run(LOOKS, tmp_path / "pages", write).stdout.strip() == "512", "closing stored what was under way"


def test_a_forked_child_closes_nothing_of_its_parent(tmp_path: Path) -> None:
    done = run(FORKS, tmp_path / "pages", "write_through")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "0 True []", "")


def test_a_thread_that_outlives_the_main_one_still_has_the_cache(tmp_path: Path) -> None:
    done = run(SERVES_ON, tmp_path / "pages", "write_through")
    assert (done.returncode, done.stdout.strip()) == (0, "512"), done.stderr
