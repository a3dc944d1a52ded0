"""The worker's part: copies between vLLM's blocks and the pool that the scheduler's process shares.

Loads and saves run on a thread each, one job after another. A save begins when the forward pass that computed its
blocks has ended; both ends stay as they are until the job was reported, since the scheduler holds slots and blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hicache.engines.vllm_geometry import Geometry
from hicache.engines.vllm_messages import CopyJob, CopyPart
from hicache.errors import ConfigError
from hicache.threads import DaemonExecutor
from hicache.tiers.shared import SharedRegion, map_region
from hicache.transfer.copy import PageCopier, check_pairs
from hicache.transfer.layout import WORD_BYTES, SlotView

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a job."""

    job: CopyJob
    is_load: bool
    is_done: bool
    num_bytes: int
    seconds: float


class BlockCopies:
    """Executes the scheduler's copy jobs.

    Args:
        geometry: what stands where in a page.
        rank: of this worker among the tensor-parallel ones.
        kv_caches: vLLM's tensors by layer; dimension 0 counts blocks, or equal parts of blocks.
        num_blocks: of vLLM's pool.

    Raises:
        ConfigError: a layer's block is not one run of bytes.

    *Thread*: vLLM's worker thread calls everything; nothing but ``close`` waits.
    """

    def __init__(
        self, geometry: Geometry, rank: int, kv_caches: Mapping[str, torch.Tensor], num_blocks: int
    ) -> None:
        self._geometry = geometry
        self._rank = rank
        self._blocks = {
            layer.layer: block_bytes(layer.layer, kv_caches[layer.layer], num_blocks, layer.num_bytes)
            for component in geometry.components
            for group in component.groups
            for layer in group.layers
        }
        self._device = next(iter(self._blocks.values())).device
        self._pool: dict[str, torch.Tensor] = {}
        self._copier = PageCopier()
        self._threads = {
            is_load: DaemonExecutor(1, name=f"hicache-{'load' if is_load else 'save'}")
            for is_load in (True, False)
        }
        self._lock = threading.Lock()
        self._ended: list[Ended] = []

    def attach(self, region: SharedRegion) -> None:
        """Map the pool. Raises ``TierUnavailableError`` when it cannot be reached."""
        if not self._pool:
            self._pool = map_region(region)
            if self._device.type == "cuda":
                _page_lock(self._pool)

    def submit(self, job: CopyJob, *, is_load: bool) -> None:
        """Begin a job after what vLLM has asked of the device so far."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            event.record(torch.cuda.current_stream(self._device))
        self._threads[is_load].submit(self._run, job, is_load, event)

    def take_ended(self) -> list[Ended]:
        """Jobs that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Wait for what runs, drop what waits. Idempotent."""
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        self._copier.close()

    def _run(self, job: CopyJob, is_load: bool, event: Any) -> None:
        began = time.perf_counter()
        num_bytes, is_done = 0, False
        try:
            if event is None:
                num_bytes = sum(self._copy(part, is_load=is_load) for part in job.parts)
            else:
                stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's own
                with torch.cuda.stream(stream):
                    stream.wait_event(event)
                    num_bytes = sum(self._copy(part, is_load=is_load) for part in job.parts)
            is_done = True
        except Exception:  # whatever it was, the engine must hear of it, and goes on
            logger.exception("a copy for request %s failed", job.request)
        with self._lock:
            self._ended.append(Ended(job, is_load, is_done, num_bytes, time.perf_counter() - began))

    def _copy(self, part: CopyPart, *, is_load: bool) -> int:
        """Copy one group's blocks, layer by layer; bytes moved."""
        component = self._geometry.components[part.component]
        begin = self._rank * component.rank_bytes
        begin += sum(group.num_bytes for group in component.groups[: part.group])
        pool = self._pool[component.name]
        num_bytes = 0
        for layer in component.groups[part.group].layers:
            blocks = _view(layer.layer, self._blocks[layer.layer])
            pages = _view(component.name, pool[:, begin : begin + layer.num_bytes])
            if is_load:
                ends = pages, part.slots, blocks, part.blocks
            else:
                ends = blocks, part.blocks, pages, part.slots
            check_pairs(*ends)
            self._copier.copy(*ends)
            begin += layer.num_bytes
            num_bytes += layer.num_bytes * len(part.slots)
        return num_bytes


def block_bytes(layer: str, cache: Any, num_blocks: int, num_bytes: int) -> torch.Tensor:
    """A layer's blocks as uint8 ``[num_blocks, num_bytes]``, a view on vLLM's memory.

    Raises:
        ConfigError: the bytes of a block do not lie together.
    """
    if not isinstance(cache, torch.Tensor) or cache.shape[0] % num_blocks:
        raise ConfigError([f"layer {layer}: its KV cache is no tensor of {num_blocks} blocks"])
    parts = cache.shape[0] // num_blocks
    item = cache.element_size()
    stride = cache.stride(0) * parts * item
    block = cache[:parts]
    spanned = sum((size - 1) * step for size, step in zip(block.shape, block.stride(), strict=True)) + 1
    if spanned * item != num_bytes or block.numel() * item != num_bytes:
        problem = f"layer {layer}: a block of {num_bytes} bytes is spread over {spanned * item}"
        raise ConfigError([f"{problem}; start vLLM with VLLM_KV_CACHE_LAYOUT=LBNHC"])
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    return flat.as_strided((num_blocks, num_bytes), (stride, 1), cache.storage_offset() * item)


def _view(where: str, rows: torch.Tensor) -> SlotView:
    """Rows of bytes as a copy sees them, in words where they allow it."""
    payload, slot_bytes = rows.unsqueeze(1), rows.shape[1]
    aligned = all(value % WORD_BYTES == 0 for value in (slot_bytes, rows.stride(0), rows.data_ptr()))
    return SlotView(where, payload.view(torch.int64) if aligned else payload, slot_bytes)


def _page_lock(pool: Mapping[str, torch.Tensor]) -> None:
    """Have the driver pin what is mapped, so that copies run at the bus's speed; without it they are slower."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own
    for name, rows in pool.items():
        status = int(runtime.cudaHostRegister(rows.data_ptr(), rows.nbytes, 0)) if rows.numel() else 0
        if status:
            logger.warning("%s: the shared pool cannot be page-locked (%d); copies are slower", name, status)
