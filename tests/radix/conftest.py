"""The tree cores under test, and how a test gets a harness around one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache.radix.core import make_core
from hicache.testing.harness import Harness
from hicache.testing.trees import tree_config

Build = Callable[..., Harness]


@pytest.fixture(params=["python"])
def core_kind(request: pytest.FixtureRequest) -> str:
    """Every test that asks for it runs on each core."""
    return str(request.param)


@pytest.fixture
def build(core_kind: str) -> Build:
    """Make a harness: ``build("full+swa", page_size=4, ...)``, arguments as for ``tree_config``."""

    def build_harness(model: str = "full", *, store=None, is_checked=True, **settings) -> Harness:  # type: ignore[no-untyped-def]  # passes on what tree_config declares
        core = make_core(tree_config(model, **settings), kind=core_kind)
        return Harness(core, store=store, is_checked=is_checked)

    return build_harness
