"""Our part of ``--hicache-storage-backend-extra-config``: the stores, and who the model is.

SGLang owns device and host memory, so of a HiCache configuration only a few keys mean anything here. Any other is
refused, not ignored: a limit that nobody keeps is worse than none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hicache.config import HiCacheConfig, load_config
from hicache.config.document import Document, read_document
from hicache.config.fields import nearest
from hicache.engines.sglang_compat import OWN_KEYS
from hicache.errors import ConfigError

CONFIG_FILE = "config_file"
USED = {
    "model": ("name", "weights"),
    "tiers": ("stores", "stack"),
    "policy": ("store_timeout", "wait_limit"),
    "metrics": ("port", "host"),
}
"""The keys of a HiCache configuration that are read."""
_PLACE = "--hicache-storage-backend-extra-config"
_OWNED = {
    "model": "it is read from SGLang's pools",
    "tiers": "SGLang owns device and host memory: --mem-fraction-static, --hicache-ratio, --hicache-size",
    "policy": "SGLang decides: --hicache-write-policy, --hicache-storage-prefetch-policy, --radix-eviction-policy",
}
_SERVED = "served-by-sglang"
"""Stands for a name that the configuration does not give."""
_FILLED: Mapping[str, object] = {
    "model.page_size": 1,
    "model.components": {"full": {"rule": "path", "bytes_per_token": 1}},
    "tiers.device": {"kind": "cpu", "capacity": 1},
    "tiers.host": {"capacity": 1, "pinned": False},
}
"""What the schema wants to know and nobody here needs."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the extra config says.

    Args:
        config: stores, their stack, and limits of time; the rest of it means nothing.
        name, weights: the model, if the configuration names it.
        is_zero_copy: whether SGLang will call ``batch_get_v1`` and ``batch_set_v1``.
    """

    config: HiCacheConfig
    name: str | None
    weights: str | None
    is_zero_copy: bool


def read_settings(extra_config: Mapping[str, object] | None) -> Settings:
    """Read and check.

    Raises:
        ConfigError: with every problem found, one line each.
    """
    given = {key: value for key, value in (extra_config or {}).items() if key not in OWN_KEYS}
    path = given.pop(CONFIG_FILE, None)
    problems = list(_unknown(given, (CONFIG_FILE, *USED), ""))
    if path is not None:
        problems += [
            f"{key}: given together with {CONFIG_FILE}; keep one of them" for key in given if key in USED
        ]
        if not isinstance(path, str):
            problems.append(f"{CONFIG_FILE}: found {path!r}; expected the path of a YAML file")
    if problems:
        raise ConfigError(problems, source=_PLACE)
    document = read_document(str(path)) if path is not None else None
    data = given if document is None else document.data
    problems = list(_unused(data, document))
    if problems:
        raise ConfigError(problems, source=_PLACE if document is None else None)
    filled = dict(_FILLED)
    model = data.get("model")
    is_named = (
        isinstance(model, Mapping) and model.get("name") is not None
    ) or "HICACHE__MODEL__NAME" in os.environ
    if not is_named:
        filled["model.name"] = _SERVED
    config = load_config(given if path is None else str(path), overrides=filled)
    if not config.tiers.stores:
        raise ConfigError(
            [
                "tiers.stores: missing; expected at least one store, like {kind: disk, path: ..., capacity: 2TiB}"
            ],
            source=_PLACE if document is None else document.name,
        )
    return Settings(
        config=config,
        name=config.model.name if is_named else None,
        weights=config.model.weights,
        is_zero_copy=bool((extra_config or {}).get("interface_v1", 0)),
    )


def _unused(data: Mapping[str, object], document: Document | None) -> Iterator[str]:
    """Sections and keys that have no effect here, each with its place."""

    def place(*path: str) -> str:
        line = None if document is None else document.lines.get(path)
        return f" ({document.name}:{line})" if document is not None and line is not None else ""

    for section, keys in data.items():
        if section not in USED:
            yield from _unknown({section: keys}, tuple(USED), place(section))
        elif isinstance(keys, Mapping):
            for key in keys:
                if key not in USED[section]:
                    reason = _OWNED.get(section)
                    why = f"; {reason}" if reason else ""
                    known = ", ".join(USED[section])
                    yield f"{section}.{key}{place(section, str(key))}: not used here (used are {known}){why}; remove it"


def _unknown(keys: Mapping[str, object], known: tuple[str, ...], place: str) -> Iterator[str]:
    for key in keys:
        if key not in known:
            near = nearest(str(key), known)
            hint = f"did you mean {near}? " if near else ""
            yield f"{key}{place}: not used here; {hint}used are {', '.join(known)}"
