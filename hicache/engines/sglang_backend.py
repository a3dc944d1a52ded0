"""What SGLang calls: its storage interface on a store of ours.

The class that SGLang makes is built from this one in ``hicache.engines.sglang``, where SGLang can be imported.

*Thread*: SGLang queries, reads and writes from three threads at once, and asks for numbers on its scheduler's. No call
raises once the host pools are registered, and none waits longer than ``policy.wait_limit``.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from hicache.clock import Clock, MonotonicClock
from hicache.config import HiCacheConfig
from hicache.engines.sglang_compat import ALL_PAGES, BLOCK_GROUPS, KV, TRAILING_PAGES, Engine
from hicache.engines.sglang_counters import BackendStats, CallCounters
from hicache.engines.sglang_metrics import serve_metrics
from hicache.engines.sglang_names import PageNames, model_digest, pool_identity
from hicache.engines.sglang_pages import HostPool, PoolPages, TensorPages, open_pages, page_numbers
from hicache.engines.sglang_settings import read_settings
from hicache.engines.sglang_store import PageName, PageStore
from hicache.errors import ConfigError, ProtocolError
from hicache.exits import OpenThings
from hicache.stores import make_store
from hicache.tiers.store import PageTarget, Store
from hicache.transfer.copy import PageCopier
from hicache.types import PageKey

if TYPE_CHECKING:
    from hicache.metrics import MetricsServer

logger = logging.getLogger(__name__)

MakeStore = Callable[[HiCacheConfig, bytes, Clock], Store | None]
Method = TypeVar("Method", bound=Callable[..., Any])  # Any: a decorator gives back what it was given


def _never_raises(
    miss: Callable[[Any], object],
) -> Callable[[Method], Method]:  # Any: the call's first argument
    """Answer ``miss(first argument)`` in place of an exception, which is counted."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def guarded(backend: StorageBackend, *args: Any, **kwargs: Any) -> Any:  # Any: as the method
            try:
                return method(backend, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  a fault of ours is a miss to the engine, too
                backend.counters.fault(method.__name__.strip("_"), repr(error))
                return miss(args[0] if args else next(iter(kwargs.values()), ()))

        return cast("Method", guarded)

    return wrap


_open = OpenThings()


def _all_false(keys: Sequence[str]) -> list[bool]:
    return [False] * len(keys)


def _all_none(keys: Sequence[str]) -> list[None]:
    return [None] * len(keys)


def _false_by_pool(transfers: Sequence[Any]) -> dict[Any, list[bool]]:  # Any: SGLang's
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


@dataclass(frozen=True, slots=True)
class _Pool:
    """A registered pool: where its pages lie, and what they are called."""

    pool: HostPool
    component: str
    pages: PoolPages
    names: PageNames


class StorageBackend:
    """A store of HiCache behind SGLang's host pools.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``: ranks, model, extra config.
        arguments: what else the factory was given; ``make_store`` and ``clock`` for tests, empty in SGLang.

    Raises:
        ConfigError: the extra config is wrong, or asks for what is not supported.
    """

    engine: Engine

    def __init__(self, storage_config: Any, arguments: Mapping[str, Any]) -> None:  # Any: SGLang's
        self._settings = read_settings(storage_config.extra_config)
        self._config = storage_config
        _refuse_unsupported(storage_config)
        self.model = model_digest(
            storage_config,
            name=self._settings.name,
            weights=self._settings.weights,
            server_arguments=self.engine.server_arguments(),
        )
        self._make_store: MakeStore = arguments.get("make_store", make_store)
        self._clock: Clock = arguments.get("clock") or MonotonicClock()
        self._copier = PageCopier()
        self._store: PageStore | None = None
        self._page_size = 1
        self._pools: dict[str, _Pool] = {}
        self._logical: set[str] = set()
        self.metrics: MetricsServer | None = None
        self._is_disowned = False
        self._flat: PageNames | None = None
        self.counters = CallCounters(keeps_calls=bool(storage_config.enable_storage_metrics))
        if self.counters.keeps_calls:
            self.engine.storage_metrics((), (), (), ())  # imported now, not in a step of the scheduler

    # ---- life ------------------------------------------------------------------------------------------------
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # Any: SGLang's
        """Take the pool that all pages are counted in, and open the store.

        Raises:
            ConfigError, TierError: the store cannot be opened, or the pool not be stored; fails the attachment.
        """
        self.mem_pool_host = mem_pool_host
        self._page_size = int(getattr(mem_pool_host, "logical_page_size", mem_pool_host.page_size))
        if self._store is None:
            self._open_store(str(getattr(mem_pool_host, "dtype", "uint8")))
        self.register_mem_host_pool_v2(mem_pool_host, KV)
        identity = pool_identity(self.model, self._config, KV, mem_pool_host, self._page_size)
        # Flat pages order their bytes in another way than regions do, so they have names of their own.
        self._flat = PageNames(identity, KV, "tensor")

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:  # Any: SGLang's
        """Take one pool. Raises ``ConfigError`` if its pages cannot be stored."""
        name = str(getattr(host_pool_name, "value", host_pool_name))
        known = self._pools.get(name)
        if known is not None and known.pool is host_pool:
            return
        pages = open_pages(name, host_pool, self._copier)
        if pages is None:
            self._logical.add(name)
            return
        identity = pool_identity(self.model, self._config, name, host_pool, self._page_size)
        self._pools[name] = _Pool(host_pool, name, pages, PageNames(identity, name, pages.form))

    def on_host_pools_registered(self) -> None:
        """Say what was attached."""
        sizes = ", ".join(f"{name} {entry.pages.page_bytes}" for name, entry in self._pools.items())
        logger.info(
            "HiCache behind SGLang %s: rank %d of %d, bytes a page: %s",
            self.engine.version,
            self._config.tp_rank,
            self._config.tp_size,
            sizes or "none",
        )

    def close(self) -> None:
        """Close the store. Idempotent; every later call is a miss, and all are in a process forked meanwhile."""
        if self._is_disowned:
            return
        _open.discard(self)
        if self.metrics is not None:
            self.metrics.close()
        if self._store is not None:
            self._store.close()
        self._copier.close()

    def disown(self) -> None:
        """This process is a fork of the one that opened the store: none is there, and nothing is touched."""
        self._is_disowned = True
        self._store = self.metrics = None

    @_never_raises(lambda _: False)
    def clear(self) -> bool:
        """Empty the store, for all ranks and engines that share it; whether that went well."""
        return self._store is not None and self._store.clear() is not None

    @_never_raises(lambda _: None)
    def get_stats(self) -> Any:  # Any: SGLang's
        """Pages and bandwidth of each call since the last time, for SGLang's own metrics. Returns at once."""
        if not self.counters.keeps_calls:
            return None
        read, written = self.counters.drain()
        return self.engine.storage_metrics(
            [call.num_pages for call in read],
            [call.num_pages for call in written],
            [call.gb_per_s for call in read],
            [call.gb_per_s for call in written],
        )

    def stats(self) -> BackendStats:
        """What the backend and its store did so far. Returns at once."""
        store = self._store
        return self.counters.snapshot(
            {} if store is None else store.faults(), None if store is None else store.stats()
        )

    # ---- queries ---------------------------------------------------------------------------------------------
    @_never_raises(lambda _: False)
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @_never_raises(lambda _: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:  # Any: SGLang's
        """How many pages from the first on are there."""
        return self._num_kv_pages(keys, self._deadline_s())

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:  # Any: SGLang's
        """Which prefixes all pools can restore: their lengths, and where each pool's own pages end."""
        found = self._restorable_prefixes(keys, pool_transfers or ())
        by_pool, restorable = ({}, []) if found is None else found
        return self.engine.exists_result(max(restorable, default=0), by_pool, restorable)

    # ---- pages, in the host pools' own memory ------------------------------------------------------------------
    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the pool; which ones are there now. ``host_indices``: ``page_size`` for each key."""
        return self._get(keys, KV, host_indices, self._deadline_s())

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Write pages out of the pool; which ones are stored now."""
        return self._put(keys, KV, host_indices, _prefix(extra_info), self._deadline_s())

    @_never_raises(_false_by_pool)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """``batch_get_v1`` for other pools."""
        until_s = self._deadline_s()
        return {
            transfer.name: self._get(transfer.keys or (), _name(transfer), transfer.host_indices, until_s)
            for transfer in transfers
        }

    @_never_raises(_false_by_pool)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """``batch_set_v1`` for other pools."""
        results = {}
        until_s = self._deadline_s()
        for transfer in transfers:
            # A trailing window or a state hangs under nothing: each is of use without the one before it.
            prefix = _prefix(extra_info) if _policy(transfer) == ALL_PAGES else None
            results[transfer.name] = self._put(
                transfer.keys or (), _name(transfer), transfer.host_indices, prefix, until_s
            )
        return results

    # ---- pages, as tensors that SGLang packed ------------------------------------------------------------------
    @_never_raises(lambda _: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    @_never_raises(_all_none)
    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages into tensors of SGLang's that nobody else uses; None for each that did not come."""
        targets = list(target_locations or ())
        if self._flat is None or self._store is None or len(targets) != len(keys):
            return [None] * len(keys)
        began_s = time.perf_counter()
        there = self._store.get_into(
            [
                PageTarget(key, KV, memoryview(target.view(torch.uint8).numpy()))
                for key, target in zip(self._flat.keys(keys), targets, strict=True)
            ]
        )
        num_bytes = sum(target.nbytes for target, is_there in zip(targets, there, strict=True) if is_there)
        self.counters.read(KV, len(keys), sum(there), num_bytes, time.perf_counter() - began_s)
        return [target if is_there else None for target, is_there in zip(targets, there, strict=True)]

    @_never_raises(lambda _: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    @_never_raises(lambda _: False)
    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write tensors; whether all are stored now."""
        if self._flat is None or self._store is None or len(values) != len(keys):
            return False
        names = _chained(self._flat, keys, ())
        pages = TensorPages(values)
        began_s = time.perf_counter()
        there = self._store.put(pages, np.arange(len(keys), dtype=np.int64), names, KV, self._deadline_s())
        num_bytes = sum(there) * pages.page_bytes
        self.counters.written(KV, len(keys), sum(there), num_bytes, time.perf_counter() - began_s)
        return all(there)

    # ---- helpers ---------------------------------------------------------------------------------------------
    def _open_store(self, dtype: str) -> None:
        config = self._settings.config
        label = dtype.removeprefix("torch.")
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": label})})
        made = self._make_store(config, self.model, self._clock)
        assert made is not None  # read_settings asked for at least one
        store = PageStore(
            made,
            clock=self._clock,
            timeout_s=config.policy.store_timeout,
            wait_limit_s=config.policy.wait_limit,
        )
        try:
            store.open()
            self.metrics = serve_metrics(self.stats, config.metrics, self._config)
        except BaseException:
            store.close()
            raise
        self._store = store
        _open.add(self)

    def _deadline_s(self) -> float:
        return 0.0 if self._store is None else self._store.deadline_s()

    def _num_kv_pages(self, keys: Sequence[str], until_s: float) -> int:
        if KV in self._logical:
            return len(keys)
        entry = self._pools.get(KV)
        names = self._flat if not self._settings.is_zero_copy or entry is None else entry.names
        answers = None if names is None else self._ask(names.keys(keys), until_s)
        if answers is None:
            return 0
        num_pages = answers.index(False) if False in answers else len(answers)
        self.counters.asked(len(keys), num_pages)
        return num_pages

    @_never_raises(lambda _: None)
    def _restorable_prefixes(
        self, keys: Sequence[str], pool_transfers: Sequence[Any]
    ) -> tuple[dict[Any, int], list[int]] | None:  # Any: SGLang's
        """Where each pool's own pages end, and the prefix lengths that all pools can restore."""
        until_s = self._deadline_s()
        num_pages = self._num_kv_pages(keys, until_s)
        by_pool: dict[Any, int] = {self.engine.storage.PoolName.KV: num_pages} if num_pages else {}
        restorable = set(range(1, num_pages + 1))
        # Groups of blocks are a second form of the same pages; they never shorten a hit.
        transfers = [transfer for transfer in pool_transfers if _policy(transfer) != BLOCK_GROUPS]
        answers = self._ask_pools([_name(transfer) for transfer in transfers], keys[:num_pages], until_s)
        if answers is None or not num_pages:
            return by_pool, []
        for transfer, there in zip(transfers, answers, strict=True):
            of_pool = _restorable(_policy(transfer), there, max(1, len(transfer.keys or ())))
            by_pool[transfer.name] = max(of_pool, default=0)
            restorable &= of_pool
        return by_pool, sorted(restorable)

    def _ask(self, keys: Sequence[PageKey], until_s: float) -> list[bool] | None:
        return None if self._store is None else self._store.exists(keys, until_s)

    def _ask_pools(
        self, names: Sequence[str], hashes: Sequence[str], until_s: float
    ) -> list[list[bool]] | None:
        """For each pool which pages it has, in one question; None when the store could not say."""
        entries = [self._pools.get(name) for name in names]
        answers = self._ask([key for entry in entries if entry for key in entry.names.keys(hashes)], until_s)
        if answers is None:
            return None
        answered = iter(answers)
        return [
            [next(answered) for _ in hashes] if entry else [name in self._logical] * len(hashes)
            for name, entry in zip(names, entries, strict=True)
        ]

    @_never_raises(_all_false)
    def _get(self, keys: Sequence[str], name: str, host_indices: torch.Tensor, until_s: float) -> list[bool]:
        entry, store = self._pools.get(name), self._store
        if name in self._logical:
            return [True] * len(keys)
        if entry is None or store is None:
            raise ProtocolError(f"the pool {name} was never registered")
        numbers = page_numbers(entry.pool, host_indices, len(keys))
        began_s = time.perf_counter()
        names = [PageName(key) for key in entry.names.keys(keys)]
        there = store.get(entry.pages, numbers, names, name, until_s)
        num_hits = sum(there)
        seconds = time.perf_counter() - began_s
        self.counters.read(name, len(keys), num_hits, num_hits * entry.pages.page_bytes, seconds)
        return there

    @_never_raises(_all_false)
    def _put(
        self,
        keys: Sequence[str],
        name: str,
        host_indices: torch.Tensor,
        prefix: Sequence[str] | None,
        until_s: float,
    ) -> list[bool]:
        """``prefix``: hashes of the pages before; None if these hang under nothing, not even each other."""
        entry, store = self._pools.get(name), self._store
        if name in self._logical:
            return [True] * len(keys)
        if entry is None or store is None:
            raise ProtocolError(f"the pool {name} was never registered")
        numbers = page_numbers(entry.pool, host_indices, len(keys))
        began_s = time.perf_counter()
        there = store.put(entry.pages, numbers, _chained(entry.names, keys, prefix), name, until_s)
        num_stored = sum(there)
        seconds = time.perf_counter() - began_s
        self.counters.written(name, len(keys), num_stored, num_stored * entry.pages.page_bytes, seconds)
        return there


def _chained(names: PageNames, hashes: Sequence[str], prefix: Sequence[str] | None) -> list[PageName]:
    """Names of consecutive pages, each under the one before it; ``prefix`` as for ``_put``."""
    keys = names.keys(hashes)
    if prefix is None:
        return [PageName(key) for key in keys]
    first = names.key(prefix[-1]) if prefix else None
    return [PageName(key, parent) for key, parent in zip(keys, (first, *keys), strict=False)]


def _prefix(extra_info: Any) -> Sequence[str]:  # Any: SGLang's
    """Hashes of the pages before these, where SGLang was told to pass them."""
    return getattr(extra_info, "prefix_keys", None) or ()


def _name(transfer: Any) -> str:  # Any: SGLang's
    return str(getattr(transfer.name, "value", transfer.name))


def _policy(transfer: Any) -> str:  # Any: SGLang's
    return str(getattr(transfer.hit_policy, "value", transfer.hit_policy))


def _restorable(policy: str, there: Sequence[bool], num_trailing: int) -> set[int]:
    """Prefix lengths that a pool can restore.

    Args:
        there: for each page of the longest prefix whether the pool has it.
        num_trailing: pages at a prefix's end that are needed where only the end is.
    """
    if policy not in (ALL_PAGES, TRAILING_PAGES):
        return set()  # of a release to come: what is not understood is not promised
    lengths = set()
    unbroken = 0
    for length, is_there in enumerate(there, start=1):
        unbroken = unbroken + 1 if is_there else 0
        if unbroken >= (length if policy == ALL_PAGES else min(length, num_trailing)):
            lengths.add(length)
    return lengths


def _refuse_unsupported(storage_config: Any) -> None:  # Any: SGLang's
    problems = []
    if storage_config.dcp_size > 1:
        problems.append(
            f"--dcp-size: is {storage_config.dcp_size}; shards of decode context are not stored, remove it"
        )
    if storage_config.should_split_heads:
        problems.append("tp_lcm_size: pages are not split over other tensor widths; remove it")
    if problems:
        raise ConfigError(problems)
