"""Fixtures of the tests of tiers."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a disk store, not made yet."""
    return tmp_path / "store"
