from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import ProtocolError
from hicache.testing.transfer_rig import as_slots
from hicache.transfer.copy import PageCopier, check_pairs, pair_runs
from hicache.transfer.layout import Layout, SlotView
from hicache.types import ComponentSpec, Tier

SHAPES = [
    pytest.param(1, 8, id="one-layer-one-word"),
    pytest.param(3, 5, id="odd-bytes"),
    pytest.param(4, 1024, id="small-slots"),
    pytest.param(8, 8 << 10, id="pages-of-64-KiB"),
    pytest.param(3, (300 << 10) + 8, id="layers-above-a-piece"),
]


def views(num_layers: int, layer_bytes: int, num_slots: int) -> tuple[SlotView, SlotView]:
    """Device and host view of one component, filled with random bytes."""
    spec = ComponentSpec("full", num_layers=num_layers, bytes_per_token=num_layers * layer_bytes)
    random = torch.Generator().manual_seed(num_layers * layer_bytes + num_slots)
    device = torch.randint(0, 256, (num_layers, num_slots, layer_bytes), dtype=torch.uint8, generator=random)
    host = torch.randint(0, 256, (num_slots, num_layers, layer_bytes), dtype=torch.uint8, generator=random)
    layout = Layout((spec,), 1, device={"full": device}, host={"full": host})
    return layout.view("full", Tier.DEVICE), layout.view("full", Tier.HOST)


def copied_one_by_one(
    source: SlotView, source_slots: list[int], target: SlotView, target_slots: list[int]
) -> torch.Tensor:
    expected = target.payload.clone()
    for source_slot, target_slot in zip(source_slots, target_slots, strict=True):
        expected[target_slot] = source.payload[source_slot]
    return expected


PATTERNS = [
    pytest.param([0, 1, 2, 3], [4, 5, 6, 7], id="one-run"),
    pytest.param([7, 2, 5, 0], [1, 6, 3, 4], id="scattered"),
    pytest.param([3, 4, 5, 1], [0, 1, 2, 7], id="a-run-and-a-page"),
    pytest.param([7, 6, 5], [0, 1, 2], id="backwards"),
    pytest.param([], [], id="none"),
]


@pytest.mark.parametrize("upward", [False, True], ids=["to-host", "to-device"])
@pytest.mark.parametrize(("source_slots", "target_slots"), PATTERNS)
@pytest.mark.parametrize(("num_layers", "layer_bytes"), SHAPES)
def test_slots_arrive_whole_and_all_others_keep_their_bytes(
    num_layers: int, layer_bytes: int, source_slots: list[int], target_slots: list[int], upward: bool
) -> None:
    device, host = views(num_layers, layer_bytes, 8)
    source, target = (host, device) if upward else (device, host)
    expected = copied_one_by_one(source, source_slots, target, target_slots)
    with PageCopier(num_lanes=2) as copier:
        copier.copy(source, as_slots(source_slots), target, as_slots(target_slots))
    assert torch.equal(target.payload, expected)


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_a_batch_shared_by_lanes_arrives_whole(num_lanes: int) -> None:
    device, host = views(2, 16 << 10, 256)
    random = np.random.default_rng(7)
    source_slots, target_slots = random.permutation(256)[:200], random.permutation(256)[:200]
    expected = copied_one_by_one(device, source_slots.tolist(), host, target_slots.tolist())
    with PageCopier(num_lanes) as copier:
        copier.copy(device, source_slots, host, target_slots)
    assert torch.equal(host.payload, expected)


def test_a_claim_copies_within_the_device() -> None:
    device, _ = views(3, 40, 6)
    expected = copied_one_by_one(device, [4, 1], device, [0, 5])
    with PageCopier() as copier:
        copier.copy(device, as_slots([4, 1]), device, as_slots([0, 5]))
    assert torch.equal(device.payload, expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_pairing_equals_page_by_page(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 12), label="slots")
    layer_bytes = data.draw(st.sampled_from([1, 8, 9000, 16 << 10]), label="layer bytes")
    count = data.draw(st.integers(0, num_slots), label="count")
    pick = st.permutations(range(num_slots)).map(lambda order: order[:count])
    source_slots, target_slots = data.draw(pick, label="from"), data.draw(pick, label="to")
    device, host = views(2, layer_bytes, num_slots)
    expected = copied_one_by_one(device, source_slots, host, target_slots)
    with PageCopier(num_lanes=2) as copier:
        copier.copy(device, as_slots(source_slots), host, as_slots(target_slots))
    assert torch.equal(host.payload, expected)


