"""What no single section can see: contradictions, what this machine refuses, and warnings."""

from __future__ import annotations

import mmap
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.config.fields import Problem
from hicache.config.model import ModelConfig, RanksConfig
from hicache.config.policy import SESSION_POLICIES, PolicyConfig
from hicache.config.secrets import said_file, said_variable
from hicache.config.sizing import device_budget, device_slots, most_least, pool_problems, useful_slots
from hicache.config.stored import stored_bytes
from hicache.config.tiers import (
    DeviceConfig,
    DiskStoreConfig,
    HostConfig,
    MemoryStoreConfig,
    RedisStoreConfig,
    write_bytes,
)
from hicache.config.units import format_duration
from hicache.types import ComponentSpec, ReuseRule

if TYPE_CHECKING:  # schema checks itself with this module
    from hicache.config.schema import HiCacheConfig

_CLINGING_BYTES = 64 << 20
"""Of a smaller L1 it is no matter."""
_SMALL_PAGES = 4
"""A larger slot keeps less than a quarter of itself."""
Store = DiskStoreConfig | MemoryStoreConfig | RedisStoreConfig


def contradictions(
    *,
    model: ModelConfig | None,
    ranks: RanksConfig | None,
    device: DeviceConfig | None,
    host: HostConfig | None,
    stores: Mapping[int, Store],
    policy: PolicyConfig | None,
) -> Iterator[Problem]:
    """Problems between sections. A section that is itself wrong is None, and its checks wait.

    Args:
        stores: the well-formed stores by their place in the list.
    """
    if host is not None and ranks is not None:
        yield from _limit(host, ranks.count)
    if model is None or ranks is None:
        return
    specs = model.specs()
    for key, pool in (("device", device), ("host", host)):
        if pool is not None:
            found = pool_problems(pool, specs, model.page_size, num_ranks=ranks.count)
            yield from (Problem(("tiers", key, *path), text) for path, text in found)
    largest = max(specs, key=lambda spec: spec.slot_bytes(model.page_size))
    yield from _stores_below_a_slot(stores, largest, model.page_size, ranks.count)
    if policy is not None and ranks.backend != "none":
        yield from _impatient_ranks(ranks, policy)
    if policy is not None and stores:
        yield from _queues_below_a_slot(policy, largest, model.page_size)
        yield from _late_timeouts(stores, policy)


def machine_problems(stores: Mapping[int, Store]) -> Iterator[Problem]:
    """What this machine refuses: folders that cannot be used, files that cannot be read or are no certificates."""
    for i, store in stores.items():
        if isinstance(store, DiskStoreConfig) and store.directory is not None:
            text = _not_writable(store.directory)
            if text:
                yield Problem(("tiers", "stores", i, "path"), text)
        if isinstance(store, RedisStoreConfig):
            unreadable = False
            for key in ("ca_file", "cert_file", "key_file"):
                path = getattr(store, key)
                text = None if path is None else _not_readable(path)
                if text:
                    unreadable = True
                    yield Problem(("tiers", "stores", i, key), text)
            if not unreadable:
                yield from _not_certificates(store, i)


def config_warnings(config: HiCacheConfig, *, environ: Mapping[str, str] | None = None) -> list[str]:
    """What works but is unlikely to be meant; one line each, key first.

    Args:
        environ: where to look for a password's variable; default: this process's environment.
    """
    variables = os.environ if environ is None else environ
    return [
        *_inert(config),
        *_inert_admission(config),
        *_apart(config, variables),
        *_inverted(config),
        *_cramped(config),
        *_without_marks(config),
        *_clinging(config),
        *_secrets(config.tiers.stores, variables),
    ]


# ---- contradictions ------------------------------------------------------------------------------
def _limit(host: HostConfig, num_ranks: int) -> Iterator[Problem]:
    total = host.total_bytes(num_ranks)
    if host.limit is None or total <= host.limit:
        return
    if host.capacity_per_rank is not None:
        product = f"{num_ranks} ranks x {host.capacity_per_rank} = {total} bytes"
        yield Problem(
            ("tiers", "host", "capacity_per_rank"),
            f"{product}, over the limit of {host.limit}; expected at most {host.limit // num_ranks} a rank",
        )
    else:
        yield Problem(("tiers", "host", "capacity"), f"{total} bytes, over the limit of {host.limit}")


