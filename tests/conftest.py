"""What every test gets: hypothesis profiles, one seed, the same environment, nothing left behind, skips counted.

Environment:
    HICACHE_TEST_PROFILE: ``quick`` or ``full`` (default): how many examples a property test tries.
    HICACHE_TEST_SEED: the seed of all random tests (default 0); printed at the head of the run.
    HICACHE_TEST_REDIS_SERVER: the server that tests start (default ``redis-server``), or ``valkey-server``.
    HICACHE_SKIP_REPORT: a file that gets one line per skipped test: id, markers, reason (tab between).
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("hicache.testing")  # its contracts show values like any test's assert

PROFILE = os.environ.get("HICACHE_TEST_PROFILE", "full")
SEED = int(os.environ.get("HICACHE_TEST_SEED", "0"))

# A slow machine is no failed test (deadline); the blob repeats a failure without its database.
settings.register_profile(
    "quick", max_examples=25, stateful_step_count=20, deadline=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile(
    "full", max_examples=400, stateful_step_count=50, deadline=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile(PROFILE)

REDIS_PROGRAMS = (os.environ.get("HICACHE_TEST_REDIS_SERVER", "redis-server"), "openssl")
PAGE_THREADS = tuple(
    f"hicache-{name}"
    for name in (
        "to-host",
        "to-device",
        "local",
        "store",
        "pin",
        "io",
        "copy",
        "disk",
        "codec",
        "load",
        "save",
    )
)
THREAD_GRACE_S = 5.0
"""How long a test's threads may take to end after it: a pool that was told to close is closing."""

# What a terminal, a shell or a CI service sets, and what of ours a user may have set: commands print by the first
# and read the second. A test that is about one of them sets it.
TERMINAL_VARIABLES = (
    "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "LINES", "NO_COLOR", "PY_COLORS",
    "TERMINAL_WIDTH", "TTY_COMPATIBLE", "TTY_INTERACTIVE",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give hypothesis our seed before its plugin reads its own option, unless that option was given."""
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_sessionstart() -> None:
    """Before test modules are imported, since some of what they import reads these at once."""
    ours = [name for name in os.environ if name.startswith("HICACHE__") or name == "HICACHE_ADMIN_SOCKET"]
    for name in (*TERMINAL_VARIABLES, *ours):
        os.environ.pop(name, None)
    for name in ("no_proxy", "NO_PROXY"):  # servers of tests are on loopback, where no proxy finds them
        os.environ[name] = "127.0.0.1,localhost"
    # A shell starts what runs in its background with Ctrl-C ignored, and so would be all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"hicache: profile {PROFILE} (HICACHE_TEST_PROFILE), seed {SEED} (HICACHE_TEST_SEED)"


@functools.cache
def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_cuda():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("redis"):
        missing = [name for name in REDIS_PROGRAMS if shutil.which(name) is None]
        if missing:
            pytest.skip(f"needs {' and '.join(missing)}: apt-get install {' '.join(missing)}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test's markers where its reports carry them; workers pass on nothing else."""
    for item in items:
        names = sorted({mark.name for mark in item.iter_markers()})
        item.user_properties.append(("markers", ",".join(names)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        note_skip(report, markers=str(dict(report.user_properties).get("markers", "")))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        note_skip(report, markers="")


def note_skip(report: pytest.TestReport | pytest.CollectReport, *, markers: str) -> None:
    """Append one line for ``.ci/run``. Workers and their controller may both write it: sort -u."""
    path = os.environ.get("HICACHE_SKIP_REPORT")
    if path:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\t{markers}\t{' '.join(reason.split())}\n")


@pytest.fixture
def seeded_random(request: pytest.FixtureRequest) -> random.Random:
    """Randomness of this test alone: the run's seed and the test's own id."""
    seed = f"{SEED}:{request.node.nodeid}"
    print(f"seeded_random: {seed!r}")  # pytest shows it when the test fails
    return random.Random(seed)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where tests, engines and what they start make temporary files: in pytest's folder, which pytest removes."""
    folder = tmp_path_factory.mktemp("t", numbered=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield folder


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A folder with a short path, whatever TMPDIR is: the kernel takes 107 bytes for a socket's."""
    with tempfile.TemporaryDirectory(prefix="hc", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def socket_folder(short_folder: Path) -> Path:
    """One of the test's own in it, private to this user."""
    return Path(tempfile.mkdtemp(dir=short_folder, prefix=""))


@pytest.fixture(autouse=True)
def no_folder_left_behind(temporary_folder: Path) -> Iterator[None]:
    """Fail a test after which a folder of a store without a path is there that was not there before."""
    before = set(temporary_folder.glob("*hicache-*"))
    yield
    left = sorted(path.name for path in set(temporary_folder.glob("*hicache-*")) - before)
    if left:
        pytest.fail(f"the test left folders behind: {', '.join(left)}", pytrace=False)


def is_to_end(thread: threading.Thread) -> bool:
    """Whether the thread is one that a test has to end. One waits for the process's own end, to close what vLLM left."""
    return thread.name != "hicache-exit" and (not thread.daemon or thread.name.startswith(PAGE_THREADS))


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Fail a test after which a thread runs that was not there before, if it is no daemon or copies or stores pages."""
    before = set(threading.enumerate())
    yield
    deadline_s = time.monotonic() + THREAD_GRACE_S
    left = []
    for thread in threading.enumerate():
        if thread not in before and is_to_end(thread):
            thread.join(timeout=max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                left.append(thread.name)
    if left:
        pytest.fail(f"the test left threads running: {', '.join(sorted(left))}", pytrace=False)
