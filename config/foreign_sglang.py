"""SGLang's HiCache flags, and its storage extra config, as a configuration of ours.

The flags may stand in a shell command or, as ``key: value``, in a YAML or JSON file.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hicache.config.document import parse_document
from hicache.config.foreign import Translation
from hicache.config.policy import WRITE_POLICIES
from hicache.config.units import format_bytes
from hicache.errors import ConfigError
from hicache.types import MAX_PAGE_SIZE

GB = 10**9
DEFAULT_RATIO = 2.0
FILE_FOLDER = "/tmp/hicache"  # noqa: S108  where SGLang's own file backend puts its pages
UNBOUNDED_DISK = "100GiB"
EVICTIONS = {name: name for name in ("lru", "lfu", "slru", "priority", "tlru")}
EXTRA_CONFIG = "hicache_storage_backend_extra_config"
EXTRA_KEYS = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)
EXTRA_DEFAULTS: Mapping[str, object] = {
    "prefetch_threshold": 256,
    "prefetch_timeout_base": 1,
    "prefetch_timeout_per_ki_token": 0.25,
}
KNOWN_ONLY: Mapping[str, str] = {
    "hicache_io_backend": "no counterpart: the way to copy is chosen by measurement",
    "hicache_mem_layout": "no counterpart: L2 is always page-first",
    "hicache_storage_pass_prefix_keys": "no counterpart: a page's key names all before it",
    "enable_cache_report": "here: metrics.port, hicache replay",
    "kv_events_config": "here: events.endpoint",
    "disable_radix_cache": "no counterpart; leave the cache out instead",
}
"""Keys that set nothing here, and why."""
_CACHE_WORDS = ("hicache", "radix", "prefetch", "kv_", "cache")


def flags_of(text: str, source: str) -> dict[str, object]:
    """``--key value``, ``--key=value`` and ``--key`` of a shell command, dashes as underscores."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError([f"{source}: cannot be read as a command: {error}"]) from None
    flags: dict[str, object] = {}
    key = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            flags[key] = value if equals else True
            if equals:
                key = None
        elif key is not None:
            flags[key] = word
            key = None
    return flags


def is_extra_config(settings: Mapping[str, object]) -> bool:
    """Whether this is the storage extra config alone, not the flags."""
    return any(key in settings for key in EXTRA_KEYS)


def translate(settings: Mapping[str, object], into: Translation, folder: Path) -> None:
    """Take over flags, or an extra config alone; what is not given has SGLang's default.

    Args:
        folder: where an extra config named as ``@file`` is looked for.
    """
    given: dict[str, object] = {
        key.replace("-", "_"): value for key, value in settings.items() if value is not None
    }
    if is_extra_config(given):
        given = {EXTRA_CONFIG: dict(given)}
    given.setdefault("hicache_write_policy", "write_through")
    extra = {**EXTRA_DEFAULTS, **_extra_config(into, given.pop(EXTRA_CONFIG, {}), folder)}
    for key, value in {**given, **extra}.items():
        if key in _READERS:
            _READERS[key](into, key, value)
        elif key in KNOWN_ONLY:
            into.note(key, KNOWN_ONLY[key])
        elif key in extra or any(word in key for word in _CACHE_WORDS):
            into.note(key, "not known here; no counterpart")
    _host(into, given)


def _extra_config(into: Translation, value: object, folder: Path) -> dict[str, object]:
    if isinstance(value, Mapping):
        return {str(key): inner for key, inner in value.items()}
    if not isinstance(value, str) or not value.strip():
        into.refuse(EXTRA_CONFIG, value, "a JSON object, or @ and a file's name")
        return {}
    try:
        if value.startswith("@"):
            path = folder / value[1:]
            loaded: Any = parse_document(path.read_bytes(), str(path)).data  # Any: the file's
        else:
            loaded = json.loads(value)
    except OSError as error:
        into.problems.append(f"{EXTRA_CONFIG} ({into.source}): {value} cannot be read: {error.strerror}")
        return {}
    except ValueError as error:
        into.problems.append(f"{EXTRA_CONFIG} ({into.source}): is not JSON: {error}")
        return {}
    except RecursionError:
        into.problems.append(f"{EXTRA_CONFIG} ({into.source}): is nested too deeply; expected a JSON object")
        return {}
    if not isinstance(loaded, Mapping):
        into.refuse(EXTRA_CONFIG, loaded, "an object")
        return {}
    return {str(key): inner for key, inner in loaded.items()}


