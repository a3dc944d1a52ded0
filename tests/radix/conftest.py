"""The tree cores under test, and how a test gets a harness around one."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hicache.radix.core import core_kind as built_kind
from hicache.radix.core import make_core
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.trees import tree_config


@pytest.fixture(params=["python", "rust"])
def core_kind(request: pytest.FixtureRequest) -> str:
    """Every test that asks for it runs on each core that is built."""
    kind = str(request.param)
    if kind == "rust" and os.environ.get("HICACHE_REQUIRE_RUST") != "1" and built_kind("auto")[0] != kind:
        pytest.skip("the Rust core was not built (HICACHE_REQUIRE_RUST=1 makes this a failure)")
    return kind


@pytest.fixture
def build(core_kind: str) -> BuildHarness:
    """Make a harness: ``build("full+swa", page_size=4, ...)``."""

    def build_harness(model: str = "full", /, **options: Any) -> Harness:  # Any: passed on unread
        around = {name: options.pop(name) for name in ("store", "is_checked") if name in options}
        return Harness(make_core(tree_config(model, **options), kind=core_kind), **around)

    return build_harness
