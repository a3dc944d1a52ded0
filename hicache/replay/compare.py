"""Policy against policy against the clairvoyant bound, over capacities, on one load."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hicache.config import device_slots, host_slots, load_config
from hicache.errors import ConfigError
from hicache.replay.bound import ClairvoyantBound
from hicache.replay.footprint import tight_config
from hicache.replay.multiturn import MultiTurnResult, run_multi_turn
from hicache.replay.run import Progress
from hicache.workload import MultiTurn, closed_form, multi_turn
from hicache.workload.tokens import prefix_hashes


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """One capacity.

    Args:
        share: of the footprint, for each component.
        slots: what it comes to.
        bound_hit_rate: no order of eviction hits more; None for a model without a path.
        by_policy: what each policy did, every reused byte checked.
    """

    share: float
    slots: Mapping[str, int]
    bound_hit_rate: float | None
    by_policy: Mapping[str, MultiTurnResult]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All capacities, ascending, and how many requests all runs served, those of incomplete ones too."""

    load: MultiTurn
    components: Sequence[str]
    closed_form_hit_rate: float
    rows: Sequence[CapacityRow]
    is_interrupted: bool = False
    requests: int = 0

    @property
    def is_sound(self) -> bool:
        return all(result.is_sound for row in self.rows for result in row.by_policy.values())

    def as_json(self) -> Mapping[str, object]:
        """The object that ``--json`` writes."""
        return {
            "components": list(self.components),
            "closed_form_hit_rate": self.closed_form_hit_rate,
            "interrupted": self.is_interrupted,
            "by_capacity": [
                {
                    "capacity_share": row.share,
                    "device_slots": dict(row.slots),
                    "bound_hit_rate": row.bound_hit_rate,
                    "policies": {name: result.as_json() for name, result in row.by_policy.items()},
                }
                for row in self.rows
            ],
        }


def compare_policies(
    load: MultiTurn,
    names: Sequence[str],
    page_size: int,
    *,
    policies: Sequence[str],
    shares: Sequence[float],
    overrides: Mapping[str, object] | None = None,
    seed: int = 0,
    on_request: Progress | None = None,
    stop: threading.Event | None = None,
) -> Comparison:
    """Run the load with each policy at each capacity.

    Args:
        names: components of the model, from ``footprint.COMPONENTS``.
        shares: of the load's footprint, which the device tier has; there is no other unless ``overrides`` add one.
        on_request: called after each request of each run.
        stop: once set, the comparison ends with the capacities that are complete.
    """
    expected = closed_form(load, page_size, last_token_written=False)
    prompt_tokens = sum(row.prompt_tokens for row in expected)
    bound = path_bound(load, page_size, seed=seed)
    rows: list[CapacityRow] = []
    requests = 0
    for share in sorted(set(shares)):
        tree = tight_config(load, names, page_size, device_share=share)
        config = load_config(tree, overrides=overrides)
        by_policy: dict[str, MultiTurnResult] = {}
        for policy in policies:
            chosen = load_config(tree, overrides={**(overrides or {}), "policy.eviction": policy})
            by_policy[policy] = run_multi_turn(load, chosen, seed=seed, on_request=on_request, stop=stop)
            requests += by_policy[policy].replay.requests
        if any(result.replay.interrupted for result in by_policy.values()):
            break
        slots = device_slots(config)
        most: float | None = None
        if "full" in names and not config.tiers.stores:
            pages = slots["full"] + host_slots(config).get("full", 0)
            most = page_size * bound.hit_blocks(pages) / prompt_tokens
        rows.append(CapacityRow(share, slots, most, by_policy))
    hits = sum(row.hit_tokens for row in expected)
    return Comparison(load, names, hits / prompt_tokens, rows, len(rows) < len(set(shares)), requests)


def path_bound(load: MultiTurn, page_size: int, *, seed: int = 0) -> ClairvoyantBound:
    """The clairvoyant bound of the load's pages, where answers are stored and one token is always computed."""
    known: dict[int, int] = {}
    stored: list[NDArray[np.int32]] = []
    looked_up: list[int] = []
    for request in multi_turn(load, seed=seed):
        tokens = np.concatenate([request.prompt_tokens(), request.answer_tokens()[:-1]])
        hashes = prefix_hashes(tokens, page_size).tolist()
        stored.append(np.array([known.setdefault(value, len(known)) for value in hashes], dtype=np.int32))
        looked_up.append((request.prompt_length - 1) // page_size)
    return ClairvoyantBound(stored, looked_up)


def parse_shares(text: str) -> list[float]:
    """``5%,25%,1`` as shares. Raises ``ConfigError``."""
    shares = []
    for word in text.split(","):
        try:
            share = float(word.strip().removesuffix("%")) / (100 if word.strip().endswith("%") else 1)
        except ValueError:
            share = 0.0
        if not 0 < share <= 10:
            raise ConfigError(
                [f"--capacities: {word!r}; expected shares of the footprint above 0, like 10%,50%"]
            )
        shares.append(share)
    return shares
