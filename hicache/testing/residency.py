"""How a tensor lies in memory, as the system says."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a CPU tensor whose pages are in memory.

    *Caller guarantees*: it begins with a page of the system. *Raises*: ``OSError`` where that is not so.
    """
    num_pages = -(-tensor.nbytes // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num_pages)()
    if _LIBC.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), pages):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def vm_flags(tensor: torch.Tensor) -> set[str]:
    """The system's flags of the mapping that holds a CPU tensor's first byte (``VmFlags`` of ``/proc/self/smaps``).

    *Raises*: ``LookupError`` where no mapping does.
    """
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(edge, 16) for edge in name.split("-"))
            is_inside = begin <= tensor.data_ptr() < end
        elif is_inside and name == "VmFlags:":
            return set(rest)
    raise LookupError("no mapping holds the tensor")
