"""From what vLLM says of the model, and what its user says of tiers, to a HiCache configuration.

vLLM's blocks are a tier above all of HiCache's, and vLLM's own. The user's ``tiers.host`` is cut in two::

    tiers.host.capacity   =   device (7/8): shared with the workers, copied to and from vLLM's blocks
                            + host   (1/8): on the way to stores and back; without stores all is device
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from blake3 import blake3

from hicache.config import HiCacheConfig, load_config
from hicache.config.document import read_document
from hicache.config.tiers import FIXED_SPLIT
from hicache.engines.vllm_geometry import Geometry
from hicache.errors import ConfigError

logger = logging.getLogger(__name__)

FILE_KEY = "config_file"
_STAGING_SHARE = 8
_PLACEHOLDER = "1TiB"
_DIGEST_LETTERS = 32
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_CONFIGS = ("config.json", "adapter_config.json")


def make_settings(
    extra: Mapping[str, object], geometry: Geometry, model: Mapping[str, object]
) -> HiCacheConfig:
    """The configuration of the cache behind one engine.

    Args:
        extra: ``kv_connector_extra_config``: ``{"config_file": path}``, or the configuration itself.
        model: ``name``, ``weights``, ``dtype`` and ``max_tokens`` of ``model``; the user's ``weights`` win.

    Raises:
        ConfigError: the user's part is missing, contradicts itself, or names what vLLM decides.
    """
    source = _source(extra)
    given = read_document(source).data if isinstance(source, str) else source
    tiers, named = _section(given, "tiers"), _section(given, "model")
    problems = [
        f"model.{key}: is read from vLLM; remove it" for key in named if key not in ("weights", "max_tokens")
    ]
    if "device" in tiers:
        problems.append("tiers.device: is vLLM's own memory; remove it, and size tiers.host")
    if "host" not in tiers:
        problems.append("tiers.host: missing; expected the host memory for KV, like {capacity: 20GiB}")
    if problems:
        raise ConfigError(
            problems, source=f"kv_connector_extra_config ({source})" if source != given else None
        )
    filled: dict[str, object] = {
        **{f"model.{key}": value for key, value in model.items() if key not in named},
        "model.page_size": geometry.page_size,
        **{f"model.components.{name}": section for name, section in geometry.sections().items()},
        "tiers.device": {"kind": "cpu", "capacity": _PLACEHOLDER, "split": FIXED_SPLIT},
    }
    asked = load_config(source, overrides=filled)
    assert asked.tiers.host is not None
    total_bytes = asked.tiers.host.total_bytes(geometry.num_ranks)
    staging_bytes = total_bytes // _STAGING_SHARE if asked.tiers.stores else 0
    filled["tiers.device"] = {
        "kind": "cpu",
        "capacity": total_bytes - staging_bytes,
        "split": FIXED_SPLIT,  # workers map and pin the pool, so that its memory stays where it is
    }
    filled["tiers.host"] = {"capacity": staging_bytes, "pinned": False} if staging_bytes else None
    if asked.tiers.host.split is not None:
        raise ConfigError(["tiers.host.split: is not supported here; remove it"])
    if asked.events.endpoint is not None:
        raise ConfigError(
            [
                "events.endpoint: vLLM publishes the events of all tiers; remove it, and start with --kv-events-config"
            ]
        )
    return load_config(source, overrides=filled)


def model_section(
    vllm_config: Any, kv_cache_config: Any, geometry: Geometry, version: str
) -> dict[str, object]:
    """What tells this model's payload from another's, in a store that outlives both."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    path = Path(str(model.model))
    layout = geometry.digest(
        version.split("+", maxsplit=1)[0].rsplit(".", 1)[0],
        str(vllm_config.cache_config.cache_dtype),
        str(kv_cache_config.kv_cache_layout),
        str(getattr(vllm_config, "attention_config", None) and vllm_config.attention_config.backend),
        str(vllm_config.device_config.device_type),
        int(parallel.tensor_parallel_size),
    )
    if path.exists():
        name, weights = PurePath(path).name, files_digest(path)
    else:
        name = str(model.model)
        weights = str(model.revision or getattr(model.hf_config, "_commit_hash", None) or "")
    weights += _beside_the_files(model)
    return {
        "name": name,
        "weights": f"{weights}.{model.quantization or ''}.{layout}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_tokens": int(model.max_model_len),
    }


def _beside_the_files(model: Any) -> str:
    """What else decides what the weights compute: a changed config (``--hf-overrides``), weights in an object store."""
    overrides = model.hf_overrides
    if callable(overrides):
        overrides = f"{overrides.__module__}.{overrides.__qualname__}"
    streamed = "" if model.model_weights in ("", model.model) else str(model.model_weights)
    if not overrides and not streamed:
        return ""
    told = json.dumps([overrides, streamed], sort_keys=True, default=str)
    return f"+{blake3(told.encode()).hexdigest()[:_DIGEST_LETTERS]}"


def files_digest(checkpoint: Path) -> str:
    """Hash of a model's or an adapter's config and weights, 32 hexadecimal letters; reads every weight once.

    Args:
        checkpoint: a folder, or the one file that is all of it (GGUF).
    """
    hasher = blake3(max_threads=blake3.AUTO)
    inside = [checkpoint] if checkpoint.is_file() else checkpoint.iterdir()
    for path in sorted(path for path in inside if path.suffix in _WEIGHTS or path.name in _CONFIGS):
        hasher.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        hasher.update_mmap(path)
    return hasher.hexdigest()[:_DIGEST_LETTERS]


def adapter_digest(path: str) -> str:
    """Hash of a LoRA adapter's files; empty for one that is not on this machine's disk, or cannot be read."""
    folder = Path(path).expanduser()
    try:
        return files_digest(folder) if folder.is_dir() else ""
    except OSError as error:
        logger.warning(
            "adapter %s cannot be read (%s); its name and path alone tell its pages apart", path, error
        )
        return ""


def _source(extra: Mapping[str, object]) -> str | dict[str, object]:
    inline = dict(extra)
    file = inline.pop(FILE_KEY, None)
    if file is not None and inline:
        raise ConfigError(
            [f"kv_connector_extra_config: has {FILE_KEY} and {', '.join(inline)}; keep one of the two"]
        )
    if file is None and not inline:
        raise ConfigError(
            [
                f'kv_connector_extra_config: is empty; expected {{"{FILE_KEY}": "hicache.yaml"}}, or tiers inline'
            ]
        )
    return inline if file is None else str(file)


def _section(given: Any, name: str) -> Mapping[str, object]:
    section = given.get(name) if isinstance(given, Mapping) else None
    return section if isinstance(section, Mapping) else {}
