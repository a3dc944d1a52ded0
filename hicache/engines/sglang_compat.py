"""The one place that knows the releases of SGLang: which are tested, and what is called how in them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from hicache.errors import EngineUnavailableError

logger = logging.getLogger(__name__)

TESTED = ("0.5.23",)
OLDEST = (0, 5, 23)
_INSTALL = f"pip install 'sglang=={TESTED[-1]}'"

KV = "kv"
MAMBA = "mamba"
ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"
BLOCK_GROUPS = "block_groups"

OWN_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
"""Keys of the extra config that SGLang reads itself and still hands on."""

_METHODS = (
    "register_mem_pool_host",
    "register_mem_host_pool_v2",
    "on_host_pools_registered",
    "batch_exists",
    "batch_exists_v2",
    "batch_get_v1",
    "batch_get_v2",
    "batch_set_v1",
    "batch_set_v2",
    "clear",
    "get_stats",
)
_NAMES = ("HiCacheStorage", "HiCacheStorageConfig", "PoolHitPolicy", "PoolName", "PoolTransferResult")
_IDENTITY_ARGUMENTS = (
    "dtype",
    "json_model_override_args",
    "kv_cache_dtype",
    "model_path",
    "quantization",
    "revision",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
)
"""Arguments of the server that decide what a page's bytes mean, and that no pool tells: pools of 8-bit floats, for
example, say ``uint8`` whichever they are."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An SGLang that can be imported.

    Args:
        version: its release.
        storage: its module ``hicache_storage``.
    """

    version: str
    storage: ModuleType

    @property
    def storage_class(self) -> Any:  # Any: a class that exists only where SGLang is
        return self.storage.HiCacheStorage

    def exists_result(self, num_pages: int, by_pool: Mapping[Any, int], restorable: Sequence[int]) -> Any:
        """A ``PoolTransferResult``.

        Args:
            num_pages: the longest prefix that all pools can restore.
            by_pool: where each pool's own pages end; a pool that was not asked is left out.
            restorable: all prefix lengths that all pools can restore, ascending.
        """
        return self.storage.PoolTransferResult(num_pages, dict(by_pool), list(restorable))

    def storage_metrics(
        self,
        pages_read: Sequence[int],
        pages_written: Sequence[int],
        read_gb_s: Sequence[float],
        write_gb_s: Sequence[float],
    ) -> Any:
        """A ``StorageMetrics``: one entry for each call since the last time."""
        collector = import_module("sglang.srt.observability.metrics_collector")
        return collector.StorageMetrics(
            prefetch_pgs=list(pages_read),
            backup_pgs=list(pages_written),
            prefetch_bandwidth=list(read_gb_s),
            backup_bandwidth=list(write_gb_s),
        )

    def server_arguments(self) -> dict[str, str | None]:
        """The server's arguments that a page's bytes hang on, as given; empty where no server runs.

        Raises:
            EngineUnavailableError: this release calls one of them otherwise: pages could not be told apart by it.
        """
        try:
            arguments = import_module("sglang.srt.runtime_context").get_server_args()
        except (ImportError, ValueError):
            return {}
        missing = [name for name in _IDENTITY_ARGUMENTS if not hasattr(arguments, name)]
        if missing:
            raise EngineUnavailableError(
                f"sglang {self.version} has no server argument {', '.join(missing)}, by which pages are told apart; {_INSTALL}"
            )
        found = {name: getattr(arguments, name) for name in _IDENTITY_ARGUMENTS}
        return {name: None if value is None else str(value) for name, value in found.items()}


def load_engine() -> Engine:
    """SGLang, with its storage interface. A release that was not tested is used, and says so.

    Raises:
        EngineUnavailableError: it is missing, too old, or lacks something of the interface; says what is wanted.
    """
    try:
        version = str(import_module("sglang").__version__)
        storage = import_module("sglang.srt.mem_cache.hicache_storage")
    except ImportError as error:
        raise EngineUnavailableError(f"sglang cannot be imported ({error}); {_INSTALL}") from error
    if release(version) < OLDEST:
        raise EngineUnavailableError(f"sglang {version} is too old for this adapter; {_INSTALL}")
    missing = [name for name in _NAMES if not hasattr(storage, name)]
    missing += [name for name in _METHODS if not hasattr(getattr(storage, "HiCacheStorage", None), name)]
    if missing:
        raise EngineUnavailableError(
            f"sglang {version} has no {', '.join(missing)} in {storage.__name__}; {_INSTALL}"
        )
    if version not in TESTED:
        logger.warning(
            "sglang %s was never tested with this adapter, which knows %s; should a page not come back, it is a miss",
            version,
            ", ".join(TESTED),
        )
    return Engine(version, storage)


def release(version: str) -> tuple[int, ...]:
    """The three numbers of a release: ``0.5.23.post1`` is (0, 5, 23)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
