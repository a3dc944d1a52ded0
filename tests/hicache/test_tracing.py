"""Spans: what there is, under what it hangs, and that there is nothing when it is off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from hicache.errors import ConfigError, TierUnavailableError
from hicache.testing.scripted_store import Raise
from hicache.tiers.store import Store
from hicache.tiers.traced import TracedStore
from hicache.tiers.wrapper import StoreWrapper
from hicache.tracing import NO_SPAN, OFF, OtelTracing

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig

PROMPT = range(1, 34)
SALT = "a-tenant's-secret"
EXPORTER = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def provider() -> Iterator[None]:
    """The process's provider can be set once only, so one exporter serves all tests here."""
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(made)
    yield
    made.shutdown()


@pytest.fixture(autouse=True)
def fresh() -> None:
    EXPORTER.clear()


@pytest.fixture
def cold(make_rig: MakeRig) -> Rig:
    """A cache whose L3 alone has the prompt's payload."""
    rig = make_rig(store="scripted", device=16, host=16, tracing__enabled=True)
    rig.seed_store(PROMPT)
    EXPORTER.clear()
    return rig


def ended(name: str | None = None) -> list[ReadableSpan]:
    return [span for span in EXPORTER.get_finished_spans() if name in {None, span.name}]


def only(name: str) -> ReadableSpan:
    (span,) = ended(name)
    return span


def hangs_under(span: ReadableSpan, above: ReadableSpan) -> bool:
    return (
        span.parent is not None
        and above.context is not None
        and (span.parent.trace_id, span.parent.span_id) == (above.context.trace_id, above.context.span_id)
    )


def request(rig: Rig) -> ReadableSpan:
    """Serve the prompt inside a span of the caller's."""
    with trace.get_tracer("engine").start_as_current_span("request"), rig.cache.match(PROMPT) as lease:
        assert lease.load() == 32
    return only("request")


# ---- what hangs under what -----------------------------------------------------------------------------
def test_match_and_load_hang_under_the_callers_span(cold: Rig) -> None:
    above = request(cold)
    assert hangs_under(only("hicache.match"), above)
    assert hangs_under(only("hicache.load"), above)


def test_the_fetch_hangs_under_the_match_and_the_copy_under_the_load(cold: Rig) -> None:
    request(cold)
    assert hangs_under(only("hicache.fetch"), only("hicache.match"))
    assert hangs_under(only("hicache.copy"), only("hicache.load"))


def test_calls_on_the_stores_own_thread_hang_under_what_asked_for_them(cold: Rig) -> None:
    request(cold)
    assert hangs_under(only("hicache.exists"), only("hicache.match"))
    assert hangs_under(only("hicache.get"), only("hicache.fetch"))


def test_all_of_a_request_is_one_trace(cold: Rig) -> None:
    request(cold)
    traces = {span.context.trace_id for span in ended() if span.context is not None}
    assert len(traces) == 1
    assert {span.name for span in ended()} == {
        "request",
        "hicache.match",
        "hicache.exists",
        "hicache.fetch",
        "hicache.get",
        "hicache.load",
        "hicache.copy",
    }


def test_a_load_in_another_thread_stays_in_the_requests_trace(cold: Rig) -> None:
    with trace.get_tracer("engine").start_as_current_span("request"), cold.cache.match(PROMPT) as lease:
        loader = threading.Thread(target=lease.load)
        loader.start()
        loader.join()
    assert hangs_under(only("hicache.load"), only("request"))


def test_an_async_request_has_the_same_tree(cold: Rig) -> None:
    async def serve() -> None:
        with trace.get_tracer("engine").start_as_current_span("request"):
            async with await cold.cache.amatch(PROMPT) as lease:
                assert await lease.aload() == 32

    asyncio.run(serve())
    above = only("request")
    assert hangs_under(only("hicache.match"), above)
    assert hangs_under(only("hicache.load"), above)
    assert hangs_under(only("hicache.exists"), only("hicache.match"))


