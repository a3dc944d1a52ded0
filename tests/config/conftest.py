"""A small valid configuration to spoil, and what a refusal says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache.config import load_config
from hicache.errors import ConfigError


@pytest.fixture
def tree() -> dict[str, Any]:
    """A hybrid model with three tiers, as the YAML would hold it."""
    return {
        "model": {
            "name": "m",
            "page_size": 16,
            "components": {
                "full": {"rule": "path", "layers": 2, "bytes_per_token": 16},
                "swa": {"rule": "window", "window": 64, "layers": 2, "bytes_per_token": 16},
                "mamba": {"rule": "checkpoint", "layers": 2, "state_bytes": 1024},
            },
        },
        "tiers": {
            "device": {"kind": "cpu", "capacity": "1MiB"},
            "host": {"capacity": "4MiB", "pinned": False},
            "stores": [{"kind": "disk", "path": "auto", "capacity": "16MiB"}],
        },
    }


@pytest.fixture
def refused() -> Callable[..., tuple[str, ...]]:
    """Loads a tree that must be refused, and gives the problems."""

    def problems(source: Any, **keywords: Any) -> tuple[str, ...]:
        keywords.setdefault("environ", {})
        with pytest.raises(ConfigError) as caught:
            load_config(source, **keywords)
        return caught.value.problems

    return problems
