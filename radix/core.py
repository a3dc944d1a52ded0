"""Picks the tree core. The only place that knows which ones exist."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable
from types import ModuleType

from hicache.errors import CoreUnavailableError
from hicache.radix.check import check_config
from hicache.radix.interface import TreeConfig, TreeCore
from hicache.radix.pytree import PyTreeCore
from hicache.radix.rules.base import runs_in_rust
from hicache.types import ComponentSpec, ReuseRule

logger = logging.getLogger(__name__)

CORE_VARIABLE = "HICACHE_CORE"
KINDS = ("auto", "rust", "python")
EXTENSION = "hicache.radix._core"


def core_kind(requested: str | None = None, components: Iterable[ComponentSpec] = ()) -> tuple[str, str]:
    """Which core runs, and the reason in words.

    Args:
        requested: ``auto``, ``rust`` or ``python``; None reads ``HICACHE_CORE`` (default ``auto``).
        components: the model it is for; a reuse rule written in Python that is more than a ``SpanRule``
            needs the Python core.

    Raises:
        CoreUnavailableError: ``rust`` was asked for and cannot run here, the name is unknown, or the
            extension is there and broken.
    """
    kind = requested if requested is not None else os.environ.get(CORE_VARIABLE, "auto")
    if kind not in KINDS:
        raise CoreUnavailableError(f"{kind!r} is not a tree core; choose {', '.join(KINDS)}")
    if kind == "python":
        return "python", "asked for"
    lacking = _why_not_rust(components)
    if lacking is None:
        return "rust", "asked for" if kind == "rust" else "the extension is installed"
    if kind == "rust":
        raise CoreUnavailableError(
            f"the Rust core cannot run: {lacking}; set {CORE_VARIABLE}=python or leave it unset"
        )
    return "python", lacking


def make_core(config: TreeConfig, kind: str | None = None) -> TreeCore:
    """Build a tree core; raises ``ConfigError`` or ``CoreUnavailableError``."""
    chosen, reason = core_kind(kind, config.components)
    logger.info("tree core: %s (%s)", chosen, reason)
    if chosen == "python":
        return PyTreeCore(config)
    check_config(config)
    core: TreeCore = importlib.import_module(EXTENSION).RustTreeCore(config)
    return core


def is_debug_build() -> bool:
    """Whether the Rust core is there and was built without optimisation."""
    module = _extension()
    return module is not None and bool(module.IS_DEBUG_BUILD)


def _why_not_rust(components: Iterable[ComponentSpec]) -> str | None:
    for spec in components:
        if spec.rule not in tuple(ReuseRule) and not runs_in_rust(spec):
            return (
                f"the reuse rule {spec.rule} of {spec.name} is written in Python, and is more than a SpanRule"
            )
    return None if _extension() is not None else "the extension was not built"


def _extension() -> ModuleType | None:
    """The Rust extension; None where there is none."""
    try:
        module = importlib.import_module(EXTENSION)
    except ModuleNotFoundError as error:
        if error.name != EXTENSION:
            raise CoreUnavailableError(f"the Rust core is installed and broken: {error}") from error
        return None
    except ImportError as error:
        raise CoreUnavailableError(f"the Rust core is installed and broken: {error}") from error
    return module
