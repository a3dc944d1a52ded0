"""A trace through the real cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable

import numpy as np

from hicache.cache import HiCache
from hicache.clock import ManualClock
from hicache.config import HiCacheConfig
from hicache.ranks.group import RankGroup
from hicache.replay.cost import CostModel
from hicache.replay.losses import LossAccount
from hicache.replay.result import ReplayResult
from hicache.replay.simulated import DEFAULT_CHUNK_TOKENS, Served, SimulatedEngine
from hicache.replay.stamps import PageChecker
from hicache.replay.timeline import Timeline
from hicache.tiers.store import Store
from hicache.workload import Request

Progress = Callable[[ReplayResult], None]
OnServed = Callable[[Request, Served], None]


def _all_stop(stop: threading.Event, group: RankGroup | None) -> bool:
    """Whether to end here; of several ranks all do, or none."""
    goes_on = not stop.is_set()
    if group is not None:
        goes_on = bool(group.lowest(np.array([goes_on], dtype=np.int64))[0])
    return not goes_on


def replay(
    requests: Iterable[Request],
    config: HiCacheConfig,
    *,
    trace: str = "",
    config_name: str = "",
    core: str | None = None,
    speedup: float | None = None,
    cost: CostModel | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    on_request: Progress | None = None,
    on_served: OnServed | None = None,
    timeline: Timeline | None = None,
    told_ends: Collection[int] = (),
    store: Store | None = None,
    group: RankGroup | None = None,
    stop: threading.Event | None = None,
) -> ReplayResult:
    """Serve all requests in order of arrival on a cache of their own, and check every reused byte.

    Args:
        speedup: keep the trace's pauses, this many times faster; None does not pause at all.
        on_served: called with each request and what it got.
        timeline: takes note of each request and of who held what after it.
        told_ends: after which requests, by index, the client closes the session.
        store: L3 instead of the configured one.
        group: the ranks that replay the same at the same time, each for itself.
        on_request: called after each request with the counts so far.
        stop: once set, the replay ends after the running request.

    Returns:
        The counts. ``stop`` or ``KeyboardInterrupt`` end the replay early: the counts so far come
        back with ``interrupted`` set, and the cache is closed all the same.
    """
    result = ReplayResult(trace, config_name, config.policy.eviction, "")
    result.device_bytes = config.tiers.device.total_bytes(config.ranks.count)
    cost = cost or CostModel()
    stop = stop or threading.Event()
    clock = ManualClock()
    checker = PageChecker()
    began_s = time.monotonic()
    try:
        cache = HiCache(
            config, session_clock=clock, core=core, on_page=checker.check, store=store, group=group
        )
    except KeyboardInterrupt:
        result.interrupted = True
        return result
    result.core = cache.core_kind
    try:
        engine = SimulatedEngine(cache, chunk_tokens=chunk_tokens)
        explainer = cache.explainer
        account = None
        if explainer is not None:
            account = LossAccount(config.model.specs(), config.model.page_size)
            result.lost_tokens = account.lost_tokens
        for request in requests:
            clock.advance(max(0.0, request.arrival_s - clock.now_s()))
            if speedup is not None:
                pause_s = began_s + request.arrival_s / speedup - time.monotonic()
                stop.wait(min(max(0.0, pause_s), threading.TIMEOUT_MAX))
            if _all_stop(stop, group):
                result.interrupted = True
                break
            answer = request.answer_tokens()
            prompt = request.prompt_tokens()
            served = engine.serve(prompt, answer, session=request.session, stop=request.stop)
            if request.session is not None and request.index in told_ends:
                cache.sessions.close(request.session)
            result.add(served, request.turn, len(answer), cost)
            if account is not None and explainer is not None and served.explanation is not None:
                is_whole = not explainer.ledger.num_forgotten
                account.add(prompt, answer, served.explanation, ledger_is_whole=is_whole)
            if timeline is not None:
                timeline.add(request, served, cache.usage())
            if on_served is not None:
                on_served(request, served)
            if on_request is not None:
                on_request(result)
        if not result.interrupted:
            cache.drain()
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        try:
            result.audit_errors = cache.audit()
            result.stats = cache.stats()
        finally:
            cache.close(flush=False, drain=not result.interrupted)
        result.stamp_mismatches += checker.mismatches
        result.pages_checked += checker.checked
        result.wall_s = time.monotonic() - began_s
    return result
