"""What makes no sense is refused by the cache itself, in the same words on both cores, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hicache.cache import HiCache
from hicache.config import load_config
from hicache.errors import HiCacheError
from hicache.lease import Lease
from hicache.radix.core import core_kind
from hicache.types import Namespace, Tier

PROMPT = list(range(1, 17))
CONFIG = {
    "model": {
        "name": "tiny",
        "page_size": 4,
        "components": {
            "full": {"rule": "path", "bytes_per_token": 8},
            "mamba": {"rule": "checkpoint", "state_bytes": 48},
        },
    },
    "tiers": {
        "device": {"kind": "cpu", "capacity": "64KiB"},
        "host": {"pinned": False, "capacity": "64KiB"},
        "stores": [{"kind": "memory", "name": "ram", "capacity": "1MiB"}],
    },
    "policy": {"eviction": "session"},
}
Wrong = Any  # Any: what no type checker would let pass
Call = Callable[[HiCache, Lease, Wrong], object]
WRONG: dict[str, Wrong] = {
    "None": None,
    "text": "x",
    "a float": 1.5,
    "negative": -1,
    "True": True,
    "huge": 2**70,
    "bytes": b"x",
    "a list": [1],
    "a tuple": (1, 2),
    "a class": object,
    "a mapping": {"full": 1},
    "an array": np.array([1, 2]),
    "numpy's": np.int64(3),
    "an enum": Tier.HOST,
    "nan": float("nan"),
    "infinite": float("inf"),
}
CALLS: dict[str, tuple[Call, tuple[str, ...]]] = {  # and what is right after all
    "match namespace": (lambda cache, _, it: cache.match(PROMPT, namespace=it), ()),
    "match session": (lambda cache, _, it: cache.match(PROMPT, session=it), ("None", "text")),
    "match priority": (lambda cache, _, it: cache.match(PROMPT, priority=it), ("an enum",)),
    "keep for_s": (
        lambda cache, _, it: cache.keep(PROMPT, for_s=it),
        ("a float", "huge", "numpy's", "an enum"),
    ),
    "slots": (lambda _, lease, it: lease.slots(it), ()),
    "state": (lambda _, lease, it: lease.state(it), ()),
    "checkpoint mark": (lambda _, lease, it: lease.checkpoint(8, mark=it), ("True",)),
    "checkpoint length": (lambda _, lease, it: lease.checkpoint(it), ("True", "numpy's", "an enum")),
    "reserve": (lambda _, lease, it: lease.reserve(it), ("True", "numpy's", "an enum")),
    "sessions.close": (lambda cache, _, it: cache.sessions.close(it), ("text",)),
    "sessions.one_shot": (lambda cache, _, it: cache.sessions.one_shot(it), ("text",)),
    "sessions.reopen": (lambda cache, _, it: cache.sessions.reopen(it), ("text",)),
    "sessions.abandon_branch": (lambda cache, _, it: cache.sessions.abandon_branch(it), ("text",)),
    "sessions.expects_return": (lambda cache, _, it: cache.sessions.expects_return(it, 3.0), ("text",)),
    "clear everything": (lambda cache, _, it: cache.admin.clear(everything=it), ("True",)),
    "clear namespace": (lambda cache, _, it: cache.admin.clear(namespace=it), ()),
    "clear session": (lambda cache, _, it: cache.admin.clear(session=it), ()),
    "clear wait_s": (
        lambda cache, _, it: cache.admin.clear(namespace=Namespace(salt="none"), wait_s=it),
        ("None", "a float", "huge", "an enum"),
    ),
    "attach": (lambda cache, _, it: cache.admin.attach(it), ()),
    "detach": (lambda cache, _, it: cache.admin.detach(it), ()),
    "set_store_capacity": (lambda cache, _, it: cache.admin.set_store_capacity(it, "1MiB"), ()),
    "set_policy": (lambda cache, _, it: cache.admin.set_policy(it), ()),
}


@pytest.fixture(scope="module")
def caches() -> Iterator[tuple[HiCache, ...]]:
    if core_kind("auto", ())[0] != "rust":
        pytest.skip("the Rust core was not built")
    made = [
        HiCache(load_config(CONFIG, environ={}), core=kind, background=False) for kind in ("python", "rust")
    ]
    yield tuple(made)
    for cache in made:
        cache.close()


def said(cache: HiCache, call: Call, wrong: Wrong) -> tuple[str, str]:
    """The error of a call, and nothing in the cache that was not there before."""
    with cache.match(PROMPT, session="a") as lease:
        lease.load()
        lease.reserve(16)
        before = cache.usage()
        try:
            call(cache, lease, wrong)
        except (ValueError, HiCacheError) as error:
            assert cache.usage() == before
            assert cache.audit() == []
            return type(error).__name__, str(error)
    raise AssertionError(f"{wrong!r} was not refused")


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        pytest.param(call, wrong, id=f"{name}: {what}")
        for name, (call, right) in CALLS.items()
        for what, wrong in WRONG.items()
        if what not in right
    ],
)
def test_both_cores_refuse_it_alike(caches: tuple[HiCache, ...], call: Call, wrong: Wrong) -> None:
    python, rust = (said(cache, call, wrong) for cache in caches)
    assert python == rust
    assert len(python[1]) > 20, python
