"""Backends as SGLang makes them: its factory, its dynamic recipe, its host pools."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hicache.clock import ManualClock
from hicache.closing import Closing
from hicache.testing.scripted_store import ScriptedStore
from hicache.testing.sglang_pools import slots_of
from hicache.testing.sglang_released import import_sglang

RECIPE: Mapping[str, object] = {
    "backend_name": "hicache",
    "module_path": "hicache.engines.sglang",
    "class_name": "HiCacheBackend",
}
MEMORY: Mapping[str, object] = {"kind": "memory"}


def storage_config(
    *stores: Mapping[str, object], **changes: Any
) -> Any:  # Any: SGLang's, and any of its fields
    """``HiCacheStorageConfig`` of one rank alone.

    Args:
        stores: of ``tiers.stores``.
        changes: fields; ``extra`` holds keys that are added to the extra config.
    """
    extra = {
        **RECIPE,
        "interface_v1": 1,
        "tiers": {"stores": list(stores or (MEMORY,))},
        **changes.pop("extra", {}),
    }
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "tiny",
        "extra_config": {key: value for key, value in extra.items() if value is not None},
    }
    return import_sglang().storage.HiCacheStorageConfig(**{**fields, **changes})


class SglangRig(Closing):
    """A backend attached to host pools, as a controller of SGLang attaches it.

    Args:
        config: what ``storage_config`` made.
        kv: the anchor pool.
        sides: the other pools by name.
        arguments: for the backend's constructor: ``make_store``, ``clock``.
    """

    def __init__(
        self,
        config: Any,  # Any: SGLang's
        kv: Any,
        *,
        arguments: Mapping[str, Any] | None = None,
        **sides: Any,
    ) -> None:
        released = import_sglang()
        self.names = released.storage.PoolName
        self.pools = {"kv": kv, **sides}
        self.backend = released.factory.create_backend("dynamic", config, kv, **(arguments or {}))
        try:
            self.backend.register_mem_pool_host(kv)
            for name, pool in self.pools.items():
                self.backend.register_mem_host_pool_v2(pool, self.names(name))
            self.backend.on_host_pools_registered()
        except BaseException:
            self.backend.close()
            raise

    def put(self, keys: Sequence[str], numbers: list[int]) -> list[bool]:
        """Write pages of the anchor pool."""
        return list(self.backend.batch_set_v1(keys, slots_of(self.pools["kv"], numbers)))

    def get(self, keys: Sequence[str], numbers: list[int]) -> list[bool]:
        return list(self.backend.batch_get_v1(keys, slots_of(self.pools["kv"], numbers)))

    def put_side(self, name: str, keys: Sequence[str], numbers: list[int]) -> list[bool]:
        """Write pages of another pool."""
        transfer = self.transfer(name, keys, numbers)
        return list(self.backend.batch_set_v2([transfer])[transfer.name])

    def get_side(self, name: str, keys: Sequence[str], numbers: list[int]) -> list[bool]:
        transfer = self.transfer(name, keys, numbers)
        return list(self.backend.batch_get_v2([transfer])[transfer.name])

    def query(
        self, keys: Sequence[str], **policies: tuple[str, int]
    ) -> Any:  # Any: SGLang's PoolTransferResult
        """Ask which prefixes can be restored; for each other pool its policy and how many pages at the end."""
        transfers = [
            import_sglang().storage.PoolTransfer(
                name=self.names(name), keys=list(keys[:count]), hit_policy=hit_policy(policy)
            )
            for name, (policy, count) in policies.items()
        ]
        return self.backend.batch_exists_v2(list(keys), transfers)

    def transfer(
        self, name: str, keys: Sequence[str], numbers: list[int]
    ) -> Any:  # Any: SGLang's PoolTransfer
        indices: torch.Tensor = slots_of(self.pools[name], numbers)
        return import_sglang().storage.PoolTransfer(
            name=self.names(name), keys=list(keys), host_indices=indices
        )

    def close(self) -> None:
        self.backend.close()


def scripted(kv: Any, *, store: ScriptedStore, clock: ManualClock | None = None, **sides: Any) -> SglangRig:
    """A backend on a store that does what the test says, without a breaker in front."""
    arguments = {"make_store": lambda *_: store, "clock": clock or ManualClock()}
    return SglangRig(storage_config(), kv, arguments=arguments, **sides)


def chained_hashes(tokens: Any, prior: str | None = None, page_size: int = 4) -> list[str]:
    """In place of SGLang's ``get_hash_str``, which is compiled when it is first called: one for each whole page."""
    ids = list(tokens)  # ids, or SGLang's RadixKey, which is gone through alike
    hashes = []
    for begin in range(0, len(ids) - page_size + 1, page_size):
        prior = hashlib.sha256(f"{prior}:{ids[begin : begin + page_size]}".encode()).hexdigest()
        hashes.append(prior)
    return hashes


def hit_policy(name: str) -> Any:  # Any: SGLang's PoolHitPolicy
    return import_sglang().storage.PoolHitPolicy(name)
