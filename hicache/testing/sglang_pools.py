"""Small host pools of SGLang's released classes, filled with random bytes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from hicache.testing.sglang_released import import_sglang

NUM_LAYERS = 3
HEADS = 2
HEAD_SIZE = 8
LATENT = 24
ROPE = 8
INDEX_PAGE_BYTES = 40
CPU = torch.device("cpu")
DEVICE_TOKENS = 8
"""The device pools behind them are as small as can be: only their shapes count."""

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
STATE_LAYOUTS = ("page_first", "page_first_direct")


def mha_pool(
    layout: str = "page_first",
    *,
    page_size: int = 4,
    num_pages: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    num_layers: int = NUM_LAYERS,
    head_size: int = HEAD_SIZE,
) -> Any:
    """``MHATokenToKVPoolHost``; a sliding-window pool is one, too."""
    released = import_sglang()
    shape = (DEVICE_TOKENS, HEADS, head_size)
    keys, values = ([torch.zeros(shape, dtype=dtype) for _ in range(num_layers)] for _ in range(2))
    info = released.infos.MHABufferInfo(
        buffers=released.infos.KVBuffers(
            k=tuple(keys),
            v=tuple(values),
            k_data_ptrs=_pointers(keys),
            v_data_ptrs=_pointers(values),
            layout=released.infos.KVBufferLayout.NHD,
        ),
        page_size=page_size,
        head_num=HEADS,
        head_dim=head_size,
        v_head_dim=head_size,
        dtype=dtype,
        device=CPU,
    )
    return released.mha.MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        page_size,
        layout,
        pin_memory=False,
        device_capacity_tokens=DEVICE_TOKENS,
        start_layer=0,
        end_layer=num_layers,
        host_token_capacity=num_pages * page_size,
    )


def mla_pool(
    layout: str = "page_first",
    *,
    page_size: int = 4,
    num_pages: int = 8,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """``MLATokenToKVPoolHost``."""
    released = import_sglang()
    width = LATENT + ROPE
    rows = [torch.zeros((DEVICE_TOKENS, 1, width), dtype=dtype) for _ in range(NUM_LAYERS)]
    info = released.infos.MLABufferInfo(
        buffers=tuple(rows),
        data_ptrs=_pointers(rows),
        layer_indices=tuple(range(NUM_LAYERS)),
        device_layer_num=NUM_LAYERS,
        page_size=page_size,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        kv_cache_dim=width,
        dtype=dtype,
        device=CPU,
    )
    return released.mla.MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        page_size,
        layout,
        pin_memory=False,
        device_capacity_tokens=DEVICE_TOKENS,
        start_layer=0,
        end_layer=NUM_LAYERS,
        target_layer_num=NUM_LAYERS,
        host_token_capacity=num_pages * page_size,
    )


def state_pool(
    layout: str = "page_first",
    *,
    num_states: int = 8,
    dtype: torch.dtype = torch.float32,
    has_side_state: bool = False,
) -> Any:
    """``MambaPoolHost``: one recurrent state, two convolutions of other sizes, maybe a side state."""
    released = import_sglang()
    side = (torch.zeros((DEVICE_TOKENS, 5), dtype=torch.bfloat16),) if has_side_state else ()
    info = released.infos.MambaStateBufferInfo(
        temporal=torch.zeros((NUM_LAYERS, DEVICE_TOKENS, 2, 4, 6), dtype=dtype),
        conv=tuple(
            torch.zeros((NUM_LAYERS, DEVICE_TOKENS, *shape), dtype=torch.bfloat16)
            for shape in ((10, 3), (7, 3))
        ),
        extra_checkpoint_buffers=side,
    )
    return released.mamba.MambaPoolHost(
        info,
        (num_states - 1) / DEVICE_TOKENS,
        0,
        device_capacity=DEVICE_TOKENS,
        pin_memory=False,
        layout=layout,
    )


def indexer_pool(anchor: Any) -> Any:
    """``DSAIndexerPoolHost`` beside a latent pool."""
    released = import_sglang()
    device_pool = SimpleNamespace(
        store_dtype=torch.uint8,
        start_layer=0,
        end_layer=NUM_LAYERS,
        layer_num=NUM_LAYERS,
        layer_shard_enabled=False,
        device="cpu",
        index_k_with_scale_buffer=[
            torch.zeros((2, INDEX_PAGE_BYTES), dtype=torch.uint8) for _ in range(NUM_LAYERS)
        ],
    )
    storage_info = SimpleNamespace(
        dtype=torch.uint8,
        page_bytes=lambda *_: INDEX_PAGE_BYTES,
        bytes_per_token_per_layer=INDEX_PAGE_BYTES // anchor.page_size,
        host_bytes=lambda page_num, layer_num, **_: page_num * layer_num * INDEX_PAGE_BYTES,
    )
    decl = SimpleNamespace(storage_info=storage_info, device_pool=device_pool, owned_device_layers=None)
    return released.dsa.DSAIndexerPoolHost(decl, anchor, pin_memory=False)


def logical_pool(*, page_size: int = 4, num_pages: int = 8) -> Any:
    """``LogicalHostPool``: the anchor of DeepSeek-V4, without a buffer."""
    return import_sglang().side.LogicalHostPool(num_pages * page_size, page_size)


def paged_pool(layout: str = "page_first", *, page_size: int = 4, num_pages: int = 8) -> Any:
    """``DeepSeekV4PagedHostPool``: a side pool of whole page rows."""
    rows = [torch.zeros((2, 48), dtype=torch.uint8) for _ in range(NUM_LAYERS)]
    return import_sglang().side.DeepSeekV4PagedHostPool(
        "c4", rows, 48, num_pages, page_size, layout, pin_memory=False, page_aligned_only=True
    )


def buffers_of(pool: Any) -> list[torch.Tensor]:
    """All tensors of a pool's payload."""
    held = getattr(pool, "kv_buffer", None)
    if held is None:
        held = pool.index_k_with_scale_buffer
    return list(held) if isinstance(held, list | tuple) else [held]


def fill(pool: Any, seed: int) -> None:
    """Random bytes everywhere."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(pool):
        raw = buffer.view(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))


def filled(
    seed: int, make: Callable[..., Any] = mha_pool, **changes: Any
) -> Any:  # Any: as the pool's function
    """A pool that ``make`` makes, with random bytes."""
    pool = make(**changes)
    fill(pool, seed)
    return pool


def page_of(pool: Any, number: int) -> bytes:
    """All bytes of one page, as the pool itself packs it."""
    page = pool.get_data_page(number * pool.page_size)
    return bytes(page.contiguous().view(-1).view(torch.uint8).numpy())


def slots_of(pool: Any, numbers: list[int]) -> torch.Tensor:
    """Host indices of whole pages: int64 ``[len(numbers) * page_size]``."""
    steps = torch.arange(pool.page_size)
    starts = torch.tensor(numbers, dtype=torch.int64) * int(pool.page_size)
    return (starts[:, None] + steps).reshape(-1)


def _pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)
