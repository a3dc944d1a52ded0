"""The exact oracle: what an engine with a cache answers is held against the model alone.

The reference is one forward pass over the whole request without any cache, so it shares no code with what is tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache.cache import HiCache
from hicache.config import HiCacheConfig
from hicache.engines.transformers import Answer, TransformersEngine
from hicache.engines.transformers_library import forward, load_library, make_cache
from hicache.types import DEFAULT_NAMESPACE, Namespace, Tier

TOLERANCE = 1e-4
"""Largest difference of any logit that rounding may explain; measured are about 1e-5 at most."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One request and how far it was from the model alone.

    Args:
        difference: largest absolute difference over the logits of all answered tokens.
        same_tokens: whether the model alone picks the same tokens.
    """

    answer: Answer
    difference: float
    same_tokens: bool

    @property
    def is_right(self) -> bool:
        return self.same_tokens and self.difference <= TOLERANCE


class ModelOracle:
    """Serves requests greedily and judges each.

    Args:
        engine: what is tested.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def serve(
        self,
        prompt: Sequence[int],
        *,
        new_tokens: int = 4,
        session: str | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> Judged:
        """Answer with exactly ``new_tokens`` tokens; the cache must be sound afterwards."""
        seen: list[torch.Tensor] = []

        def choose(logits: torch.Tensor) -> int:
            seen.append(logits.clone())
            return int(logits.argmax())

        answer = self.engine.generate(
            prompt,
            max_new_tokens=new_tokens,
            session=session,
            namespace=namespace,
            stop_tokens=(),
            choose=choose,
        )
        assert self.engine.cache.audit() == []
        expected = cold_logits(self.engine.model, [*prompt, *answer.tokens])[len(prompt) - 1 : -1]
        difference = (torch.stack(seen).float() - expected.float()).abs().max().item()
        return Judged(answer, difference, expected.argmax(-1).tolist() == list(answer.tokens))


def cold_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:  # Any: of transformers
    """Logits ``[num_tokens, vocabulary]`` of one pass without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def cache_after(model: Any, tokens: Sequence[int]) -> Any:  # Any: a DynamicCache
    """The model's own cache after these tokens, computed in one pass."""
    cache = make_cache(load_library(), model.config)
    with torch.inference_mode():
        forward(model, torch.tensor([list(tokens)]), cache)
    return cache


def tiny_settings(
    *, page_size: int = 16, device: str = "4MiB", host: str | None = "8MiB", stores: Sequence[object] = ()
) -> Mapping[str, object]:
    """A configuration for a tiny model; what it stores, it stores at once."""
    tiers: dict[str, object] = {"device": {"kind": "cpu", "capacity": device}, "stores": list(stores)}
    if host is not None:
        tiers["host"] = {"capacity": host, "pinned": False}
    return {
        "model": {"page_size": page_size},
        "tiers": tiers,
        "policy": {
            "write": "write_through",
            "prefetch": {"min_tokens": 0},
            "watermarks": {"device": {"low": 0, "high": 0}},
        },
    }


def open_quiet(config: HiCacheConfig) -> HiCache:
    """A cache without a thread of its own, so that a test alone decides when something moves."""
    return HiCache(config, background=False)


def squeeze(cache: HiCache, tier: Tier) -> None:
    """Press everything that is not locked out of a tier, down into the next."""
    runtime = cache._runtime  # noqa: SLF001  no engine may ask for this
    assert cache.drain()
    for _ in range(2):  # a backup first, then the room that it gives
        for spec in runtime.specs:
            with runtime.lock:
                capacity, _ = runtime.core.free_slots(spec.name, tier)
                runtime.run(runtime.core.make_room(spec.name, tier, capacity).actions)
            assert cache.drain()
