"""What of a configuration would fail or not fit where it is to run: told before anything is started."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hicache.cli._machine import device_failures, lock_warnings
from hicache.clock import MonotonicClock
from hicache.config import DiskStoreConfig, HiCacheConfig, MemoryStoreConfig, config_warnings
from hicache.config.units import approximate_bytes
from hicache.errors import ConfigError, CoreUnavailableError
from hicache.radix.core import core_kind
from hicache.radix.ordering import make_ordering
from hicache.radix.rules.base import make_rule

Finding = tuple[str, str]

FAILS = "fails"
"""The name of what would keep the cache from starting."""
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def config_findings(
    torch: Any,  # the module, or a stand-in
    config: HiCacheConfig,
    *,
    lockable: int | None = None,
    memory_bytes: int | None = None,
) -> list[Finding]:
    """What of a configuration would fail or does not fit this machine; says so where all does.

    Args:
        lockable: ``RLIMIT_MEMLOCK``; default: this process's.
        memory_bytes: what a process may use; default: the machine's, or its control group's.
    """
    failures = [*start_failures(config, memory_bytes=memory_bytes), *device_failures(torch, config)]
    advice = [
        *config_warnings(config),
        *disk_warnings(config),
        *lock_warnings(torch, config, lockable=lockable),
    ]
    found = [(FAILS, text) for text in failures] + [("config", text) for text in advice]
    return found or [("config", "fits this machine")]


def gpu_failures(config: HiCacheConfig) -> Iterator[str]:
    """What of a GPU's configuration this machine does not have; torch is imported for such a one only."""
    if config.tiers.device.kind != "cuda":
        return
    try:
        import torch
    except ImportError as error:
        yield f"tiers.device.kind: is cuda, but torch cannot be imported here ({error})"
        return
    yield from device_failures(torch, config)


def gpu_warnings(config: HiCacheConfig) -> Iterator[str]:
    """What may fail of it; nothing where ``gpu_failures`` finds no torch."""
    if config.tiers.device.kind != "cuda":
        return
    with contextlib.suppress(ImportError):
        import torch

        yield from lock_warnings(torch, config)


def code_failures(config: HiCacheConfig) -> Iterator[str]:
    """What no machine starts: a policy or rule of the user's own that cannot be loaded, a core that cannot run it."""
    specs = config.model.specs()
    page_size = config.model.page_size
    checks: list[Callable[[], object]] = [
        partial(make_ordering, config.policy.eviction),
        *(partial(make_rule, i, spec, page_size, ()) for i, spec in enumerate(specs)),
        partial(core_kind, None, specs),
    ]
    for check in checks:
        yield from _refusal(check)


def start_failures(config: HiCacheConfig, *, memory_bytes: int | None = None) -> Iterator[str]:
    """What would keep the cache from starting on this machine, key first, each with the remedy.

    Nothing stays behind: a folder that is missing is tried for by making and removing an empty one beside it.

    Args:
        memory_bytes: what a process may use; default: the machine's, or its control group's.
    """
    from hicache.stores import make_member

    yield from code_failures(config)
    yield from _missing_packages(config)
    for i, store in enumerate(config.tiers.stores):
        if isinstance(store, DiskStoreConfig) and store.directory is not None:
            yield from _no_folder(f"tiers.stores.{i}.path", store.directory)
        yield from _refusal(partial(make_member, config, i, bytes(32), MonotonicClock()))
    yield from _no_socket(config.admin.path)
    yield from _too_little_memory(config, usable_memory() if memory_bytes is None else memory_bytes)


def disk_warnings(config: HiCacheConfig) -> Iterator[str]:
    """Stores that their file system cannot hold: they start, and stop taking pages when it is full."""
    for i, store in enumerate(config.tiers.stores):
        if not isinstance(store, DiskStoreConfig):
            continue
        folder = Path(tempfile.gettempdir()) if store.directory is None else store.directory
        with contextlib.suppress(OSError):  # a folder that cannot be had is told elsewhere
            free = shutil.disk_usage(_nearest(folder)).free
            held = 0 if store.directory is None else _folder_bytes(folder)
            if store.capacity > free + held:
                yield (
                    f"tiers.stores.{i}.capacity: {approximate_bytes(store.capacity)}, but the file system of {folder} has"
                    f" {approximate_bytes(free)} free: when it is full nothing more is stored; lower it"
                )


def usable_memory(limits: tuple[Path, ...] = _MEMORY_LIMITS) -> int:
    """Bytes that this machine has, or that its control group lets a process use."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limits:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            least = min(least, int(path.read_text(encoding="ascii")))
    return least


def _refusal(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except ConfigError as error:
        yield from error.problems
    except CoreUnavailableError as error:
        yield f"core: {error}"


def _missing_packages(config: HiCacheConfig) -> Iterator[str]:
    wanted = (
        ("tracing.enabled", config.tracing.enabled, "otel", ("opentelemetry",)),
        ("metrics.port", config.metrics.port is not None, "metrics", ("prometheus_client",)),
        ("events.endpoint", config.events.endpoint is not None, "events", ("msgspec", "zmq")),
    )
    for key, is_on, extra, modules in wanted:
        missing = [module for module in modules if is_on and find_spec(module) is None]
        if missing:
            yield f"{key}: needs {' and '.join(missing)}, not installed here; pip install 'hicache[{extra}]'"


def _no_folder(key: str, directory: Path) -> Iterator[str]:
    """Whether a folder can be used, or made: not all that look writable take files (``/proc`` as root)."""
    nearest = _nearest(directory)
    try:
        Path(tempfile.mkdtemp(prefix=".hicache-", dir=nearest)).rmdir()
    except OSError as error:
        yield f"{key}: {directory} cannot be made or written to ({error.strerror} in {nearest}); choose another path"


def _no_socket(path: Path | None) -> Iterator[str]:
    """What a start says of ``admin.socket``; whether somebody listens there is not asked: that may be this cache."""
    from hicache.admin_socket import place_refusal

    if path is None:
        return
    try:
        refusal = place_refusal(path)
    except FileNotFoundError:
        yield from _no_folder("admin.socket", path.parent)
    except OSError as error:
        yield f"admin.socket: {path} cannot be listened on: {error.strerror}"
    else:
        if refusal is not None:
            yield refusal


def _nearest(directory: Path) -> Path:
    """The folder, or the deepest one above it that is there."""
    while not os.path.lexists(directory) and directory != directory.parent:
        directory = directory.parent
    return directory


def _folder_bytes(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _too_little_memory(config: HiCacheConfig, memory_bytes: int) -> Iterator[str]:
    tiers, num_ranks = config.tiers, config.ranks.count
    wanted: dict[str, int] = {}
    if tiers.device.kind == "cpu":
        wanted["tiers.device"] = tiers.device.rank_bytes(num_ranks)
    if tiers.host is not None:
        wanted["tiers.host"] = tiers.host.rank_bytes(num_ranks)
    for i, store in enumerate(tiers.stores):
        if isinstance(store, MemoryStoreConfig) and store.capacity is not None:
            wanted[f"tiers.stores.{i}"] = store.capacity // num_ranks
    total = sum(wanted.values())
    if total > memory_bytes:
        largest = max(wanted, key=lambda key: wanted[key])
        parts = " + ".join(f"{key} {approximate_bytes(size)}" for key, size in wanted.items())
        yield (
            f"{largest}.capacity: a rank is to keep {approximate_bytes(total)} in memory ({parts}), but there are"
            f" {approximate_bytes(memory_bytes)}; lower it"
        )
