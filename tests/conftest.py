"""What every test gets: hypothesis profiles, one seed, skips that are counted, no thread left behind.

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
THREAD_GRACE_S = 2.0
"""How long a test's threads may take to end after it: a pool that was told to close is closing."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give hypothesis our seed before its plugin reads its own option, unless that option was given."""
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(SEED)


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


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Fail a test after which a non-daemon thread runs that was not there before."""
    before = set(threading.enumerate())
    yield
    deadline_s = time.monotonic() + THREAD_GRACE_S
    left = []
    for thread in threading.enumerate():
        if thread not in before and not thread.daemon:
            thread.join(timeout=max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                left.append(thread.name)
    if left:
        pytest.fail(f"the test left threads running: {', '.join(sorted(left))}", pytrace=False)
