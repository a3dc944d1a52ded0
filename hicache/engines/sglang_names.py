"""What a page is called in the store: SGLang's hash of the tokens, and everything that makes equal tokens unequal bytes.

SGLang's hash of a page is chained over all tokens before it and begins with the request's namespace (LoRA, cache salt).
It knows nothing of model, dtype, layout and rank; those come from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from hicache.engines.sglang_compat import MAMBA
from hicache.engines.sglang_pages import HostPool
from hicache.errors import ConfigError
from hicache.radix.keys import Identity, encode_parts
from hicache.types import PageKey

NAMES_VERSION = 1
"""Raise it when a name comes to mean other bytes."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_SAMPLE_BYTES = 64 << 10
_NUM_SAMPLES = 64
_DTYPES = ("dtype", "temporal_dtype", "conv_dtype", "indexer_dtype")
_GEOMETRY = ("start_layer", "end_layer", "storage_format_tag")


def model_digest(
    storage_config: Any,  # Any: SGLang's
    *,
    name: str | None,
    weights: str | None,
    server_arguments: Mapping[str, str | None],
) -> bytes:
    """Which model it is; 32 bytes. Ranks of one server agree.

    Args:
        name, weights: as the configuration says; a name there takes the place of SGLang's and of the model's path, and
            weights that of a look into the model's files.
        server_arguments: what else a page's bytes hang on.

    Raises:
        ConfigError: nobody says which model it is, or its files cannot be read.
    """
    served = storage_config.model_name
    others = dict(server_arguments)
    path = others.get("model_path")
    if weights is None and path and Path(path).is_dir():
        others["checkpoint"] = checkpoint_sample(Path(path))
    if name is not None:
        others.pop("model_path", None)
    elif not served and not others.get("model_path"):
        raise ConfigError(
            [
                "model.name: missing, and SGLang gives no name either; name the model, two models may share the store"
            ]
        )
    parts = [part for item in sorted(others.items()) for part in item]
    named = ("named", name) if name is not None else ("served", served)
    return blake3(encode_parts("sglang model", NAMES_VERSION, *named, weights, *parts)).digest()


def checkpoint_sample(folder: Path) -> str:
    """Hash over config, sizes and evenly spread parts of all weight files, 64 hexadecimal letters; reads 4 MiB a file.

    Two checkpoints at one path, on two machines or one after the other, differ nearly everywhere. All of it would take
    each rank minutes.

    Raises:
        ConfigError: a file cannot be read.
    """
    hasher = blake3()
    try:
        for path in sorted(
            it for it in folder.iterdir() if it.suffix in _WEIGHTS or it.name == "config.json"
        ):
            size = path.stat().st_size
            hasher.update(encode_parts(path.name, size))
            with path.open("rb") as file:
                for begin in range(0, size, max(_SAMPLE_BYTES, -(-size // _NUM_SAMPLES))):
                    file.seek(begin)
                    hasher.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(
            [f"model.weights: missing, and the files in {folder} cannot be read ({error}); name the weights"]
        ) from error
    return hasher.hexdigest()


def pool_identity(
    model: bytes,
    storage_config: Any,  # Any: SGLang's
    component: str,
    pool: HostPool,
    page_size: int,
) -> bytes:
    """Digest of what the pages of a pool are, on this rank; 32 bytes.

    Args:
        page_size: tokens that one hash stands for.
    """
    is_shared = is_replicated(storage_config, component, pool)
    described = [(name, str(getattr(pool, name, None))) for name in (*_DTYPES, *_GEOMETRY)]
    return Identity(
        model=model.hex(),
        dtype=repr(described),
        layout=f"{type(pool).__name__} {pool.layout}",
        page_size=page_size,
        tp_size=1 if is_shared else storage_config.tp_size,
        tp_rank=0 if is_shared else storage_config.tp_rank,
        pp_size=storage_config.pp_size,
        pp_rank=storage_config.pp_rank,
        cp_size=storage_config.attn_cp_size,
        cp_rank=storage_config.attn_cp_rank,
    ).digest()


def is_replicated(storage_config: Any, component: str, pool: HostPool) -> bool:  # Any: SGLang's
    """Whether all tensor ranks hold the same bytes, of which one rank writes.

    So it is for latent attention and what derives from it; a state and a pool with heads are cut by rank.
    """
    return bool(storage_config.is_mla_model) and component != MAMBA and not hasattr(pool, "head_num")


class PageNames:
    """Turns SGLang's hashes into the keys of one pool's pages.

    Args:
        identity: of the pool.
        component: what the pool is called.
        form: how a page's bytes are ordered.
    """

    def __init__(self, identity: bytes, component: str, form: str) -> None:
        self._prefix = encode_parts("sglang page", NAMES_VERSION, identity, component, form)

    def key(self, page_hash: str) -> PageKey:
        """What the page with this hash of SGLang is called in the store."""
        return PageKey(blake3(self._prefix + encode_parts(page_hash)).digest())

    def keys(self, page_hashes: Iterable[str]) -> list[PageKey]:
        return [self.key(page_hash) for page_hash in page_hashes]
