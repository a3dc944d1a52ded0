"""A process ends, whoever forgot to close its cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hicache
from hicache.exits import OpenThings

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
CLOSES_IN_CHILD = (
    OPENS
    + """
import os, time
from hicache.errors import ProtocolError

lease = cache.match(list(range(600)))
if os.fork() == 0:
    began_s = time.monotonic()
    lease.abandon()
    try:
        cache.match([1, 2])
    except ProtocolError as error:
        print(error, flush=True)
    cache.close()
    os._exit(time.monotonic() - began_s > 4)  # what waited for the parent's threads would wait for longer
code = os.wait()[1]
lease.load()
print(code, lease.reused, flush=True)
lease.abandon()
serve(10_000)
print(cache.flush(), cache.audit(), flush=True)
cache.close()
"""
)
FORKS_AT_WORK = (
    OPENS
    + """
import os
done, held = threading.Event(), threading.Event()

def hold():
    with cache._runtime.lock:
        held.set()
        done.wait(60)

threading.Thread(target=hold).start()
held.wait(60)
child = os.fork()
if child == 0:
    with cache:
        pass
    sys.exit(0)
code = os.waitpid(child, 0)[1]
done.set()
print(code)
cache.close()
"""
)
OPENS_IN_CHILD = """
import os, sys
from hicache.exits import OpenThings

class Thing:
    def __init__(self, name): self.name = name
    def close(self): os.write(1, f"{self.name} closed\\n".encode())
    def disown(self): os.write(1, f"{self.name} disowned\\n".encode())

things = OpenThings(with_main_thread=sys.argv[2] == "main")
things.add(Thing("first"))
if os.fork() == 0:
    things.add(Thing("child's"))
    sys.exit(0)
os.wait()
things.add(Thing("second"))
"""
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


def test_a_child_that_closes_its_parents_cache_does_nothing(tmp_path: Path) -> None:
    done = run(CLOSES_IN_CHILD, tmp_path / "pages", "write_through")
    said, parent, *rest = done.stdout.splitlines()
    assert said.startswith("the cache belongs to the process that this one was forked from")
    assert (parent, rest, done.returncode, done.stderr) == ("0 512", ["True []"], 0, "")


def test_a_child_waits_for_no_lock_of_its_parents(tmp_path: Path) -> None:
    done = run(FORKS_AT_WORK, tmp_path / "pages", "write_through")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "0", "")


@pytest.mark.parametrize("when", ["exit", "main"])
def test_a_child_closes_what_it_opened_and_the_parent_what_it_has_newest_first(
    tmp_path: Path, when: str
) -> None:
    done = run(OPENS_IN_CHILD, tmp_path, when)
    assert done.stdout.splitlines() == [
        "first disowned",
        "child's closed",
        "second closed",
        "first closed",
    ], done.stderr


def test_a_thing_that_cannot_be_closed_keeps_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []

    class Thing:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "second":
                raise OSError("gone")

        def disown(self) -> None: ...

    things = OpenThings()
    for name in ("first", "second", "third"):
        things.add(Thing(name))
    things._close_all()
    assert closed == ["third", "second", "first"]
    assert "closing failed" in caplog.text


def test_a_thread_that_outlives_the_main_one_still_has_the_cache(tmp_path: Path) -> None:
    done = run(SERVES_ON, tmp_path / "pages", "write_through")
    assert (done.returncode, done.stdout.strip()) == (0, "512"), done.stderr
