"""How much of a tensor is in memory, as the system says."""

from __future__ import annotations

import ctypes
import mmap
import os

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
