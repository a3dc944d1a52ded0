"""The released classes of SGLang on a machine without a GPU.

SGLang's wheel is there without most of what it requires: its kernels and models need a GPU, and its memory pools import
them on the way. What is missing is replaced by inert modules while ``import_sglang`` runs, here and nowhere else; no
code path that the tests drive enters one.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

INERT = frozenset(
    [
        "IPython",
        "PIL",
        "aiohttp",
        "compressed_tensors",
        "gguf",
        "orjson",
        "pybase64",
        "pynvml",
        "requests",
        "sentencepiece",
        "starlette",
        "torch_memory_saver",
        "torchcodec",
        "torchvision",
        "tvm_ffi",
    ]
)
"""Top-level packages that the memory pools import, directly or not, and never use on the way we go."""


class _InertType(type):
    """A class whose attributes, calls and items are again inert."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _InertType(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        is_decorated = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if is_decorated else cls

    def __getitem__(cls, _: object) -> Any:
        return cls

    def __bool__(cls) -> bool:
        return False


class _InertModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _InertType(name, (), {})


class _InertFinder(MetaPathFinder, Loader):
    """Finds what nobody else found."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in INERT else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _InertModule(spec.name)
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]  # some look at it
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def _inert_where_missing() -> Iterator[None]:
    finder = _InertFinder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@dataclass(frozen=True, slots=True)
class Released:
    """Modules of the wheel, and its factory of backends."""

    storage: Any
    factory: Any
    infos: Any
    mha: Any
    mla: Any
    mamba: Any
    dsa: Any
    side: Any
    controller: Any


@functools.cache
def import_sglang() -> Released:
    """Import what the tests drive; takes some ten seconds, once a process."""
    with _inert_where_missing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, and those of what it imports
        cache = "sglang.srt.mem_cache"
        # It leaves 10 GiB of the machine free. The pools of a test are kilobytes, and a small machine may run it.
        pools: Any = import_module(f"{cache}.pool_host.base")
        pools.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
        return Released(
            storage=import_module(f"{cache}.hicache_storage"),
            factory=import_module(f"{cache}.storage.backend_factory").StorageBackendFactory,
            infos=import_module(f"{cache}.device_pool_info"),
            mha=import_module(f"{cache}.pool_host.mha"),
            mla=import_module(f"{cache}.pool_host.mla"),
            mamba=import_module(f"{cache}.pool_host.mamba"),
            dsa=import_module(f"{cache}.pool_host.dsa"),
            side=import_module(f"{cache}.memory_pool_host"),
            controller=import_module(f"{cache}.hybrid_cache.hybrid_cache_controller"),
        )


@functools.cache
def import_server_arguments() -> Any:
    """SGLang's ``ServerArgs``, whose ``add_cli_args`` makes the parser of its server's flags."""
    with _inert_where_missing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, and those of what it imports
        return import_module("sglang.srt.server_args").ServerArgs
