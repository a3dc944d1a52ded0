"""What is unlikely to be meant is said when a cache starts, not only by ``hicache config check``."""

from __future__ import annotations

import logging

import pytest

from hicache import HiCache
from hicache.config import load_config


def started(caplog: pytest.LogCaptureFixture, capacity: str) -> list[str]:
    components = {
        "full": {"rule": "path", "bytes_per_token": 64},
        "mamba": {"rule": "checkpoint", "state_bytes": 16384},
    }
    tree = {
        "model": {"name": "m", "page_size": 16, "components": components},
        "tiers": {"device": {"kind": "cpu", "capacity": capacity}},
    }
    with caplog.at_level(logging.WARNING, logger="hicache"):
        HiCache(load_config(tree, environ={})).close()
    return caplog.messages


def test_a_cache_that_can_reuse_next_to_nothing_says_so_when_it_starts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (line,) = started(caplog, "40KiB")
    assert line.startswith("tiers.device: 40960 bytes a rank")


def test_one_that_can_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    assert started(caplog, "1MiB") == []