def _host(into: Translation, given: Mapping[str, object]) -> None:
    """``hicache_size`` for each rank, else a ratio of what L1 has."""
    size = given.get("hicache_size", 0)
    if size not in (0, "0"):
        into.put("tiers.host.capacity_per_rank", into.size("hicache_size", size, GB))
        return
    ratio = into.number("hicache_ratio", given.get("hicache_ratio", DEFAULT_RATIO))
    if ratio is None:
        return
    device = into.tree["tiers"]["device"]
    for key in ("capacity", "capacity_per_rank"):
        if key in device:
            into.put(f"tiers.host.{key}", format_bytes(int(ratio * _bytes(device[key]))))
    into.note("hicache_ratio", f"{ratio:g} times the base's L1; say --base with your own L1")


def _bytes(size: object) -> int:
    from hicache.config.units import parse_bytes

    return parse_bytes(size)


def _storage(into: Translation, key: str, value: object) -> None:
    if value == "file":
        into.note(
            key,
            f"pages that SGLang left there are not read; path {FILE_FOLDER}-pages and capacity"
            f" {UNBOUNDED_DISK} were taken, set yours",
        )
        into.add_store({"kind": "disk", "path": f"{FILE_FOLDER}-pages", "capacity": UNBOUNDED_DISK})
    else:
        into.note(key, f"no counterpart for {str(value)[:40]}; stores here are disk and redis")


def _words(path: str, known: Mapping[str, str]) -> Callable[[Translation, str, object], None]:
    def read(into: Translation, key: str, value: object) -> None:
        word = into.word(key, value, known)
        if word is not None:
            into.put(path, word)

    return read


def _whole(path: str) -> Callable[[Translation, str, object], None]:
    def read(into: Translation, key: str, value: object) -> None:
        number = into.number(key, value)
        if number is not None:
            into.put(path, int(number))

    return read


def _seconds(path: str) -> Callable[[Translation, str, object], None]:
    def read(into: Translation, key: str, value: object) -> None:
        into.put(path, into.seconds(key, value))

    return read


def _session(into: Translation, key: str, value: object) -> None:
    if into.flag(key, value):
        into.put("policy.eviction", "session")


def _nothing(into: Translation, key: str, value: object) -> None:
    """Read elsewhere, or on anyway."""


def _name(into: Translation, key: str, value: object) -> None:
    if isinstance(value, str) and value:
        into.put("model.name", value)
    else:
        into.refuse(key, value, "a model's name")


_READERS: Mapping[str, Callable[[Translation, str, object], None]] = {
    "page_size": lambda into, key, value: into.page_size(key, value, MAX_PAGE_SIZE),
    "hicache_size": _nothing,
    "hicache_ratio": _nothing,
    "enable_hierarchical_cache": _nothing,
    "hicache_write_policy": _words("policy.write", {name: name for name in WRITE_POLICIES}),
    "hicache_storage_prefetch_policy": _words(
        "policy.prefetch.mode", {name: name for name in ("best_effort", "wait_complete", "timeout")}
    ),
    "hicache_storage_backend": _storage,
    "radix_eviction_policy": _words("policy.eviction", EVICTIONS),
    "enable_session_radix_cache": _session,
    "model_path": _name,
    "served_model_name": _name,
    "tp_size": _whole("ranks.tp_size"),
    "tensor_parallel_size": _whole("ranks.tp_size"),
    "pp_size": _whole("ranks.pp_size"),
    "pipeline_parallel_size": _whole("ranks.pp_size"),
    "prefetch_threshold": _whole("policy.prefetch.min_tokens"),
    "prefetch_timeout_base": _seconds("policy.prefetch.timeout_base"),
    "prefetch_timeout_per_ki_token": _seconds("policy.prefetch.timeout_per_1024_tokens"),
}
