r"""HiCache as a storage backend of SGLang.

::

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache \
        --hicache-storage-backend dynamic --hicache-mem-layout page_first --hicache-storage-backend-extra-config '{
            "backend_name": "hicache", "module_path": "hicache.engines.sglang", "class_name": "HiCacheBackend",
            "interface_v1": 1, "config_file": "/etc/hicache/sglang.yaml"}'

SGLang keeps its own tree, device and host memory; HiCache is what lies behind them: local disk, Redis, or both stacked.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    HiCacheBackend: Any  # a class that exists once SGLang is there

__all__ = ["HiCacheBackend"]  # pyright: ignore[reportUnsupportedDunderAll]  # made on first use


def __getattr__(name: str) -> Any:  # Any: see above
    """``HiCacheBackend``, made when SGLang is there.

    Raises:
        EngineUnavailableError: SGLang is missing or too old; says which version is wanted.
    """
    if name != "HiCacheBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _backend_class()


@functools.cache
def _backend_class() -> Any:  # Any: see above
    from hicache.engines.sglang_backend import StorageBackend
    from hicache.engines.sglang_compat import load_engine

    found = load_engine()

    class HiCacheBackend(StorageBackend, found.storage_class):  # type: ignore[misc, name-defined]  # its base is known at run time only
        """A store of HiCache as SGLang's ``HiCacheStorage``."""

        engine = found

    return HiCacheBackend
