"""Throwing payload away on purpose, in every tier, while others are served."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from hicache.admin_reports import ClearReport
from hicache.beliefs import distrust
from hicache.radix.actions import Forget
from hicache.radix.interface import Tokens
from hicache.runtime import Runtime
from hicache.stores import OPEN_TIMEOUT_S, StoreSet
from hicache.types import Namespace, Tier


class Clearing:
    """Clears a scope of one cache. *Thread*: one at a time; blocks, bounded."""

    def __init__(self, runtime: Runtime, stores: StoreSet) -> None:
        self._runtime = runtime
        self._stores = stores

    def clear(
        self, namespace: Namespace | None, tokens: Tokens | None, *, alone: bool = False, wait_s: float | None
    ) -> ClearReport:
        """As ``TreeCore.clear`` has it; all waits are bounded.

        Args:
            wait_s: how long to wait for leases that hold some.
        """
        runtime = self._runtime
        is_all = namespace is None and tokens is None
        until_s = time.monotonic() + runtime.wait_limit_s
        leases_until_s = time.monotonic() + (wait_s or 0.0)
        removed: Counter[tuple[str, Tier]] = Counter()
        drops = runtime.transfers.stats().forget_drops
        while True:
            with runtime.lock:
                runtime.check_open()
                runtime.pump()
                cleared = runtime.core.clear(namespace, tokens, alone=alone)
                self._stores.epoch += 1
                # A store that is emptied as a whole need not be told page by page.
                told = cleared.actions
                runtime.run(action for action in told if not (is_all and isinstance(action, Forget)))
            removed.update(cleared.removed)
            now_s = time.monotonic()
            if cleared.tickets and now_s < until_s:
                runtime.wait(cleared.tickets, until_s - now_s)
            elif cleared.kept and now_s < leases_until_s:
                time.sleep(min(0.01, leases_until_s - now_s))
            else:
                break
        by_tier = _by_tier(removed)
        num_stored = sum(by_tier["store"].values())
        if is_all and self._stores.top is not None:
            by_tier["store"], num_stored = {}, self._empty_stores()
        # Whoever asks for a page meanwhile is told that it is not there; a detach or a close would drop what is queued.
        undeleted = runtime.transfers.undeleted(max(0.0, until_s - time.monotonic()))
        undeleted += runtime.transfers.stats().forget_drops - drops
        return ClearReport(by_tier, cleared.kept, undeleted, num_stored)

    def _empty_stores(self) -> int:
        runtime = self._runtime
        try:
            return runtime.transfers.run_store(lambda store: store.clear(), OPEN_TIMEOUT_S)
        finally:  # one that failed may have removed some
            distrust(runtime, self._stores)


def _by_tier(removed: Mapping[tuple[str, Tier], int]) -> dict[str, dict[str, int]]:
    by_tier: dict[str, dict[str, int]] = {tier.name.lower(): {} for tier in Tier}
    for (component, tier), count in removed.items():
        by_tier[tier.name.lower()][component] = count
    return by_tier


def merged(reports: Sequence[ClearReport]) -> ClearReport:
    """What went in several scopes, cleared one after the other."""
    slots: dict[str, Counter[str]] = {tier.name.lower(): Counter() for tier in Tier}
    for report in reports:
        for tier, counts in report.slots.items():
            slots[tier].update(counts)
    return ClearReport(
        {tier: dict(counts) for tier, counts in slots.items()},
        reports[0].kept_slots if reports else 0,
        sum(report.undeleted_pages for report in reports),
        sum(report.store_pages for report in reports),
    )
