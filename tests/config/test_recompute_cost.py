"""What prefill costs, as the YAML may say it."""

from __future__ import annotations

import pytest

from hicache.config import load_config
from hicache.errors import ConfigError

KEY = "policy.prefetch.recompute_per_1024_tokens"


@pytest.mark.parametrize(("said", "meant"), [("auto", "auto"), ("100ms", 0.1), (None, None)])
def test_it_is_a_duration_or_auto_or_nothing(said: str | None, meant: str | float | None) -> None:
    config = load_config("cpu", overrides={KEY: said}, environ={})
    assert config.policy.prefetch.recompute_per_1024_tokens == meant
    assert config.model_dump(mode="json")["policy"]["prefetch"]["recompute_per_1024_tokens"] == said


@pytest.mark.parametrize("said", ["0s", "soon", 0.1, "-5ms", True])
def test_anything_else_is_refused_by_name(said: object) -> None:
    with pytest.raises(ConfigError, match=KEY):
        load_config("cpu", overrides={KEY: said}, environ={})
