"""A cache of tiny pools for tests: real bytes, a simulated engine on top, and everything checked.

Test modules name the types here under ``TYPE_CHECKING`` only: ``tests/`` is not importable at run time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hicache.cache import HiCache
from hicache.clock import ManualClock
from hicache.closing import Closing
from hicache.config import HiCacheConfig, load_config
from hicache.lease import Lease
from hicache.radix.interface import NodeView
from hicache.radix.keys import page_keys
from hicache.replay.simulated import Served, SimulatedEngine
from hicache.replay.stamps import PageChecker, Stamps
from hicache.testing.scripted_store import ScriptedStore
from hicache.testing.stepped_stream import stepped_streams
from hicache.tiers.store import Store, StoredPage
from hicache.types import DEFAULT_NAMESPACE, ComponentSpec, Namespace, NodeId, PageKey, Tier

Tokens = NDArray[np.int32]
MakeRig = Callable[..., "Rig"]

PATIENCE_S = 60.0
"""Bound of every wait for something that must happen."""
COMBINATIONS = ("full", "full+swa", "full+mamba", "full+swa+mamba", "swa", "swa+wide", "mamba")
_COMPONENTS: Mapping[str, Mapping[str, object]] = {
    "full": {"rule": "path", "layers": 2, "bytes_per_token": 8},
    "draft": {"rule": "path", "bytes_per_token": 4},
    "swa": {"rule": "window", "window": 8, "layers": 2, "bytes_per_token": 8},
    "wide": {"rule": "window", "window": 16, "bytes_per_token": 4},
    "mamba": {"rule": "checkpoint", "layers": 3, "state_bytes": 48},
}


def settings(
    model: str = "full",
    *,
    page_size: int = 4,
    device: int | Mapping[str, int] = 64,
    host: int | Mapping[str, int] = 0,
    window: int = 8,
    **overrides: Any,  # Any: what a YAML may hold
) -> dict[str, Any]:
    """A configuration's tree. ``device`` and ``host`` are slots, one number for every component or by name.

    Other keywords are dotted paths with ``__`` for the dot: ``policy__write="write_back"``.
    """
    names = model.split("+")
    components = {name: dict(_COMPONENTS[name]) for name in names}
    if "swa" in components:
        components["swa"]["window"] = window
    tree: dict[str, Any] = {
        "model": {"name": "tiny", "page_size": page_size, "components": components},
        "tiers": {"device": {"kind": "cpu", **_pool(components, page_size, device)}},
        "policy": {
            "write": "write_through",
            "prefetch": {"mode": "wait_complete", "min_tokens": 0},
            "watermarks": {"device": {"low": 0, "high": 0}, "host": {"low": 0, "high": 0}},
            "wait_limit": "20s",
            "store_timeout": "20s",
        },
    }
    if host:
        tree["tiers"]["host"] = {"pinned": False, **_pool(components, page_size, host)}
    for path, value in overrides.items():
        *parents, key = path.split("__")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    return tree


def _pool(
    components: Mapping[str, Mapping[str, Any]], page_size: int, slots: int | Mapping[str, int]
) -> dict[str, object]:
    """Capacity and split that come to exactly these slots."""
    wanted = dict.fromkeys(components, slots) if isinstance(slots, int) else slots
    size = {
        name: section.get("state_bytes") or section["bytes_per_token"] * page_size
        for name, section in components.items()
    }
    total = sum(wanted[name] * size[name] for name in components)
    split = {name: wanted[name] * size[name] / total for name in components}
    return {"capacity": total + min(size.values()) // 2, "split": split}


class Rig(Closing):
    """A cache, an engine that writes and checks stamps on it, and the test's hand on store, streams and clock.

    Args:
        model, and further keywords: see ``settings``.
        config: instead of those.
        store: ``scripted`` (then it is ``rig.store``), a store, or None. A disk or memory store may also be
            configured: ``tiers__stores=[...]``.
        stepped: copies wait until the test steps ``to_host``, ``to_device`` and ``local``.
        clock: of the cache; default real time.
        background: whether the cache's own thread books, too; without it only calls do.
    """

    def __init__(
        self,
        model: str = "full",
        *,
        config: HiCacheConfig | None = None,
        store: Store | str | None = None,
        stepped: bool = False,
        clock: ManualClock | None = None,
        session_clock: ManualClock | None = None,
        background: bool = False,
        **keywords: Any,  # Any: see settings
    ) -> None:
        self.scripted = ScriptedStore() if store == "scripted" else None
        given = self.scripted if isinstance(store, str) else store
        streams, self.to_host, self.to_device, self.local = stepped_streams()
        self.checker = PageChecker()
        self.config = load_config(settings(model, **keywords), environ={}) if config is None else config
        self.cache = HiCache(
            self.config,
            clock=clock,
            session_clock=session_clock,
            store=given,
            streams=streams if stepped else None,
            on_page=self.checker.check,
            background=background,
        )
        self.page = self.cache.page_size
        self.specs: tuple[ComponentSpec, ...] = self.config.model.specs()
        self.engine = SimulatedEngine(self.cache)
        self._counters: dict[str, int] = {}

    @property
    def store(self) -> ScriptedStore:
        assert self.scripted is not None, "this rig was made without a scripted store"
        return self.scripted

    # ---- requests ------------------------------------------------------------------------------------------
    def serve(
        self,
        prompt: Sequence[int] | Tokens,
        answer: Sequence[int] | Tokens = (),
        *,
        session: str | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
        stop: str = "",
    ) -> Served:
        """One request from match to release; every reused byte and the whole cache checked after it."""
        served = self.engine.serve(
            as_array(prompt), as_array(answer), session=session, namespace=namespace, stop=stop
        )
        assert served.mismatches == 0, f"{served.mismatches} of {served.pages_checked} pages are wrong"
        self.check()
        return served

    def write(self, lease: Lease, tokens: Sequence[int] | Tokens, begin: int, end: int) -> None:
        """What an engine leaves behind that has computed [begin, end) of ``tokens``."""
        self.engine._write(lease, self.stamps(tokens), begin, end)

    def wrong_pages(self, lease: Lease, tokens: Sequence[int] | Tokens) -> int:
        """How many pages and states of what the lease reuses are not those of ``tokens``."""
        return self.engine._check(lease, self.stamps(tokens), lease.reused)[1]

    def stamps(self, tokens: Sequence[int] | Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> Stamps:
        stamps = Stamps(self.cache.identity, self.specs, self.page, namespace)
        stamps.extend(as_array(tokens))
        return stamps

    def keys(
        self,
        tokens: Sequence[int] | Tokens,
        component: str = "full",
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> tuple[PageKey, ...]:
        """What the whole pages of ``tokens`` are called in L3."""
        spec = next(spec for spec in self.specs if spec.name == component)
        return page_keys(self.cache.identity, spec, as_array(tokens), self.page, namespace)

    @contextlib.contextmanager
    def impatient(self, limit_s: float = 0.05) -> Iterator[None]:
        """Waits for copies, and calls of the store, are given up early in the block; what is well has time outside."""
        runtime = self.cache._runtime
        store_io = runtime.transfers._store_io
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "wait_limit_s", limit_s)
            patch.setattr(runtime, "store_timeout_s", limit_s)
            if store_io is not None:
                patch.setattr(store_io._calls, "timeout_s", limit_s)
            yield

    # ---- where payload is ----------------------------------------------------------------------------------
    def squeeze(self) -> None:
        """Send everything out of L1, as a request for all of it would: demoted where there is a place for it."""
        capacity = min(
            self.cache.device.num_slots(spec.name) for spec in self.specs if not spec.is_checkpoint
        )
        with self.cache.match([9_999_999]) as lease:
            lease.reserve(capacity * self.page)
        self.cache.drain()
        self.check()

    def seed_store(
        self, tokens: Sequence[int] | Tokens, component: str = "full", pages: Iterable[int] | None = None
    ) -> None:
        """Put right pages of ``tokens`` into L3 behind the cache's back; default all whole ones."""
        keys = self.keys(tokens, component)
        wanted = range(len(keys)) if pages is None else pages
        stamps = self.stamps(tokens)
        stored = [
            StoredPage(
                keys[page], None, component, memoryview(stamps.pages(component, page, page + 1).tobytes())
            )
            for page in wanted
        ]
        target = self.scripted.inner if self.scripted is not None else self.cache._stores.top
        assert target is not None
        assert all(self.cache._runtime.transfers.run_store(lambda _: target.put(stored)))

    def stored(
        self,
        tokens: Sequence[int] | Tokens,
        component: str = "full",
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> list[bool]:
        """Which whole pages of ``tokens`` L3 has."""
        keys = self.keys(tokens, component, namespace)
        target = self.scripted.inner if self.scripted is not None else self.cache._stores.top
        assert target is not None
        return self.cache._runtime.transfers.run_store(lambda _: target.exists(keys))

    def resident(self, component: str, tier: Tier) -> int:
        """Slots of the tree's payload in a tier."""
        return sum(len(view.slots.get((component, tier), ())) for view in self._views())

    def free(self, component: str = "full", tier: str = "device") -> int:
        return self.cache.stats().pools[component, tier].free

    def locks(self) -> int:
        """All locks there are, over nodes and components."""
        return sum(sum(view.locks.values()) for view in self._views())

    def check_beliefs(self) -> None:
        """What the tree believes to be in L3 is there: true where nobody else writes or deletes."""
        for tokens, view in self._paths():
            for spec in self.specs:
                if (spec.name, Tier.STORE) in view.slots:
                    there = self.stored(tokens, spec.name, view.namespace)
                    first = -1 if spec.is_checkpoint else view.start // self.page
                    assert all(there[first:]), (
                        f"{spec.name} at {view.start} is believed to be in L3, and is not"
                    )

    # ---- with stepped streams ------------------------------------------------------------------------------
    def serve_stepped(self, tokens: Sequence[int] | Tokens) -> int:
        """Compute and release ``tokens`` on stepped streams, all copies stepped; how many were reused."""
        with self.stepping():
            return self.serve(tokens).source.total

    def squeeze_stepped(self) -> None:
        with self.stepping():
            self.squeeze()

    def stepping(self, *streams: str) -> Stepper:
        """A block in which copies end as they come: on these streams, by default on all."""
        return Stepper(self, streams)

    # ---- checks --------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Audit, counts that add up and never fall, and the bytes of all that L1 and L2 hold."""
        assert self.cache.audit() == []
        assert self.cache._runtime.transfers.check_integrity() == []
        stats = self.cache.stats()
        counts = stats.tokens
        now = {name: getattr(counts, name) for name in ("prompt", "device", "host", "store", "computed")}
        assert min(now.values()) >= 0
        assert counts.hit + counts.computed == counts.prompt
        now |= {f"tree {name}": count for name, count in stats.tree.items()}
        now |= {f"fault {name}": count for name, count in stats.faults.items()}
        fallen = [name for name, count in self._counters.items() if now[name] < count]
        assert not fallen, f"counters fell: {fallen}"
        self._counters = now
        assert self.wrong_payload() == []

    def check_idle(self) -> None:
        """With no lease open: no lock, nothing protected, owned or in flight; and all of ``check``."""
        assert self.cache.drain()
        self.check()
        assert self.locks() == 0
        for place, count in self.cache.stats().pools.items():
            assert (count.protected, count.lease_owned, count.in_flight) == (0, 0, 0), place
        depth = self.cache.stats().transfers
        assert (depth.outstanding, depth.fetch_queue.used_bytes, depth.store_queue.used_bytes) == (0, 0, 0)

    def wrong_payload(self) -> list[str]:
        """Every page and state that the tree has in L1 or L2 and whose bytes are not its stamp."""
        wrong: list[str] = []
        with self.cache._runtime.lock:
            for tokens, view in self._paths():
                wrong += self._wrong_of(view, self.stamps(tokens, view.namespace))
        return wrong

    def _paths(self) -> Iterator[tuple[Tokens, NodeView]]:
        """Every node with all tokens up to its end."""
        paths: dict[NodeId | None, Tokens] = {}
        for view in self._views():
            above = paths.get(view.parent, np.empty(0, np.int32))
            paths[view.node] = np.concatenate([above, np.array(view.tokens, np.int32)])
            yield paths[view.node], view

    def _wrong_of(self, view: NodeView, stamps: Stamps) -> list[str]:
        wrong = []
        end = (view.start + len(view.tokens)) // self.page
        for spec in self.specs:
            first = end - 1 if spec.is_checkpoint else view.start // self.page
            for tier, pool in ((Tier.DEVICE, self.cache.device), (Tier.HOST, self.cache.host)):
                slots = view.slots.get((spec.name, tier))
                if slots and pool is not None:
                    got = pool.read_many(spec.name, slots)
                    if (got != stamps.pages(spec.name, first, end)).any():
                        wrong.append(f"{spec.name} in {tier.name} at [{view.start}, {end * self.page})")
        return wrong

    def _views(self) -> tuple[NodeView, ...]:
        with self.cache._runtime.lock:
            self.cache._runtime.pump()
            return self.cache._runtime.core.snapshot()

    # ---- life ----------------------------------------------------------------------------------------------
    def step_all(self) -> None:
        """Step every copy, and what follows from it, until nothing is pending."""
        while self.to_host.step_all() + self.to_device.step_all() + self.local.step_all():
            self.cache.poll()

    def close(self) -> None:
        """Close without waiting for anything. Idempotent."""
        if self.scripted is not None:
            self.scripted.release()
        self.cache.close(flush=False, drain=False)


class Stepper:
    """Steps every copy as it comes, from a thread of its own, while the test waits for one."""

    def __init__(self, rig: Rig, streams: Sequence[str]) -> None:
        self._rig = rig
        self._names = streams
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stepper")

    def _run(self) -> None:
        streams = [getattr(self._rig, name) for name in self._names or ("to_host", "to_device", "local")]
        while not self._done.wait(0.0005):
            for stream in streams:
                stream.step_all()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if not self._names:
            self._rig.step_all()


def as_array(tokens: Sequence[int] | Tokens) -> Tokens:
    return np.asarray(tokens, dtype=np.int32)


def count_to(last: int, start: int = 1) -> Tokens:
    """Tokens ``start .. last``: T(last) of the cases."""
    return np.arange(start, last + 1, dtype=np.int32)


@pytest.fixture
def t() -> Callable[..., Tokens]:
    """``t(n)`` is T(n) of the cases, tokens 1..n; ``t(n, start)`` begins elsewhere."""
    return count_to


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """``make_rig("full+swa", device=16, host=32, store="scripted", ...)``; closed after the test."""
    rigs: list[Rig] = []

    def make(model: str = "full", **keywords: Any) -> Rig:  # Any: see Rig
        rigs.append(Rig(model, **keywords))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture(scope="session")
def rig_type() -> type[Rig]:
    """For property tests, which make a rig for each example; ``make_rig`` makes one for each test."""
    return Rig


@pytest.fixture(params=COMBINATIONS)
def model(request: pytest.FixtureRequest) -> str:
    """Every combination of components."""
    return str(request.param)


@pytest.fixture(params=[name for name in COMBINATIONS if name != "mamba"])
def paged_model(request: pytest.FixtureRequest) -> str:
    """Every combination that a request for pages can push out of L1."""
    return str(request.param)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The folder of a disk store, not made yet."""
    return tmp_path / "store"
