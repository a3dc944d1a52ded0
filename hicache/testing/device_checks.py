"""Whether copies between a device and the host are right, on whatever device: each check returns what it found wrong.

On the CPU the same checks run on CPU tensors and CPU streams, so that what they do is itself tested without a GPU.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hicache.cache import HiCache
from hicache.clock import MonotonicClock
from hicache.closing import Closing
from hicache.config import load_config
from hicache.radix.actions import Copy
from hicache.replay.simulated import SimulatedEngine
from hicache.tiers.device import DevicePool
from hicache.tiers.host import HostPool
from hicache.transfer.copy_paths import Batch, CopyPath, StagedPath, choice_for, torch_move
from hicache.transfer.engine import TransferEngine
from hicache.types import ComponentSpec, TicketId, Tier

POISON = 0xEE
PATIENCE_S = 60.0
SHAPES = ((1, 1), (3, 7), (2, 16), (4, 24), (5, 100), (8, 512), (3, 528), (12, 8192), (2, 65536), (36, 1000))
"""Layers, bytes of a layer: pages and states, aligned and not."""


IsOver = Callable[[], bool]
"""Whether the time for checks is over."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Checked:
    """One check's outcome.

    Args:
        name: what was checked.
        num_cases: how many times.
        wrong: one sentence for each fault, the first few.
    """

    name: str
    num_cases: int
    wrong: tuple[str, ...]


def all_checks(
    device: torch.device, *, num_rounds: int, is_over: IsOver = _never
) -> Iterator[Callable[[], Checked]]:
    """Every check, one after the other; a fault in one is no reason to leave out the next.

    Args:
        is_over: once it says so, each check that is left makes one round only.
    """
    for path in paths_of(device):
        yield partial(check_path, path, device, seed=1)
    yield partial(check_streams, device, num_rounds=num_rounds, seed=2, is_over=is_over)
    for model in ("full", "full+swa", "full+swa+mamba"):
        yield partial(check_cache, device, model, num_requests=4 * num_rounds, seed=3, is_over=is_over)


def paths_of(device: torch.device) -> Sequence[CopyPath]:
    """The ways that this machine offers; on the CPU the one that needs nothing."""
    if device.type == "cuda":
        return choice_for(device).paths
    return (StagedPath("torch", torch_move, needs_pinned=False),)


# ---- one way ---------------------------------------------------------------------------------------------------------
def check_path(path: CopyPath, device: torch.device, *, seed: int) -> Checked:
    """Random tables in both directions, whole slots and single layers, over poisoned targets."""
    shuffle = np.random.default_rng(seed)
    wrong: list[str] = []
    num_cases = 0
    for num_layers, layer_bytes in SHAPES:
        spec = ComponentSpec("c", num_layers=num_layers, bytes_per_token=num_layers * layer_bytes)
        with Pools((spec,), {"c": 48}, device) as pools:
            for to_host in (True, False):
                for layers in (slice(None), slice(num_layers - 1, num_layers)):
                    num_cases += 1
                    case = (
                        f"{path.name}: {num_layers} x {layer_bytes} bytes, to_host={to_host}, layers {layers}"
                    )
                    wrong += _copies_right(path, pools, shuffle, case, layers=layers, to_host=to_host)
    return Checked(f"path {path.name}", num_cases, tuple(wrong[:10]))


def _copies_right(
    path: CopyPath, pools: Pools, shuffle: np.random.Generator, case: str, *, layers: slice, to_host: bool
) -> list[str]:
    ends = pools.slot_first("c")
    source, target = ends if to_host else ends[::-1]
    source.copy_(torch.from_numpy(shuffle.integers(0, 256, tuple(source.shape), dtype=np.uint8)))
    target.fill_(POISON)
    tables = [shuffle.permutation(48)[:37].astype(np.int64) for _ in range(2)]
    expected = target.cpu().clone()
    expected[tables[1], layers] = source.cpu()[tables[0], layers]
    batch = Batch(source[:, layers], tables[0], target[:, layers], tables[1], to_host)
    if not path.can_copy(batch):
        return [f"{case}: this way cannot take it"]
    path.copy(batch)
    wait_for_stream(pools.device)
    return [] if torch.equal(target.cpu(), expected) else [f"{case}: wrong bytes"]


def wait_for_stream(device: torch.device) -> None:
    """Until what the current stream was given is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Pools(Closing):
    """A device pool and a pinned host pool."""

    def __init__(self, specs: Sequence[ComponentSpec], slots: dict[str, int], device: torch.device) -> None:
        self.device = device
        self.on_device = DevicePool(specs, 1, slots, device=str(device))
        self.on_host = HostPool(specs, 1, slots, pinned=device.type == "cuda", near=device)
        if device.type == "cuda" and not self.on_host.wait_pinned(PATIENCE_S):
            raise RuntimeError(f"the host pool could not be pinned: {self.on_host.pin_progress}")

    def slot_first(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Device and host, both as ``[slot, layer, byte]``."""
        return self.on_device[name].transpose(0, 1), self.on_host[name]

    def close(self) -> None:
        self.on_device.close()
        self.on_host.close()


