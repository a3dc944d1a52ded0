"""Which release this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def hicache_version() -> str:
    """Of the installed package; ``unknown`` where a checkout is only on the path, as an engine's may be."""
    try:
        return version("hicache")
    except PackageNotFoundError:
        return "unknown"
