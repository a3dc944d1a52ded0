"""An LMCache YAML (``LMCACHE_CONFIG_FILE``) as a configuration of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hicache.config.foreign import Translation, add_redis
from hicache.types import MAX_PAGE_SIZE

GIB = 2**30
POLICIES = {"lru": "lru", "lfu": "lfu", "fifo": "fifo", "mru": "mru"}
DEFAULTS: Mapping[str, float] = {"chunk_size": 256, "max_local_cpu_size": 5.0, "blocking_timeout_secs": 10}
UNBOUNDED_DISK_GIB = 100.0

KNOWN_ONLY: Mapping[str, str] = {
    "save_decode_cache": "answers are always kept here, up to the last whole page",
    "use_layerwise": "an engine waits layer by layer by itself here (lease.wait_layer)",
    "enable_async_loading": "fetches from L3 always run ahead here (policy.prefetch)",
    "enable_kv_events": "here: events.endpoint",
    "pin_timeout_sec": "nothing is pinned by time here; a lease ends with its request",
    "blending": "no counterpart",
    "enable_blending": "no counterpart: payload is reused as a prefix only",
    "enable_p2p": "no counterpart: processes share a store, they do not copy from each other",
    "enable_pd": "no counterpart: prefill and decode share a store here",
    "gds_path": "no counterpart: the disk store reads through host memory",
    "weka_path": "no counterpart; a mounted folder works as tiers.stores {kind: disk, path: ...}",
    "controller_url": "no counterpart: there is no controller",
    "enable_controller": "no counterpart: there is no controller",
    "lmcache_instance_id": "no counterpart",
    "internal_api_server_enabled": "here: admin.socket and hicache ctl",
}
"""Keys that set nothing here, and why."""
IDENTIFYING = (
    "chunk_size",
    "local_cpu",
    "max_local_cpu_size",
    "local_disk",
    "max_local_disk_size",
    "remote_url",
)


def translate(settings: Mapping[str, object], into: Translation) -> None:
    """Take over a whole YAML; what is not given has LMCache's default."""
    given = {key: value for key, value in settings.items() if value is not None}
    for key, default in DEFAULTS.items():
        given.setdefault(key, default)
    for key, value in given.items():
        if key in _READERS:
            _READERS[key](into, key, value)
        elif key == "max_local_disk_size" or key in KNOWN_ONLY:
            if key in KNOWN_ONLY and value is not False:
                into.note(key, KNOWN_ONLY[key])
        elif key == "extra_config":
            _extra(into, value)
        else:
            into.note(key, "not known here; no counterpart")
    _disk(into, given)
    stores = into.tree["tiers"]["stores"]
    stores.sort(key=lambda section: section["kind"] != "disk")  # LMCache asks its disk before a remote


def _local_cpu(into: Translation, key: str, value: object) -> None:
    if not into.flag(key, value):
        into.note(key, "L2 is also what pages pass through on their way to L3 here, so it stays")


def _host(into: Translation, key: str, value: object) -> None:
    into.put("tiers.host.capacity_per_rank", into.size(key, value, GIB))


def _disk(into: Translation, given: Mapping[str, object]) -> None:
    path = given.get("local_disk")
    if path is None or path is False:
        return
    if not isinstance(path, str) or not path.strip():
        into.refuse("local_disk", path, "a folder, like file:///mnt/cache/")
        return
    size = given.get("max_local_disk_size", 0)
    if size == 0:
        into.note("max_local_disk_size", f"no size is given; {UNBOUNDED_DISK_GIB:g}GiB was taken, set yours")
        size = UNBOUNDED_DISK_GIB
    capacity = into.size("max_local_disk_size", size, GIB)
    ranks = into.tree.get("ranks", {})
    if any(ranks.get(f"{axis}_size", 1) > 1 for axis in ("tp", "pp", "cp")):
        into.note("max_local_disk_size", "is for each rank there, and for all ranks together here")
    folder = path.removeprefix("file://").rstrip("/") or "/"
    into.note("local_disk", "pages that LMCache left there are not read; give it a folder of its own")
    into.add_store({"kind": "disk", "path": folder, "capacity": capacity})


def _remote(into: Translation, key: str, value: object) -> None:
    if not isinstance(value, str):
        into.refuse(key, value, "an address, like redis://host:6379")
    elif not add_redis(into, key, value):
        scheme = value.partition("://")[0]
        into.note(key, f"no counterpart for {scheme[:20]}://; stores here are disk and redis")


def _serde(into: Translation, key: str, value: object) -> None:
    if value != "naive":
        into.note(key, "no counterpart: payload is stored as it is, or without loss (tiers.stores.N.codec)")


def _eviction(into: Translation, key: str, value: object) -> None:
    policy = into.word(key, value, POLICIES)
    if policy is not None:
        into.put("policy.eviction", policy)


def _unfull(into: Translation, key: str, value: object) -> None:
    if into.flag(key, value):
        into.note(key, "no counterpart: only whole pages are kept")


def _min_tokens(into: Translation, key: str, value: object) -> None:
    number = into.number(key, value)
    if number is not None:
        into.put("policy.prefetch.min_tokens", int(number))


def _timeout(into: Translation, key: str, value: object) -> None:
    into.put("policy.store_timeout", into.seconds(key, value))


def _extra(into: Translation, value: object) -> None:
    if not isinstance(value, Mapping):
        into.refuse("extra_config", value, "a mapping")
        return
    for key in value:
        into.note(f"extra_config.{key}", "not known here; no counterpart")


_READERS: Mapping[str, Callable[[Translation, str, object], None]] = {
    "chunk_size": lambda into, key, value: into.page_size(key, value, MAX_PAGE_SIZE),
    "local_cpu": _local_cpu,
    "max_local_cpu_size": _host,
    "local_disk": lambda _into, _key, _value: None,  # with its size, at the end
    "remote_url": _remote,
    "remote_serde": _serde,
    "cache_policy": _eviction,
    "save_unfull_chunk": _unfull,
    "min_retrieve_tokens": _min_tokens,
    "blocking_timeout_secs": _timeout,
}
