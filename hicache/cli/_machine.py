"""What ``hicache doctor`` finds out about the machine's device and memory, each with the remedy."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hicache.config import HiCacheConfig
from hicache.config.units import format_bytes

Finding = tuple[str, str]

OLDEST_CAPABILITY = (8, 0)
"""What the kernels are compiled for at least (``sm_80``)."""
_DRIVER = Path("/proc/driver/nvidia/version")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def machine_findings(
    torch: Any,  # the module, or a stand-in
    *,
    driver: Path = _DRIVER,
    huge_pages: Path = _HUGE_PAGES,
    packages: list[str] | None = None,
    lockable: int | None = None,
) -> Iterator[Finding]:
    """Driver, devices, CuPy, lockable memory, huge pages.

    Args:
        packages: names of installed distributions; default: those that are.
        lockable: ``RLIMIT_MEMLOCK``; default: this process's.
    """
    has_cuda, complaint = _has_cuda(torch)
    yield "cuda", _cuda(torch, has_cuda=has_cuda, complaint=complaint)
    yield "driver", _driver(driver)
    if has_cuda:
        yield from _devices(torch)
    yield "cupy", _cupy(torch, _cupy_packages() if packages is None else packages)
    yield (
        "lockable",
        _lockable(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if lockable is None else lockable),
    )
    yield "huge pages", _huge_pages(huge_pages)


def device_failures(torch: Any, config: HiCacheConfig) -> Iterator[str]:
    """What of L1 this machine does not have, key first, each with the remedy."""
    device = config.tiers.device
    has_cuda, _ = _has_cuda(torch)
    if device.kind == "cuda" and not has_cuda:
        yield "tiers.device.kind: is cuda, but no CUDA device can be used here; set it to cpu"
    elif device.kind == "cuda" and device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        yield f"tiers.device.index: {device.index} is not there; this machine has {count} devices, from 0"
    elif device.kind == "cuda":
        free, total = torch.cuda.mem_get_info(device.index)
        wanted = device.rank_bytes(config.ranks.count)
        if wanted > free:
            where = f"{format_bytes(free)} of {format_bytes(total)} are free on device {device.index}"
            yield f"tiers.device.capacity: {format_bytes(wanted)} a rank, but {where}; lower it"


def lock_warnings(torch: Any, config: HiCacheConfig, *, lockable: int | None = None) -> Iterator[str]:
    """A host pool that may not be pinned: it serves, but its copies are slower."""
    host = config.tiers.host
    has_cuda, _ = _has_cuda(torch)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if lockable is None else lockable
    if host is not None and host.pinned and has_cuda and limit != resource.RLIM_INFINITY:
        wanted = host.rank_bytes(config.ranks.count)
        if wanted > limit:
            sizes = f"{format_bytes(wanted)} are to be pinned, {format_bytes(limit)} may be locked"
            yield f"tiers.host: {sizes}; raise the limit (ulimit -l), or set tiers.host.pinned: false"


def _has_cuda(torch: Any) -> tuple[bool, str]:
    """And what torch complains of: a driver that is too old is a warning of its."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_cuda = bool(torch.cuda.is_available())
    return has_cuda, "; ".join(str(warning.message).splitlines()[0] for warning in caught)


def _cuda(torch: Any, *, has_cuda: bool, complaint: str) -> str:
    built_for = torch.version.cuda
    if has_cuda:
        return f"{built_for}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if built_for is None:
        return "not available (torch was built for the CPU); for a GPU install a torch built for CUDA"
    why = f": {complaint}" if complaint else ""
    return (
        f"not available (torch was built for {built_for}){why}; tiers.device.kind: cpu works, a GPU needs a driver "
        f"for CUDA {built_for} or newer"
    )


def _driver(path: Path) -> str:
    try:
        line = path.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "none; with a GPU here install NVIDIA's, in a container start it with --gpus all"
    return line.partition(":")[2].strip() or line


def _devices(torch: Any) -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{index}: {torch.cuda.get_device_name(index)}, {format_bytes(free)} of {format_bytes(total)} free"
        if capability < OLDEST_CAPABILITY:
            text += (
                f"; compute capability {capability[0]}.{capability[1]} is older than 8.0: copies go by torch"
            )
        yield "device", text


def _cupy_packages() -> list[str]:
    found = (distribution.metadata["Name"] for distribution in distributions())
    return sorted({name.lower() for name in found if name and name.lower().startswith("cupy")})


def _cupy(torch: Any, packages: list[str]) -> str:
    names = [name for name in packages if name.startswith("cupy")]
    remedy = "pip install 'hicache[cuda]'"
    if not names:
        return f"not installed; copies go by torch alone. For one launch a batch: {remedy}"
    if len(names) > 1:
        return f"{', '.join(names)}: only one may be installed; pip uninstall all of them, then {remedy}"
    built_for = torch.version.cuda
    wanted = f"cupy-cuda{str(built_for).split('.', maxsplit=1)[0]}x"
    if built_for is not None and names[0].startswith("cupy-cuda") and names[0] != wanted:
        return (
            f"{names[0]}, but torch is for CUDA {built_for}; pip uninstall {names[0]}, pip install {wanted}"
        )
    return names[0]


def _lockable(limit: int) -> str:
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return (
        f"{format_bytes(limit)} (ulimit -l); a pinned host pool that is larger may be refused: ulimit -l unlimited, "
        "LimitMEMLOCK=infinity in a systemd unit, docker run --ulimit memlock=-1"
    )


def _huge_pages(path: Path) -> str:
    try:
        text = path.read_text(encoding="ascii")
    except OSError:
        return "unknown: this kernel does not say"
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return f"never; pinning takes longer: echo madvise > {path}"
    return chosen or text.strip()