def _impatient_ranks(ranks: RanksConfig, policy: PolicyConfig) -> Iterator[Problem]:
    longest_s = policy.wait_limit + policy.store_timeout
    if ranks.timeout <= longest_s:
        yield Problem(
            ("ranks", "timeout"),
            f"{format_duration(ranks.timeout)}, but a rank may rightly be late by policy.wait_limit +"
            f" policy.store_timeout, {format_duration(longest_s)}; expected more",
        )


def _stores_below_a_slot(
    stores: Mapping[int, Store], largest: ComponentSpec, page_size: int, num_ranks: int
) -> Iterator[Problem]:
    slot_bytes = largest.slot_bytes(page_size)
    for i, store in stores.items():
        if isinstance(store, RedisStoreConfig) or store.capacity is None:
            continue
        share, needed = store.capacity // num_ranks, stored_bytes(store, slot_bytes)
        if share < needed:
            yield Problem(
                ("tiers", "stores", i, "capacity"),
                f"{share} bytes for each of {num_ranks} rank(s), but one slot of {largest.name} takes {needed}"
                f" ({slot_bytes} and what the store adds); expected at least {write_bytes(needed * num_ranks)}",
            )


def _queues_below_a_slot(policy: PolicyConfig, largest: ComponentSpec, page_size: int) -> Iterator[Problem]:
    slot_bytes = largest.slot_bytes(page_size)
    for key, queue_bytes in (("store", policy.queues.store), ("prefetch", policy.queues.prefetch)):
        if queue_bytes < slot_bytes:
            yield Problem(
                ("policy", "queues", key),
                f"{queue_bytes} bytes, but one slot of {largest.name} takes {slot_bytes}, so it would"
                f" always be dropped; expected at least {write_bytes(slot_bytes)}",
            )


def _late_timeouts(stores: Mapping[int, Store], policy: PolicyConfig) -> Iterator[Problem]:
    for i, store in stores.items():
        timeout_s = store.timeout if isinstance(store, RedisStoreConfig) else None
        if timeout_s is not None and timeout_s > policy.store_timeout:
            yield Problem(
                ("tiers", "stores", i, "timeout"),
                f"{format_duration(timeout_s)} is over policy.store_timeout,"
                f" {format_duration(policy.store_timeout)}, which would end the call first; expected less",
            )


# ---- this machine --------------------------------------------------------------------------------
def _not_writable(directory: Path) -> str | None:
    nearest = directory
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        is_folder = nearest.is_dir()
    except OSError:  # a link to where we may not look
        is_folder = False
    if not is_folder:
        return f"{nearest} is not a folder, so {directory} cannot be one; choose another path"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} is not writable by this user; choose another path or change its mode"
    found, wanted = nearest.stat().st_uid, os.geteuid()
    if nearest == directory and found != wanted:
        return (
            f"{nearest} belongs to user {found}, this process runs as user {wanted}; change its owner or"
            " choose another path"
        )
    return None