def test_what_a_release_sends_down_hangs_under_the_span_it_was_called_in(make_rig: MakeRig) -> None:
    rig = make_rig(store="scripted", device=16, host=16, tracing__enabled=True)
    with trace.get_tracer("engine").start_as_current_span("request"):
        rig.serve(PROMPT)
        rig.cache.drain()
    above = only("request")
    assert hangs_under(only("hicache.store"), above)
    assert hangs_under(only("hicache.put"), only("hicache.store"))
    assert any(hangs_under(span, above) for span in ended("hicache.copy"))


def test_each_store_of_a_stack_has_spans_of_its_own(make_rig: MakeRig) -> None:
    stores = [{"kind": "memory", "name": name, "capacity": "1MiB"} for name in ("near", "far")]
    rig = make_rig(host=16, tiers__stores=stores, tiers__stack={"write": "all"}, tracing__enabled=True)
    rig.serve(PROMPT)
    rig.cache.drain()
    puts = ended("hicache.put")
    assert sorted(str(dict(span.attributes or {})["hicache.store"]) for span in puts) == ["far", "near"]
    assert all(hangs_under(span, only("hicache.store")) for span in puts)


# ---- what they say -------------------------------------------------------------------------------------
def test_spans_tell_how_much(cold: Rig) -> None:
    request(cold)
    page_bytes = cold.specs[0].slot_bytes(cold.page)
    assert dict(only("hicache.match").attributes or {}) == {"hicache.tokens": 33, "hicache.found_tokens": 32}
    assert dict(only("hicache.load").attributes or {}) == {
        "hicache.found_tokens": 32,
        "hicache.reused_tokens": 32,
    }
    assert dict(only("hicache.fetch").attributes or {}) == {
        "hicache.direction": "fetch",
        "hicache.component": "full",
        "hicache.slots": 8,
        "hicache.done_slots": 8,
        "hicache.bytes": 8 * page_bytes,
    }


def test_a_fetch_that_fell_short_says_why(cold: Rig) -> None:
    cold.store.script("get", Raise(TierUnavailableError("away")))
    with cold.cache.match(PROMPT) as lease:
        assert lease.load() == 0
    fetch = ended("hicache.fetch")[0]
    assert fetch.status.status_code is StatusCode.ERROR
    assert fetch.status.description == "unavailable"
    get = ended("hicache.get")[0]
    assert (get.status.status_code, get.status.description) == (StatusCode.ERROR, "TierUnavailableError")


def test_no_span_holds_tokens_or_salts(make_rig: MakeRig) -> None:
    from hicache.types import Namespace

    rig = make_rig(store="scripted", device=16, host=16, tracing__enabled=True)
    rig.serve(PROMPT, namespace=Namespace(salt=SALT), session="alice")
    rig.cache.drain()
    told = "".join(span.to_json() for span in ended())
    assert told
    assert SALT not in told
    assert "alice" not in told


def test_a_traced_store_passes_on_whatever_a_store_can_do() -> None:
    """A method with a default that is not passed on would silently do nothing."""
    methods = {name for name in vars(Store) if not name.startswith("_")}
    assert methods - set(vars(StoreWrapper)) == set()
    assert StoreWrapper in TracedStore.__bases__


# ---- off -----------------------------------------------------------------------------------------------
def test_nothing_is_told_when_it_is_off(make_rig: MakeRig) -> None:
    rig = make_rig(store="scripted", device=16, host=16)
    rig.serve(PROMPT)
    rig.cache.drain()
    assert ended() == []
    assert rig.cache._stores.top is rig.scripted


def test_nothing_is_imported_when_it_is_off() -> None:
    code = """
import sys, numpy as np
from hicache.cache import HiCache
from hicache.config import load_config
with HiCache(load_config("cpu", overrides={"tiers.stores": []}, environ={})) as cache:
    with cache.match(np.arange(600)) as lease:
        lease.load(); lease.reserve(600); lease.release(np.arange(600))
sys.exit(any(name.startswith("opentelemetry") for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=250, check=False).returncode == 0


def test_off_makes_no_object_for_a_span() -> None:
    assert OFF.begin("a", fact=1) is OFF.begin("b") is NO_SPAN
    assert OFF.span("a") is OFF.span("b")
    with OFF.span("a") as span, OFF.inside(span):
        span.note(fact=1)
        span.end("why")


def test_without_the_package_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"tracing\.enabled: needs .* pip install 'hicache\[otel\]'"):
        OtelTracing("1")
