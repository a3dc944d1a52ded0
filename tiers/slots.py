"""What the device pool and the host pool have in common: slots of bytes, one tensor a component."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.closing import Closing
from hicache.errors import ConfigError, ProtocolError
from hicache.types import ComponentSpec

Payload = NDArray[np.uint8] | torch.Tensor
"""uint8 [num_slots, slot_bytes]."""
Slots = Sequence[int] | NDArray[np.integer]

_MEMORY_INFO = Path("/proc/meminfo")
_MEMORY_GROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 62


class PoolMemoryError(ConfigError):
    """A pool of ``required_bytes`` does not fit the ``available_bytes`` of ``device``."""

    def __init__(self, *, required_bytes: int, available_bytes: int, device: str) -> None:
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes
        problem = (
            f"a pool of {required_bytes:,} bytes does not fit {device}: {available_bytes:,} bytes are "
            "available; lower the tier's capacity"
        )
        super().__init__([problem])


class SlotPool(Closing):
    """Fixed slots of payload, one tensor of bytes a component.

    Whatever the tensor's layout, ``read`` and ``write`` speak in *page order*: a slot's bytes layer
    after layer, which is also the order of a page in a store.

    Args:
        specs: the components, names unique.
        page_size: tokens a page.
        slots: slots for each component, by name; 0 for a component that is not kept in this tier.
        device: where the tensors live, as torch names it.

    Raises:
        ConfigError: the names do not agree, or a slot does not divide into its layers.
        PoolMemoryError: the pool does not fit memory; nothing was touched.

    *Thread*: calls on different slots may run at the same time; the pool takes no lock.
    """

    slot_dim: int
    """Which dimension of a tensor counts slots."""

    def __init__(
        self,
        specs: Sequence[ComponentSpec],
        page_size: int,
        slots: Mapping[str, int],
        *,
        device: str = "cpu",
    ) -> None:
        _check_sizes(specs, page_size, slots)
        self._slot_bytes = {spec.name: spec.slot_bytes(page_size) for spec in specs}
        self._num_slots = {spec.name: slots[spec.name] for spec in specs}
        required_bytes = self._required_bytes()
        available_bytes = available_memory(device)
        if required_bytes > available_bytes:
            raise PoolMemoryError(
                required_bytes=required_bytes, available_bytes=available_bytes, device=device
            )
        shapes = {
            spec.name: self._shape(
                spec.num_layers, slots[spec.name], self._slot_bytes[spec.name] // spec.num_layers
            )
            for spec in specs
        }
        self._device = device
        self._tensors = self._make_tensors(shapes)
        self._is_open = True

    def _required_bytes(self) -> int:
        """Memory that the slots may come to take."""
        return sum(self._slot_bytes[name] * count for name, count in self._num_slots.items())

    def _make_tensors(self, shapes: Mapping[str, tuple[int, int, int]]) -> dict[str, torch.Tensor]:
        """Zeroed uint8 tensors of these shapes; ``SharedPool`` has them in one mapping."""
        return {name: self._zeros(shape) for name, shape in shapes.items()}

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """One component's memory, uint8."""
        if self._device == "cpu":
            return torch.from_numpy(np.zeros(shape, dtype=np.uint8))  # untouched until first used
        return torch.zeros(shape, dtype=torch.uint8, device=self._device)

    @abstractmethod
    def _shape(self, num_layers: int, num_slots: int, layer_bytes: int) -> tuple[int, int, int]:
        """The layout of one component's tensor; ``slot_dim`` is where ``num_slots`` stands in it."""

    # ---- what there is ---------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The components, in the order of the specs."""
        return tuple(self._slot_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; 0 once closed."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def num_slots(self, name: str) -> int:
        """Slots of one component."""
        return self._num_slots[name]

    def slot_bytes(self, name: str) -> int:
        """Bytes of one slot of a component."""
        return self._slot_bytes[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of a component; uint8, in the pool's layout. It may be written to."""
        if not self._is_open:
            raise ProtocolError("the pool is closed")
        return self._tensors[name]

    # ---- bytes in and out ------------------------------------------------------------------------------------

    def write(self, name: str, slot: int, payload: bytes | bytearray | memoryview) -> None:
        """Fill one slot from bytes in page order. Raises ``ValueError`` on a wrong slot or length."""
        row = np.frombuffer(payload, dtype=np.uint8)
        self.write_many(name, (slot,), row.reshape(1, -1))

    def read(self, name: str, slot: int) -> bytes:
        """The bytes of one slot in page order. Raises ``ValueError`` on a wrong slot."""
        return self.read_many(name, (slot,)).tobytes()

    def write_many(self, name: str, slots: Slots, payload: Payload) -> None:
        """Fill slots from rows in page order.

        Args:
            slots: integer [n], each one once.
            payload: uint8 [n, slot_bytes]; an array or a tensor, on any device.

        Raises:
            ValueError: a slot is out of range or named twice, or the payload has another shape.
        """
        tensor = self[name]
        index = self._slot_index(name, slots)
        if len(np.unique(index)) != len(index):
            raise ValueError(f"slots of {name!r} are named twice: {np.sort(index).tolist()}")
        expected = (len(index), self._slot_bytes[name])
        if tuple(payload.shape) != expected or payload.dtype not in (np.uint8, torch.uint8):
            raise ValueError(
                f"payload for {name!r} is {payload.dtype} {tuple(payload.shape)}, uint8 {expected} expected"
            )
        view = self._by_slot(tensor)
        if view.device.type == "cpu":
            rows = payload.cpu().numpy() if isinstance(payload, torch.Tensor) else payload
            view.numpy()[index] = rows.reshape(len(index), *view.shape[1:])
        else:
            source = payload if isinstance(payload, torch.Tensor) else torch.tensor(payload)
            source = source.to(view.device).reshape(len(index), *view.shape[1:])
            view.index_copy_(0, torch.from_numpy(index).to(view.device), source)

    def read_many(self, name: str, slots: Slots) -> NDArray[np.uint8]:
        """Rows of slots in page order; uint8 [n, slot_bytes], a copy on the CPU.

        Args:
            slots: integer [n].

        Raises:
            ValueError: a slot is out of range.
        """
        view = self._by_slot(self[name])
        index = self._slot_index(name, slots)
        pages: NDArray[np.uint8]
        if view.device.type == "cpu":
            pages = view.numpy()[index]
        else:
            pages = view.index_select(0, torch.from_numpy(index).to(view.device)).cpu().numpy()
        return pages.reshape(len(index), self._slot_bytes[name])

    # ---- life ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the tensors; views that were handed out keep theirs alive. Idempotent."""
        self._tensors.clear()
        self._is_open = False

    def _by_slot(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes as ``[num_slots, num_layers, layer_bytes]``."""
        return tensor if self.slot_dim == 0 else tensor.transpose(0, 1)

    def _slot_index(self, name: str, slots: Slots) -> NDArray[np.int64]:
        array = np.asarray(slots)
        if array.shape == (0,):
            return np.empty(0, dtype=np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"slots are {array.dtype} {array.shape}, integers of one dimension expected")
        num_slots = self._num_slots[name]
        wrong = (array < 0) | (array >= num_slots)
        if wrong.any():
            position = int(np.argmax(wrong))
            raise ValueError(
                f"slot {int(array[position])} at position {position} is out of range: "
                f"{name!r} has {num_slots} slots"
            )
        return np.ascontiguousarray(array, dtype=np.int64)


def available_memory(device: str) -> int:
    """Bytes that can still be allocated on ``device`` without swapping or being killed.

    Raises:
        ConfigError: ``device`` is not on this machine.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError([f"device: {device} was asked for, this machine has no CUDA; use cpu"])
        index, count = torch.device(device).index or 0, torch.cuda.device_count()
        if index >= count:
            raise ConfigError(
                [f"tiers.device.index: {index} is not there; this machine has {count} devices, from 0"]
            )
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes)
    return min(_system_memory(), _group_memory()) if kind == "cpu" else _NO_LIMIT


def _system_memory() -> int:
    """Free memory of the machine, with what the kernel gives back on demand where it says so."""
    if _MEMORY_INFO.exists():
        for line in _MEMORY_INFO.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _group_memory() -> int:
    """What a container's limit still allows; caches that the kernel gives back do not count."""
    limit = _MEMORY_GROUP / "memory.max"
    if not limit.exists() or (limit_text := limit.read_text(encoding="ascii").strip()) == "max":
        return _NO_LIMIT
    used_bytes = int((_MEMORY_GROUP / "memory.current").read_text(encoding="ascii"))
    fields = (_MEMORY_GROUP / "memory.stat").read_text(encoding="ascii").split()
    statistics = dict(zip(fields[::2], fields[1::2], strict=True))
    return max(0, int(limit_text) - used_bytes + int(statistics.get("inactive_file", "0")))


def _check_sizes(specs: Sequence[ComponentSpec], page_size: int, slots: Mapping[str, int]) -> None:
    problems = []
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        problems.append(f"components: names are not unique: {names}")
    if page_size < 1:
        problems.append(f"page_size: {page_size}, 1 or more expected")
    problems.extend(f"slots.{name}: no such component" for name in slots if name not in names)
    for spec in specs:
        count = slots.get(spec.name)
        if count is None:
            problems.append(f"slots.{spec.name}: missing")
        elif count < 0:
            problems.append(f"slots.{spec.name}: {count}, 0 or more expected")
        slot_bytes = spec.slot_bytes(page_size)
        if spec.num_layers < 1 or slot_bytes < 1 or slot_bytes % spec.num_layers:
            problems.append(
                f"components.{spec.name}: {slot_bytes} bytes a slot do not divide into {spec.num_layers} layers"
            )
    if problems:
        raise ConfigError(problems)