# ---- loads, copies down and compute at once --------------------------------------------------------------------------
def check_streams(device: torch.device, *, num_rounds: int, seed: int, is_over: IsOver = _never) -> Checked:
    """Loads by layer, copies down and matrix products at once: each layer as it is waited for, each page that went down.

    Compute writes the pages that go down right before they are submitted, and reads a layer of the load right after
    waiting for it: were an order of streams missing, bytes would be old.
    """
    shuffle = np.random.default_rng(seed)
    spec = ComponentSpec("c", num_layers=8, bytes_per_token=8 * 4096)
    wrong: list[str] = []
    num_done = 0
    with (
        Pools((spec,), {"c": 256}, device) as pools,
        TransferEngine(
            specs=(spec,), page_size=1, device=pools.on_device, host=pools.on_host, store=None,
            clock=MonotonicClock(), store_queue_bytes=0, prefetch_queue_bytes=0, store_timeout_s=1.0,
        ) as engine,
    ):  # fmt: skip
        on_device, on_host = pools.slot_first("c")
        square = torch.ones((512, 512), device=device)
        for number in range(num_rounds):
            pages, places = (shuffle.permutation(256).astype(np.int64) for _ in range(2))
            up, down = pages[:100], pages[100:200]
            to, back = places[:100], places[100:200]
            content = torch.from_numpy(shuffle.integers(0, 256, (100, 8, 4096), dtype=np.uint8))
            on_host[torch.from_numpy(up)] = content
            written = torch.from_numpy(shuffle.integers(0, 256, (100, 8, 4096), dtype=np.uint8)).to(device)
            for _ in range(4):  # the write comes late on the compute stream
                square = square @ square / 512
            on_device.index_copy_(0, torch.from_numpy(back).to(device), written)
            engine.compute.wrote()
            down_ticket, up_ticket = TicketId(2 * number), TicketId(2 * number + 1)
            engine.submit(Copy(down_ticket, "c", Tier.DEVICE, back, Tier.HOST, down))
            engine.submit_by_layer([Copy(up_ticket, "c", Tier.HOST, up, Tier.DEVICE, to)])
            read = []
            for layer in range(8):
                if not engine.wait_layer([up_ticket], layer, PATIENCE_S):
                    wrong.append(f"round {number}: layer {layer} did not come")
                read.append(on_device[torch.from_numpy(to).to(device), layer])
                square = square @ square / 512
            if not torch.equal(torch.stack(read, dim=1).cpu(), content):
                wrong.append(f"round {number}: a layer was read before it was there")
            if not engine.wait([down_ticket, up_ticket], PATIENCE_S):
                wrong.append(f"round {number}: the copies did not end")
            if not torch.equal(on_host[torch.from_numpy(down)], written.cpu()):
                wrong.append(f"round {number}: a page went down before it was written")
            engine.compute.ended()
            wrong += [f"round {number}: {done}" for done in engine.completions() if not done.is_complete]
            num_done = number + 1
            if is_over():
                break
    return Checked("streams", num_done, tuple(wrong[:10]))


# ---- the whole cache -------------------------------------------------------------------------------------------------
_COMPONENTS: dict[str, dict[str, Any]] = {
    "full": {"rule": "path", "layers": 4, "bytes_per_token": "4KiB"},
    "swa": {"rule": "window", "window": 64, "layers": 2, "bytes_per_token": "2KiB"},
    "mamba": {"rule": "checkpoint", "layers": 3, "state_bytes": "96KiB"},
}


def check_cache(
    device: torch.device, model: str, *, num_requests: int, seed: int, is_over: IsOver = _never
) -> Checked:
    """Requests of branching chats through pools that are too small: evictions while copies run, every byte compared."""
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            {
                "model": {
                    "name": "check",
                    "page_size": 16,
                    "components": {name: _COMPONENTS[name] for name in model.split("+")},
                },
                "tiers": {
                    "device": {"kind": device.type, "capacity": "4MiB"}
                    | ({"index": device.index or 0} if device.type == "cuda" else {}),
                    "host": {"capacity": "8MiB"},
                    "stores": [{"kind": "disk", "path": folder, "capacity": "64MiB"}],
                },
                "policy": {"write": "write_through", "prefetch": {"min_tokens": 0}},
            },
            environ={},
        )
        wrong: list[str] = []
        num_done = 0
        with HiCache(config) as cache:
            engine = SimulatedEngine(cache, chunk_tokens=64, by_layer=True)
            chats: list[list[int]] = [[]]
            for number in range(num_requests):
                chat = choose.choice(chats)[: choose.randrange(0, 400)]
                prompt = [*chat, *(choose.randrange(1000) for _ in range(choose.randrange(1, 120)))]
                answer = [choose.randrange(1000) for _ in range(20)]
                served = engine.serve(np.array(prompt, np.int32), np.array(answer, np.int32), session="chat")
                if served.mismatches:
                    wrong.append(
                        f"request {number}: {served.mismatches} of {served.pages_checked} pages are wrong"
                    )
                chats = [*chats[-7:], [*prompt, *answer]]
                num_done = number + 1
                if is_over():
                    break
            cache.drain()
            wrong += cache.audit()
            moved = {row.direction for row in cache.stats().transfers.moved if row.slots}
            if not is_over():  # else it may have been too few
                wrong += [f"nothing moved {way}" for way in ("to_host", "to_device") if way not in moved]
    return Checked(f"cache {model}", num_done, tuple(wrong[:10]))
