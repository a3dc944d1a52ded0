"""KV events: the peers' shape, numbers without a gap, and residency by the events alone."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import zmq

from hicache.cache import HiCache
from hicache.config import load_config
from hicache.errors import ConfigError
from hicache.events import Cause, ResidencyChange, ResidencyEvent
from hicache.kvevents.publisher import EventPublisher
from hicache.kvevents.subscriber import EventSubscriber, GapError
from hicache.kvevents.wire import Batch, BatchEncoder, Residency, decode
from hicache.radix.core import core_kind
from hicache.radix.keys import page_keys
from hicache.replay.simulated import SimulatedEngine
from hicache.types import ComponentSpec, Namespace, NodeId, PageKey, Tier

SPECS = (
    ComponentSpec("full", "path", bytes_per_token=1),
    ComponentSpec("swa", "window", window_tokens=8, bytes_per_token=1),
    ComponentSpec("mamba", "checkpoint", state_bytes=8),
)
ANY = "tcp://127.0.0.1:*"
PATIENCE_S = 60.0


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "big"))


def stored(*numbers: int, component: str = "full", tier: Tier = Tier.DEVICE) -> ResidencyEvent:
    tokens = np.arange(len(numbers) * 4, dtype="<i4").tobytes()
    return ResidencyEvent(
        ResidencyChange.STORED,
        tier,
        component,
        tuple(map(key, numbers)),
        Cause.INSERT,
        parent=key(99),
        tokens=tokens,
        namespace=Namespace(salt="secret", lora="french"),
    )


def removed(*numbers: int, cause: Cause = Cause.EVICT) -> ResidencyEvent:
    return ResidencyEvent(ResidencyChange.REMOVED, Tier.DEVICE, "full", tuple(map(key, numbers)), cause)


@pytest.fixture(params=["map", "array"])
def encoder(request: pytest.FixtureRequest) -> BatchEncoder:
    return BatchEncoder(SPECS, 4, is_map=request.param == "map")


# ---- the shape ---------------------------------------------------------------------------------
class PeerBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """A batch as vLLM's own readers declare it."""

    ts: float
    events: list[MapStored | MapRemoved | MapCleared]
    data_parallel_rank: int | None = None


class MapStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class MapRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class MapCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class ArrayStored(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class ArrayRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[bytes | int]
    medium: str | None


class ArrayCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class ArrayBatch(msgspec.Struct, array_like=True):
    """A batch as SGLang's readers, and older ones of vLLM, declare it."""

    ts: float
    events: list[ArrayStored | ArrayRemoved | ArrayCleared]


EVENTS = (stored(1, 2), stored(3, component="swa", tier=Tier.HOST), removed(1), removed(2, cause=Cause.RESET))


def test_a_reader_that_declares_maps_reads_maps() -> None:
    raw = BatchEncoder(SPECS, 4, is_map=True, rank=3).encode(EVENTS, 12.5)
    batch = msgspec.msgpack.decode(raw, type=PeerBatch)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    full, swa, gone, cleared = batch.events
    assert full == MapStored(
        [key(1), key(2)], key(99), list(range(8)), 4, None, "GPU", "french", None, 0, "full_attention"
    )
    assert isinstance(swa, MapStored)
    assert (swa.medium, swa.group_idx) == ("CPU", 1)
    assert (swa.kv_cache_spec_kind, swa.kv_cache_spec_sliding_window) == ("sliding_window", 8)
    assert gone == MapRemoved([key(1)], "GPU", 0)
    assert isinstance(cleared, MapCleared)


def test_a_reader_that_declares_arrays_reads_arrays() -> None:
    raw = BatchEncoder(SPECS, 4, is_map=False).encode(EVENTS, 12.5)
    full, _, gone, cleared = msgspec.msgpack.decode(raw, type=ArrayBatch).events
    assert full == ArrayStored([key(1), key(2)], key(99), list(range(8)), 4, None, "GPU")
    assert gone == ArrayRemoved([key(1)], "GPU")
    assert isinstance(cleared, ArrayCleared)


class IntStored(msgspec.Struct, tag="BlockStored", array_like=True):
    """As SGLang declares it: hashes are integers of 64 bits."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class IntRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int]


class IntBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[IntStored | IntRemoved | ArrayCleared]


def test_a_reader_that_declares_integers_reads_integers() -> None:
    high = ResidencyEvent(ResidencyChange.REMOVED, Tier.DEVICE, "full", (PageKey(b"\xff" * 32),), Cause.EVICT)
    keys = tuple(PageKey(bytes([0, 0, 0, 0, 0, 0, 1, last]) + bytes(24)) for last in (4, 5))
    told = (replace(stored(1, 2), keys=keys, parent=PageKey(bytes([0x80]) + bytes(31))), high)
    raw = BatchEncoder(SPECS, 4, is_map=False, has_int_hashes=True).encode(told, 1.0)
    came, gone = msgspec.msgpack.decode(raw, type=IntBatch).events
    assert came == IntStored([260, 261], -(2**63), list(range(8)), 4, None)
    assert gone == IntRemoved([-1])


def test_both_formats_say_the_same_with_tier_component_and_cause() -> None:
    one, other = (
        decode(7, BatchEncoder(SPECS, 4, is_map=is_map).encode(EVENTS, 1.0)) for is_map in (True, False)
    )
    assert one == other
    tag, fields = one.events[1]
    assert tag == "BlockStored"
    assert (fields["tier"], fields["component"], fields["cause"]) == ("host", "swa", "insert")


def test_salts_are_not_told(encoder: BatchEncoder) -> None:
    assert b"secret" not in encoder.encode(EVENTS, 1.0)


def test_a_reset_is_told_once(encoder: BatchEncoder) -> None:
    gone = [removed(number, cause=Cause.RESET) for number in range(5)]
    assert decode(0, encoder.encode(gone, 1.0)).events == (("AllBlocksCleared", {}),)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgspec.msgpack.encode(7), msgspec.msgpack.encode([1.0, [[]]])]
)
def test_what_is_no_batch_is_refused_with_its_number(payload: bytes) -> None:
    with pytest.raises(ValueError, match="batch 5 of"):
        decode(5, payload)


def test_events_that_do_not_follow_are_noticed(encoder: BatchEncoder) -> None:
    residency = Residency()
    residency.apply(decode(0, encoder.encode([stored(1)], 1.0)))
    with pytest.raises(ValueError, match="does not follow"):
        residency.apply(decode(1, encoder.encode([removed(2)], 1.0)))
    with pytest.raises(ValueError, match="does not follow"):
        residency.apply(decode(2, encoder.encode([stored(1)], 1.0)))


# ---- sockets -----------------------------------------------------------------------------------
@pytest.fixture
def publisher(encoder: BatchEncoder) -> Iterator[EventPublisher]:
    with EventPublisher(
        encoder, endpoint=ANY, replay_endpoint=ANY, buffer_batches=8, now_s=lambda: 1.0
    ) as made:
        yield made


def subscribe(publisher: EventPublisher) -> EventSubscriber:
    assert publisher.replay_endpoint is not None
    return EventSubscriber(publisher.endpoint, publisher.replay_endpoint, timeout_s=PATIENCE_S)


def read_to(subscriber: EventSubscriber, sequence: int) -> list[Batch]:
    """Everything up to a batch, from the replay socket: what a late subscriber does."""
    batches: list[Batch] = []
    while subscriber.next_sequence <= sequence:
        batches += subscriber.catch_up()
    return batches


def test_a_publisher_begins_by_saying_that_nothing_is_anywhere(publisher: EventPublisher) -> None:
    with subscribe(publisher) as subscriber:
        (first,) = read_to(subscriber, 0)
    assert (first.sequence, first.events) == (0, (("AllBlocksCleared", {}),))


def test_numbers_have_no_gap_and_order_is_kept(publisher: EventPublisher) -> None:
    for number in range(5):
        publisher.publish([stored(number)])
    with subscribe(publisher) as subscriber:
        batches = read_to(subscriber, 5)
    assert [batch.sequence for batch in batches] == list(range(6))
    assert [fields["block_hashes"] for batch in batches[1:] for _, fields in batch.events] == [
        [key(number)] for number in range(5)
    ]


def test_a_live_subscriber_gets_the_gap_before_what_it_heard(encoder: BatchEncoder) -> None:
    """It hears nothing until it is connected; the first message it does hear shows what it missed."""
    with (
        EventPublisher(encoder, endpoint=ANY, replay_endpoint=ANY) as publisher,
        subscribe(publisher) as subscriber,
    ):
        heard: list[Batch] = []
        number = 0
        while not heard and number < 1000:  # PUB does not say when a subscription has reached it
            publisher.publish([stored(number)])
            number += 1
            heard = list(subscriber.read(3 * PATIENCE_S / 1000))
        assert heard
        heard += read_to(subscriber, number)
    assert [batch.sequence for batch in heard] == list(range(number + 1))


def test_a_gap_that_the_buffer_has_lost_is_said_with_its_numbers(publisher: EventPublisher) -> None:
    with subscribe(publisher) as subscriber:
        read_to(subscriber, 0)
        for number in range(12):
            publisher.publish([stored(number)])
        with subscribe(publisher) as other:  # waits until all are out
            other.next_sequence = 12
            read_to(other, 12)
        with pytest.raises(GapError) as gone:
            list(subscriber.catch_up())
        assert (gone.value.first, gone.value.last) == (1, 4)
        assert [batch.sequence for batch in subscriber.catch_up()] == list(range(5, 13))


def test_a_full_queue_turns_batches_away_and_their_numbers_are_missing(
    encoder: BatchEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, send_queued = threading.Event(), EventPublisher._send_queued

    def held(publisher: EventPublisher) -> None:
        gate.wait(PATIENCE_S)
        send_queued(publisher)

    monkeypatch.setattr(EventPublisher, "_send_queued", held)
    with EventPublisher(
        encoder, endpoint=ANY, replay_endpoint=ANY, queue_batches=3, now_s=lambda: 1.0
    ) as made:
        for number in range(5):
            made.publish([stored(number)])
        assert (made.stats().dropped, made.stats().queued) == (3, 3)  # number 0 waits, too
        gate.set()
        with subscribe(made) as subscriber:
            assert len(read_to(subscriber, 2)) == 3  # the queue is empty from here on
            made.publish([stored(9)])
            with pytest.raises(GapError) as gone:
                read_to(subscriber, 6)
        assert (gone.value.first, gone.value.last) == (3, 5)


def test_answers_that_come_too_late_are_not_taken_for_those_to_the_next_question(
    encoder: BatchEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, answer_replays = threading.Event(), EventPublisher._answer_replays

    def held(publisher: EventPublisher) -> None:
        if publisher._router.poll(0):
            gate.wait(PATIENCE_S)
            answer_replays(publisher)

    monkeypatch.setattr(EventPublisher, "_answer_replays", held)
    with EventPublisher(encoder, endpoint=ANY, replay_endpoint=ANY) as made:
        assert made.replay_endpoint is not None
        with EventSubscriber(made.endpoint, made.replay_endpoint, timeout_s=0.01) as subscriber:
            with pytest.raises(GapError):
                list(subscriber.catch_up())
            gate.set()
            subscriber._timeout_ms = int(PATIENCE_S * 1000)
            assert [batch.sequence for batch in read_to(subscriber, 0)] == [0]
            made.publish([stored(1)])
            assert [batch.sequence for batch in read_to(subscriber, 1)] == [1]
            assert subscriber.next_sequence == 2


def test_a_replay_is_framed_as_the_peers_frame_it(encoder: BatchEncoder) -> None:
    """vLLM 0.32 and SGLang 0.5.23: an empty frame, then each message as it was sent; at the end -1 without a topic."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    with EventPublisher(encoder, endpoint=ANY, replay_endpoint=ANY, topic="kv") as made:
        assert made.replay_endpoint is not None
        dealer.connect(made.replay_endpoint)
        dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        empty, topic, number, payload = dealer.recv_multipart()
        assert (empty, topic, int.from_bytes(number, "big")) == (b"", b"kv", 0)
        assert decode(0, payload).events == (("AllBlocksCleared", {}),)
        assert dealer.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
    context.destroy(linger=0)


def test_a_bad_replay_request_does_no_harm(
    publisher: EventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    assert publisher.replay_endpoint is not None
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart((b"", b"123"))
    dealer.send(b"hello")
    with subscribe(publisher) as subscriber:
        assert len(read_to(subscriber, 0)) == 1
    context.destroy(linger=0)


def test_after_close_nothing_is_taken_and_closing_again_is_nothing(publisher: EventPublisher) -> None:
    publisher.close()
    publisher.publish([stored(1)])
    publisher.close()
    assert publisher.stats().dropped == 1


@pytest.mark.parametrize("setting", ["events.endpoint", "events.replay_endpoint"])
def test_a_taken_endpoint_is_refused_with_the_setting(encoder: BatchEncoder, setting: str) -> None:
    with EventPublisher(encoder, endpoint=ANY) as taken:
        endpoints = {"endpoint": ANY, "replay_endpoint": ANY, setting.removeprefix("events."): taken.endpoint}
        with pytest.raises(ConfigError, match=rf"{setting}: .* cannot be bound"):
            EventPublisher(encoder, **cast("Any", endpoints))  # Any: keywords by name


def test_the_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"events\.endpoint .*: found localhost:1; expected tcp://"):
        load_config("cpu", overrides={"events.endpoint": "localhost:1"}, environ={})
    with pytest.raises(ConfigError, match=r"events\.replay_endpoint .*: is given without endpoint"):
        load_config("cpu", overrides={"events.replay_endpoint": ANY}, environ={})


# ---- residency by the events alone ---------------------------------------------------------------
Where = tuple[Tier, str, PageKey]


def resident(cache: HiCache) -> dict[Where, tuple[PageKey | None, bytes]]:
    """What the tree says is where, with each page's parent and tokens."""
    core = cache._runtime.core
    views = {view.node: view for view in core.snapshot()}
    page = cache.page_size
    found: dict[Where, tuple[PageKey | None, bytes]] = {}

    def path(node: NodeId | None) -> tuple[int, ...]:
        view = views.get(node) if node is not None else None
        return () if view is None else (*path(view.parent), *view.tokens)

    for view in views.values():
        tokens = np.array(path(view.node), dtype=np.int32)
        for component, tier in view.slots:
            spec = next(spec for spec in cache.config.model.specs() if spec.name == component)
            keys = page_keys(cache.identity, spec, tokens, page, view.namespace)
            first = len(keys) - 1 if spec.is_checkpoint else view.start // page
            for index in range(first, len(keys)):
                raw = tokens[index * page : (index + 1) * page].astype("<i4").tobytes()
                found[tier, component, keys[index]] = (keys[index - 1] if index else None, raw)
    return found


def blocks(batches: list[Batch]) -> Mapping[Where, tuple[PageKey | None, bytes]]:
    """Each page that was told to be stored, with the parent and tokens it was told with."""
    told: dict[Where, tuple[PageKey | None, bytes]] = {}
    for batch in batches:
        for tag, fields in batch.events:
            if tag != "BlockStored":
                continue
            keys, parent = cast("list[PageKey]", fields["block_hashes"]), fields["parent_block_hash"]
            tokens, size = cast("list[int]", fields["token_ids"]), cast("int", fields["block_size"])
            assert len(tokens) == size * len(keys)
            for place, page in enumerate(keys):
                raw = struct.pack(f"<{size}i", *tokens[place * size : (place + 1) * size])
                where = Tier[str(fields["tier"]).upper()], str(fields["component"]), page
                told[where] = cast("PageKey | None", parent), raw
                parent = page
    return told


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("seed", range(3))
def test_replaying_the_events_gives_the_residency_exactly(core: str, form: str, seed: int) -> None:
    """Random prompts in small pools of three tiers; the events, read over ZeroMQ, say what the tree says."""
    components = {
        "full": {"rule": "path", "layers": 2, "bytes_per_token": 8},
        "swa": {"rule": "window", "window": 8, "layers": 2, "bytes_per_token": 8},
        "mamba": {"rule": "checkpoint", "layers": 3, "state_bytes": 48},
    }
    tree: dict[str, Any] = {
        "model": {"name": "tiny", "page_size": 4, "components": components},
        "tiers": {
            "device": {"kind": "cpu", "capacity": "2KiB"},
            "host": {"pinned": False, "capacity": "3KiB"},
            "stores": [{"kind": "memory", "capacity": "64KiB"}],
        },
        "policy": {"prefetch": {"mode": "wait_complete", "min_tokens": 0}, "write": "write_through"},
        "events": {"endpoint": ANY, "replay_endpoint": ANY, "format": form},
    }
    config = load_config(tree, environ={})
    if core == "rust" and core_kind("auto", config.model.specs())[0] != "rust":
        pytest.skip("the Rust core is not built here")
    draw = random.Random(seed)
    residency = Residency()
    batches: list[Batch] = []
    with HiCache(config, core=core, background=False) as cache:
        assert cache.events is not None
        engine = SimulatedEngine(cache)
        prompts: list[list[int]] = [[]]
        with subscribe(cache.events) as subscriber:
            for turn in range(24):
                base = draw.choice(prompts)
                prompt = base[: draw.randrange(len(base) + 1)] + [
                    draw.randrange(9) for _ in range(draw.randrange(1, 20))
                ]
                prompts = [*prompts[-4:], prompt]
                namespace = Namespace(lora=draw.choice([None, None, "french"]))
                engine.serve(np.array(prompt, np.int32), np.array([1, 2, 3], np.int32), namespace=namespace)
                cache.drain()
                if draw.random() < 0.06:
                    cache.reset()
                cache.poll()
                for batch in read_to(subscriber, cache.events._next_sequence - 1):
                    residency.apply(batch)
                    batches.append(batch)
                expected = resident(cache)
                assert residency.pages == set(expected), f"seed {seed}, turn {turn}"
                told = blocks(batches)
                assert {where: told[where] for where in expected} == expected
        tiers = {tier for batch in batches for _, f in batch.events for tier in [f.get("tier")] if tier}
        assert tiers == {"device", "host", "store"}
        assert any(tag == "BlockRemoved" for batch in batches for tag, _ in batch.events)
        assert cache.events.stats().dropped == 0


def test_the_cache_counts_its_batches() -> None:
    config = load_config("cpu", overrides={"events.endpoint": ANY}, environ={})
    with HiCache(config) as cache:
        assert cache.events is not None
        assert cache.stats().event_batches.keys() == {"published", "dropped", "queued", "replayed"}
    cache.close()


def test_without_an_endpoint_nothing_is_kept() -> None:
    with HiCache(load_config("cpu", environ={})) as cache:
        assert cache.events is None
        assert not cache._runtime.core.config.emit_events
        assert cache.stats().event_batches == {}