def _not_certificates(store: RedisStoreConfig, i: int) -> Iterator[Problem]:
    """What a TLS connection could never be made with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if store.ca_file is not None:
        try:
            context.load_verify_locations(Path(store.ca_file).expanduser())
        except (ssl.SSLError, OSError) as error:
            text = f"{store.ca_file} holds no certificates ({_reason(error)}); expected PEM"
            yield Problem(("tiers", "stores", i, "ca_file"), text)
    if store.cert_file is not None:
        key_file = None if store.key_file is None else Path(store.key_file).expanduser()
        try:
            # An empty password: a key that needs one is refused and not asked for.
            context.load_cert_chain(Path(store.cert_file).expanduser(), key_file, password="")
        except (ssl.SSLError, OSError) as error:
            text = (
                f"{store.cert_file} holds no certificate, or its key is not in {store.key_file or store.cert_file}"
                f" ({_reason(error)}); expected PEM, without a password"
            )
            yield Problem(("tiers", "stores", i, "cert_file"), text)


def _not_readable(path: str) -> str | None:
    try:
        with Path(path).expanduser().open("rb"):
            return None
    except (OSError, RuntimeError) as error:  # RuntimeError: a home folder that is unknown
        return f"{path} cannot be read ({_reason(error)}); expected a readable file"


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


# ---- warnings ------------------------------------------------------------------------------------
def _inert(config: HiCacheConfig) -> Iterator[str]:
    model, min_tokens = config.model, config.policy.prefetch.min_tokens
    if not model.can_hit:
        yield (
            f"model.page_size: a page of {model.page_size} tokens against a longest request"
            f" (model.max_tokens) of {model.max_tokens}: the cache can never hit"
        )
    elif config.tiers.stores and model.reusable_tokens is not None and min_tokens > model.reusable_tokens:
        yield (
            f"policy.prefetch.min_tokens: {min_tokens} tokens against a longest request"
            f" (model.max_tokens) of {model.max_tokens}, of which {model.reusable_tokens} can be reused:"
            " nothing is ever prefetched"
        )
    for spec in model.specs():
        if spec.rule == ReuseRule.WINDOW and model.max_tokens and spec.window_tokens > model.max_tokens:
            yield (
                f"model.components.{spec.name}.window: {spec.window_tokens} tokens against a longest"
                f" request (model.max_tokens) of {model.max_tokens}: it is kept whole, as by rule path"
            )


def _inert_admission(config: HiCacheConfig) -> Iterator[str]:
    policy, tiers = config.policy, config.tiers
    if policy.admission == "ranked" and tiers.host is None:
        yield "policy.admission: ranked has no effect without L2, which it is about; give tiers.host, or leave it out"
    if policy.store_admission != "unless_over":
        return
    if not tiers.stores:
        yield (
            "policy.store_admission: unless_over has no effect without L3, which it is about; give tiers.stores,"
            " or leave it out"
        )
    if policy.eviction not in SESSION_POLICIES:
        yield (
            f"policy.store_admission: unless_over has no effect with policy.eviction {policy.eviction}, which follows"
            f" no sessions; set that to {' or '.join(SESSION_POLICIES)}, or leave this out"
        )


def _apart(config: HiCacheConfig, variables: Mapping[str, str]) -> Iterator[str]:
    """Ranks that compute together must reuse the same tokens. Launchers' variables are looked at, never taken."""
    world_size = variables.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1 and config.ranks.count == 1:
        yield (
            f"ranks: one rank, but WORLD_SIZE is {world_size} here, which is not read; say under ranks which of how"
            " many this is, unless each process serves a whole model"
        )
    if config.ranks.count > 1 and config.ranks.backend == "none":
        yield (
            f"ranks.backend: none, with {config.ranks.count} ranks: each decides alone what it reuses; set gloo and"
            " an address, unless the engine hands a group over or takes the least of all ranks itself"
        )


def _inverted(config: HiCacheConfig) -> Iterator[str]:
    """A lower tier should hold more than the one above it."""
    num_ranks = config.ranks.count
    above_name, above = "tiers.device", config.tiers.device.total_bytes(num_ranks)
    lower = [] if config.tiers.host is None else [("tiers.host", config.tiers.host.total_bytes(num_ranks))]
    for i, store in enumerate(config.tiers.stores):
        if not isinstance(store, RedisStoreConfig) and store.capacity is not None:
            lower.append((f"tiers.stores.{i}", store.capacity))
    for name, total in lower:
        if total < above:
            yield (
                f"{name}.capacity: {write_bytes(total)} is less than {above_name} above it,"
                f" {write_bytes(above)}: such a tier only costs"
            )
        above_name, above = name, total


