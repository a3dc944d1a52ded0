"""Picks the tree core. The only place that knows which ones exist."""

from __future__ import annotations

import logging
import os

from hicache.errors import CoreUnavailableError
from hicache.radix.interface import TreeConfig, TreeCore
from hicache.radix.pytree import PyTreeCore

logger = logging.getLogger(__name__)

CORE_VARIABLE = "HICACHE_CORE"
KINDS = ("auto", "rust", "python")


def core_kind(requested: str | None = None) -> tuple[str, str]:
    """Which core runs, and the reason in words.

    Args:
        requested: ``auto``, ``rust`` or ``python``; None reads ``HICACHE_CORE`` (default ``auto``).

    Raises:
        CoreUnavailableError: ``rust`` was asked for, or the name is unknown.
    """
    kind = requested if requested is not None else os.environ.get(CORE_VARIABLE, "auto")
    if kind not in KINDS:
        raise CoreUnavailableError(f"{kind!r} is not a tree core; choose {', '.join(KINDS)}")
    if kind == "rust":
        raise CoreUnavailableError(
            f"this version has no Rust core yet; set {CORE_VARIABLE}=python or leave it unset"
        )
    reason = "asked for" if kind == "python" else "this version has no other"
    return "python", reason


def make_core(config: TreeConfig, kind: str | None = None) -> TreeCore:
    """Build a tree core; raises ``ConfigError`` or ``CoreUnavailableError``."""
    chosen, reason = core_kind(kind)
    logger.info("tree core: %s (%s)", chosen, reason)
    return PyTreeCore(config)