def test_runs_are_consecutive_on_both_sides() -> None:
    runs = pair_runs(as_slots([3, 4, 5, 12, 13, 14]), as_slots([7, 8, 9, 2, 0, 1]))
    assert runs.tolist() == [[3, 7, 3], [12, 2, 1], [13, 0, 2]]


@pytest.mark.parametrize(
    ("source_slots", "target_slots"),
    [
        pytest.param([0, 8], [0, 1], id="source-past-the-end"),
        pytest.param([0, 1], [0, 8], id="target-past-the-end"),
        pytest.param([-1], [0], id="no-slot"),
        pytest.param([0, 1], [2, 2], id="target-twice"),
        pytest.param([1, 1], [2, 3], id="source-twice"),
        pytest.param([0, 1], [0], id="unpaired"),
    ],
)
def test_a_pairing_that_makes_no_sense_is_refused(source_slots: list[int], target_slots: list[int]) -> None:
    device, host = views(2, 8, 8)
    with pytest.raises(ProtocolError):
        check_pairs(device, as_slots(source_slots), host, as_slots(target_slots))


def test_slots_of_another_type_are_refused() -> None:
    device, host = views(2, 8, 8)
    with pytest.raises(ProtocolError, match="int64"):
        # The wrong type is the point.
        check_pairs(device, np.zeros(1, dtype=np.int32), host, as_slots([0]))  # pyright: ignore[reportArgumentType]


def test_a_claim_from_a_slot_that_it_also_overwrites_is_refused() -> None:
    device, _ = views(2, 8, 8)
    with pytest.raises(ProtocolError, match="source and target"):
        check_pairs(device, as_slots([0, 1]), device, as_slots([1, 2]))


def test_an_error_in_any_lane_is_raised_after_all_lanes_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    device, host = views(2, 16 << 10, 256)
    real = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]  # what the copier calls
    calls: list[str] = []

    def fails_at_the_third(into: list[torch.Tensor], out_of: list[torch.Tensor]) -> None:
        calls.append("begin")
        if len(calls) == 3:
            raise RuntimeError("no copy today")
        real(into, out_of)

    monkeypatch.setattr(torch, "_foreach_copy_", fails_at_the_third)
    slots = np.random.default_rng(1).permutation(256)
    with PageCopier(num_lanes=2) as copier:
        with pytest.raises(RuntimeError, match="no copy today"):
            copier.copy(device, slots, host, as_slots(range(256)))
        monkeypatch.undo()
        copier.copy(device, slots, host, as_slots(range(256)))
    assert torch.equal(host.payload, device.payload[torch.from_numpy(slots)])


def test_a_pool_whose_shape_does_not_fit_its_component_is_refused() -> None:
    spec = ComponentSpec("full", num_layers=2, bytes_per_token=16)
    page_first_by_mistake = torch.zeros((8, 2, 8), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="full in DEVICE: want uint8 with 2 layers of 8 bytes"):
        Layout((spec,), 1, device={"full": page_first_by_mistake}, host=None)


def test_a_pool_that_starts_between_two_words_is_refused() -> None:
    spec = ComponentSpec("full", num_layers=2, bytes_per_token=16)
    shifted = torch.zeros(65, dtype=torch.uint8)[1:].view(2, 4, 8)
    with pytest.raises(ProtocolError, match="multiple of 8"):
        Layout((spec,), 1, device={"full": shifted}, host=None)


@pytest.mark.parametrize("host", [None, {}, {"full": torch.zeros((0, 2, 8), dtype=torch.uint8)}])
def test_a_component_without_host_slots_has_no_view_there(host: dict[str, torch.Tensor] | None) -> None:
    spec = ComponentSpec("full", num_layers=2, bytes_per_token=16)
    layout = Layout((spec,), 1, device={"full": torch.zeros((2, 4, 8), dtype=torch.uint8)}, host=host)
    with pytest.raises(ProtocolError, match="no pool in HOST"):
        layout.view("full", Tier.HOST)