def _cramped(config: HiCacheConfig) -> Iterator[str]:
    model = config.model
    if model.max_tokens is None:
        return
    slots = device_slots(config)
    needed = -(-model.max_tokens // model.page_size)
    if device_budget(config) is not None:
        yield from _cramped_together(config, needed)
        return
    for spec in model.specs():
        if not spec.is_checkpoint and spec.rule != ReuseRule.WINDOW and slots[spec.name] < needed:
            yield (
                f"tiers.device: {slots[spec.name]} pages of {spec.name} a rank, but a request of"
                f" model.max_tokens {model.max_tokens} needs {needed}: it will be refused"
            )


def _cramped_together(config: HiCacheConfig, num_pages: int) -> Iterator[str]:
    """As the tree asks of a shared L1 before it admits a prompt: pages, windows, and a state with the one it leaves."""
    page_size, specs = config.model.page_size, config.model.specs()
    needed = {
        spec.name: 2
        if spec.is_checkpoint
        else min(num_pages, -(-spec.window_tokens // page_size))
        if spec.rule == ReuseRule.WINDOW
        else num_pages
        for spec in specs
    }
    num_bytes = sum(needed[spec.name] * spec.slot_bytes(page_size) for spec in specs)
    capacity_bytes = config.tiers.device.rank_bytes(config.ranks.count)
    if capacity_bytes < num_bytes:
        parts = ", ".join(f"{count} of {name}" for name, count in needed.items())
        yield (
            f"tiers.device: {capacity_bytes} bytes a rank, but a request of model.max_tokens"
            f" {config.model.max_tokens} needs {num_bytes} ({parts}): it will be refused; raise capacity to"
            f" {write_bytes(num_bytes * config.ranks.count)} or more"
        )


def _without_marks(config: HiCacheConfig) -> Iterator[str]:
    """L1 has room for what a request runs on, but not for what the next one could reuse."""
    page_size, slots = config.model.page_size, device_slots(config)
    specs = config.model.specs()
    useful_bytes = sum(useful_slots(spec, page_size) * spec.slot_bytes(page_size) for spec in specs)
    is_shared = device_budget(config) is not None
    most = Fraction(1) if is_shared else most_least(specs)
    total = write_bytes(-(-useful_bytes * most.denominator // most.numerator) * config.ranks.count)
    if is_shared:
        capacity_bytes = config.tiers.device.rank_bytes(config.ranks.count)
        if capacity_bytes < useful_bytes:
            parts = ", ".join(f"{useful_slots(spec, page_size)} of {spec.name}" for spec in specs)
            yield (
                f"tiers.device: {capacity_bytes} bytes a rank, of which a running request takes nearly all: next to"
                f" nothing is ever reused; expected room for {parts}: raise capacity to {total} or more"
            )
        return
    for spec in specs:
        useful = useful_slots(spec, page_size)
        if slots[spec.name] < useful:
            unit = "states" if spec.is_checkpoint else "pages"
            yield (
                f"tiers.device: {slots[spec.name]} {unit} of {spec.name} a rank, of which a running request takes"
                f" all: next to nothing is ever reused; expected at least {useful}: raise capacity to {total} or"
                " more, or give it more by split"
            )


def _clinging(config: HiCacheConfig) -> Iterator[str]:
    """Memory moves between the components of a shared L1 by the system's pages; slots that share one keep it."""
    num_bytes = config.tiers.device.rank_bytes(config.ranks.count)
    if device_budget(config) is None or num_bytes < _CLINGING_BYTES:
        return
    page_size, specs = config.model.page_size, config.model.specs()
    layers = {spec.name: spec.slot_bytes(page_size) // spec.num_layers for spec in specs}
    small = {
        name: size
        for name, size in layers.items()
        if size % mmap.PAGESIZE and size < _SMALL_PAGES * mmap.PAGESIZE
    }
    if small:
        parts = ", ".join(f"{size} bytes of {name}" for name, size in small.items())
        yield (
            f"tiers.device.split: shared, where a slot has {parts} in a layer, which is not whole pages of the system"
            f" ({mmap.PAGESIZE} bytes): what is freed here and there stays in memory, up to"
            f" {min(len(specs), 1 + len(small))} times the capacity in all; raise model.page_size, leave memory"
            " free, or set fixed"
        )


def _secrets(stores: Sequence[Store], variables: Mapping[str, str]) -> Iterator[str]:
    for i, store in enumerate(stores):
        named = [("codec.key", store.codec.key_env, store.codec.key_file)]
        if isinstance(store, RedisStoreConfig):
            named.append(("password", store.password_env, store.password_file))
        for key, variable, path in named:
            if variable is not None and not variables.get(variable):
                yield f"tiers.stores.{i}.{key}_env: {said_variable(variable)} is not set here"
            if path is not None and _not_readable(path):
                yield f"tiers.stores.{i}.{key}_file: {said_file(path)} cannot be read here"
