"""The hit-rate test as a pytest fixture. In a ``conftest.py``: ``pytest_plugins = ["hicache.testing.plugin"]``.

::

    # pytest.ini:  hicache_config = hicache.yaml
    def test_late_turns_are_reused(hicache_multi_turn) -> None:
        hicache_multi_turn(sessions=20, turns=30, user=300, output=200)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hicache.replay.multiturn import MultiTurnResult

OPTION = "hicache_config"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(OPTION, "configuration that hicache_multi_turn tests: a YAML file or a preset")


@pytest.fixture
def hicache_multi_turn(pytestconfig: pytest.Config) -> Callable[..., MultiTurnResult]:
    """``check_multi_turn``; without a ``config`` it takes the one that the ini option ``hicache_config`` names.

    A path in the option is relative to the folder of the ini file.
    """
    from hicache.testing.multi_turn import check_multi_turn

    def check(config: object = None, **keywords: Any) -> MultiTurnResult:  # Any: those of check_multi_turn
        source: Any = config  # Any: check_multi_turn says what it may be
        if source is None:
            named = pytestconfig.getini(OPTION)
            if not named:
                raise pytest.UsageError(f"hicache_multi_turn: give a config, or set {OPTION} in the ini file")
            path = pytestconfig.rootpath / named
            source = path if path.exists() else named
        return check_multi_turn(source, **keywords)

    return check
