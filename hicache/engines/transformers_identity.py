"""What tells the payload of one model from that of another, in a store that outlives both."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import torch
from blake3 import blake3

from hicache.engines.transformers_geometry import CacheGeometry
from hicache.engines.transformers_library import release

LAYOUT_VERSION = 1
"""Raise it when a page's bytes are laid out in another way."""
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "architectures", "use_cache")
DIGEST_LETTERS = 32


def weights_digest(model: Any) -> str:
    """Hash of all weights and of the config, 32 hexadecimal letters; reads every weight once."""
    hasher = blake3(max_threads=blake3.AUTO)
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_THE_MODEL}
    hasher.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        hasher.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        if tensor.numel():
            held = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            hasher.update(memoryview(held.numpy()))
    return hasher.hexdigest()[:DIGEST_LETTERS]


def layout_digest(geometry: CacheGeometry, library: ModuleType) -> str:
    """Hash of how payload lies in a page, 8 hexadecimal letters.

    A release of transformers may change what a state holds, so its number is part of it.
    """
    described = repr((LAYOUT_VERSION, release(str(library.__version__)), geometry.tokens, geometry.states))
    return blake3(described.encode()).hexdigest()[:8]
