"""The scheduler's part of the vLLM connector, with a stand-in for vLLM: what is found, saved, held and let go."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.engines.vllm_geometry import Component
from hicache.engines.vllm_index import GRACE_S, namespace_of
from hicache.lease import Lease
from hicache.testing.forked import ends_well_in_child
from hicache.testing.scripted_store import FLIPPED, MISS, SHORT, Raise, ScriptedStore
from hicache.testing.vllm_scheduler import FULL, MAMBA, PAGE, SWA, VllmScheduler, table
from hicache.types import NO_SLOT, Namespace


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[VllmScheduler] = []

    def make(*components: Component, **how: Any) -> VllmScheduler:
        made.append(VllmScheduler(*(components or (FULL,)), **how))
        return made[-1]

    yield make
    for engine in made:
        assert engine.cache.audit() == []
        engine.index.close()


PROMPT = list(range(1, 19))  # 4 pages and 2 tokens


def test_a_prompt_that_was_saved_is_found_up_to_its_last_whole_page(engines: Any) -> None:
    engine = engines()
    assert engine.serve("a", PROMPT) == 0
    assert engine.serve("b", [*PROMPT, 99]) == 16
    assert not engine.blocks.held
    assert not engine.index.has_work


def test_a_forked_child_closes_nothing_of_the_engine(engines: Any) -> None:
    """Its loop shares a selector with the parent's: closed there, the parent's would never wake again."""
    engine = engines()
    assert engine.serve("a", PROMPT) == 0
    assert ends_well_in_child(engine.index.close)
    assert engine.serve("b", [*PROMPT, 99]) == 16


def test_what_vllm_has_itself_is_not_loaded(engines: Any) -> None:
    engine = engines()
    engine.serve("a", PROMPT)
    request = engine.request("b", PROMPT)
    assert engine.look_up(request, num_local=8) == 8
    engine.index.allocated(request, table(18), 8)
    (job,) = engine.step(request, 0).loads
    assert job.parts[0].blocks.tolist() == [3, 4]
    engine.index.reported({}, (), ["b"], ())
    engine.index.finished(request, table(18), "finished_aborted")


def test_blocks_are_held_until_every_rank_has_reported(engines: Any) -> None:
    engine = engines(num_ranks=2)
    request = engine.request("a", PROMPT)
    assert engine.look_up(request) == 0
    engine.index.allocated(request, table(18), 0)
    engine.step(request, 18)
    engine.index.finished(request, table(18), "finished_stopped")
    (job,) = engine.jobs(request)
    assert sorted(engine.blocks.held) == [1, 2, 3, 4]
    engine.report({job.number: 1})
    assert engine.index.has_work
    assert sorted(engine.blocks.held) == [1, 2, 3, 4]
    engine.report({job.number: 1})
    assert not engine.index.has_work
    assert not engine.blocks.held
    assert engine.serve("b", PROMPT) == 16


def test_a_save_that_failed_is_never_found(engines: Any) -> None:
    engine = engines()
    request = engine.admit("a", PROMPT)
    engine.step(request, 18)
    (job,) = engine.jobs(request)
    engine.report({job.number: 1}, failed=[job.number])
    engine.index.finished(request, table(18), "finished_stopped")
    engine.save_all(request)
    assert not engine.blocks.held
    assert engine.serve("b", PROMPT) == 0


def test_an_answer_is_saved_when_it_is_over_but_not_its_last_token(engines: Any) -> None:
    engine = engines()
    request = engine.admit("a", PROMPT)
    engine.step(request, 18)
    request.all_token_ids += range(50, 56)  # 24 tokens, of which the last was sampled only
    request.num_tokens = 24
    request.num_computed_tokens = 24
    engine.index.finished(request, table(24), "finished_length_capped")
    engine.save_all(request)
    assert engine.serve("b", [*request.all_token_ids, 99]) == 20


def test_a_preempted_request_starts_anew_and_keeps_what_it_saved(engines: Any) -> None:
    engine = engines()
    request = engine.admit("a", PROMPT)
    engine.step(request, 8)
    (job,) = engine.jobs(request)
    request.num_computed_tokens = 0  # vLLM has freed its blocks; ours are held
    assert sorted(engine.blocks.held) == [1, 2]
    assert engine.look_up(request) == 0
    engine.report({job.number: 1})
    assert not engine.blocks.held
    engine.index.allocated(request, table(18, first=20), 0)
    engine.step(request, 18)
    engine.index.finished(request, table(18, first=20), "finished_stopped")
    engine.save_all(request)
    assert engine.serve("b", PROMPT) == 16


def test_a_load_that_failed_is_not_tried_again_for_that_request(engines: Any) -> None:
    engine = engines()
    engine.serve("a", PROMPT)
    request = engine.request("b", PROMPT)
    assert engine.look_up(request) == 16
    engine.index.allocated(request, table(18), 16)
    engine.step(request, 0)
    engine.index.reported({}, (), ["b"], ["b"])
    assert engine.look_up(request) == 0
    engine.index.finished(request, table(18), "finished_aborted")
    assert engine.serve("c", PROMPT) == 16


def ended_during_its_load(engines: Any) -> VllmScheduler:
    """An engine whose request ``b`` was aborted while what ``a`` left was loaded for it."""
    engine: VllmScheduler = engines()
    engine.serve("a", PROMPT)
    request = engine.admit("b", PROMPT)
    engine.step(request, 0)
    engine.index.finished(request, table(18), "finished_aborted")
    return engine


def test_a_load_that_fails_after_its_request_has_ended_is_not_remembered(engines: Any) -> None:
    engine = ended_during_its_load(engines)
    engine.index.reported({}, (), ["b"], ["b"])
    engine.rest()
    assert engine.serve("b", PROMPT) == 16  # another request, by the same name


def test_slots_that_a_load_reads_outlive_the_request(engines: Any) -> None:
    engine = ended_during_its_load(engines)
    engine.rest()
    assert engine.cache.stats().pools["full", "device"].protected == 4
    engine.index.reported({}, (), ["b"], ())
    engine.rest()
    assert engine.cache.stats().pools["full", "device"].protected == 0


def test_after_a_reset_nothing_from_before_is_found(engines: Any) -> None:
    engine = engines()
    engine.serve("a", PROMPT)
    engine.index.reset()
    assert engine.serve("b", PROMPT) == 0
    assert engine.serve("c", PROMPT) == 16


# ---- look-ups that last, or fail ---------------------------------------------------------------------------------------
def test_look_ups_of_one_step_wait_no_longer_together_than_one_may(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that a store holds up would else keep the scheduler for as long, a hundred of them a third of a second."""
    store = ScriptedStore()
    engine = engines(store=store)
    engine.serve("a", PROMPT)
    assert engine.cache.flush()
    engine.cache.reset()
    gate = store.block("exists")
    waited: list[float] = []
    result = Future.result

    def noted(future: Future[Any], timeout: float | None = None) -> Any:
        waited.append(timeout or 0.0)
        return result(future, timeout)

    requests = [engine.request(f"r{number}", PROMPT) for number in range(100)]
    with monkeypatch.context() as patched:
        patched.setattr(Future, "result", noted)
        assert [engine.index.matched(request, 0) for request in requests] == [None] * 100
    assert sum(waited) <= 2 * GRACE_S
    gate.release()
    assert [engine.look_up(request) for request in requests] == [16] * 100
    for request in requests:
        engine.index.finished(request, table(18), "finished_aborted")
    engine.rest()


def test_a_store_that_hangs_holds_up_only_requests_that_it_may_have_something_for(engines: Any) -> None:
    store = ScriptedStore()
    engine = engines(store=store)
    engine.serve("a", PROMPT)
    gate = store.block("exists")
    unknown = engine.request("b", [7, *PROMPT])
    assert engine.index.matched(unknown, 0) is None
    assert engine.serve("c", PROMPT) == 16
    gate.release()
    assert engine.look_up(unknown) == 0
    engine.index.finished(unknown, table(19), "finished_aborted")
    engine.rest()


@pytest.mark.parametrize(
    "fault", [MISS, SHORT, FLIPPED, Raise(OSError(5, "I/O"))], ids=["miss", "short", "flipped", "error"]
)
def test_a_store_that_fails_in_the_middle_shortens_the_hit(engines: Any, fault: Any) -> None:
    store = ScriptedStore()
    engine = engines(store=store)
    engine.serve("a", PROMPT)
    assert engine.cache.flush()
    engine.cache.reset()
    store.script("get", fault, key=store.keys_of("put")[2])
    request = engine.request("b", PROMPT)
    assert engine.look_up(request) in range(0, 16, PAGE)
    engine.index.finished(request, table(18), "finished_aborted")
    engine.rest()


def test_an_error_of_ours_in_a_look_up_is_a_miss(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that never comes would have its request wait for ever."""
    engine = engines()
    engine.serve("a", PROMPT)

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a policy of the user's own")

    with monkeypatch.context() as patched:
        patched.setattr(engine.cache, "amatch", fail)
        assert engine.serve("b", PROMPT) == 0
    assert engine.serve("c", PROMPT) == 16


def test_an_error_of_ours_in_a_save_gives_its_blocks_back(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a rule of the user's own")

    with monkeypatch.context() as patched:
        patched.setattr(Lease, "checkpoint", fail)
        engine.serve("a", PROMPT)
    assert not engine.blocks.held
    assert not engine.index.has_work
    assert engine.serve("b", PROMPT) == 0


# ---- what makes equal tokens unequal -----------------------------------------------------------------------------------
def test_an_adapter_that_was_trained_on_has_pages_of_its_own(tmp_path: Path) -> None:
    """Its name and path stay the same; servers that read it at different times share a store."""
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    weights = tmp_path / "adapter_model.safetensors"
    lora = SimpleNamespace(lora_name="x", lora_int_id=1, lora_path=str(tmp_path))
    reused = []
    with ExitStack() as servers:
        store = ScriptedStore()
        for content in (b"one", b"one", b"two"):
            weights.write_bytes(content)
            engine = VllmScheduler(FULL, store=store)
            servers.callback(engine.index.close)
            reused.append(engine.serve("a", PROMPT, lora_request=lora))
            assert engine.cache.flush()
    assert reused == [0, 16, 0]


def test_an_adapter_elsewhere_is_known_by_its_name_and_path(engines: Any) -> None:
    engine = engines()
    lora = SimpleNamespace(lora_name="x", lora_int_id=1, lora_path="somebody/adapter")
    assert [engine.serve(name, PROMPT, lora_request=lora) for name in "ab"] == [0, 16]


def test_equal_tokens_are_unequal_under_another_salt_adapter_picture_or_reset() -> None:
    request = VllmScheduler.request  # an unbound helper: it needs no engine
    lora = SimpleNamespace(lora_name="x", lora_path="/x")
    other = SimpleNamespace(lora_name="x", lora_path="/y")
    picture = SimpleNamespace(identifier="x")
    variants = [
        namespace_of(request(None, "r", [1], **values), epoch, adapter)  # type: ignore[arg-type]
        for values, epoch, adapter in (
            ({}, None, None),
            ({"cache_salt": ""}, None, None),
            ({"cache_salt": "x"}, None, None),
            ({"lora_request": lora}, None, "1"),
            ({"lora_request": lora}, None, "2"),
            ({"lora_request": other}, None, "1"),
            ({"mm_features": [picture]}, None, None),
            ({}, "x", None),
        )
    ]
    assert len(set(variants)) == len(variants)
    assert variants[0] == Namespace()


def test_embeddings_that_no_token_names_are_left_alone(engines: Any) -> None:
    engine = engines()
    request = engine.request("a", PROMPT, prompt_embeds=object())
    assert engine.look_up(request) == 0
    engine.step(request, 18)
    assert engine.jobs(request) == ()
    engine.index.finished(request, table(18), "finished_stopped")


def test_of_a_window_only_what_a_boundary_needs_is_copied(engines: Any) -> None:
    engine = engines(FULL, SWA)
    request = engine.admit("a", PROMPT)
    engine.step(request, 18)
    (job,) = engine.jobs(request)
    assert [part.blocks.tolist() for part in job.parts] == [[1, 2, 3, 4], [103, 104]]
    engine.report({job.number: 1})
    engine.index.finished(request, table(18), "finished_stopped")
    engine.save_all(request)
    again = engine.request("b", PROMPT)
    assert engine.look_up(again) == 16
    engine.index.allocated(again, ([1, 2, 3, 4], [0, 0, 103, 104]), 16)
    (load,) = engine.step(again, 0).loads
    assert [part.blocks.tolist() for part in load.parts] == [[1, 2, 3, 4], [103, 104]]
    assert all((part.slots >= 0).all() for part in load.parts)
    engine.index.reported({}, (), ["b"], ())
    engine.index.finished(again, table(18), "finished_aborted")


def test_a_prompt_of_whole_pages_can_be_asked_again(engines: Any) -> None:
    """One token is left to compute, so a boundary, with its window, is needed one page earlier."""
    engine = engines(FULL, SWA)
    assert engine.serve("a", PROMPT[:16]) == 0
    assert engine.serve("b", PROMPT[:16]) == 12


def test_a_window_that_vllm_has_let_go_of_is_not_saved(engines: Any) -> None:
    engine = engines(FULL, SWA)
    request = engine.admit("a", PROMPT)
    engine.step(request, 18, ([1, 2, 3, 4, 5], [0, 0, 0, 104, 105]))
    assert engine.jobs(request) == ()
    assert engine.index.counts["saves_too_late"] > 0
    engine.index.finished(request, ([1, 2, 3, 4, 5], [0, 0, 0, 104, 105]), "finished_stopped")
    engine.save_all(request)
    assert engine.serve("b", PROMPT) == 0


def test_states_are_saved_where_vllm_leaves_them_and_only_there(engines: Any) -> None:
    engine = engines(FULL, MAMBA)
    request = engine.admit("a", PROMPT)
    engine.step(request, 8, states=[(1, 77, 8)])
    (job,) = engine.jobs(request)
    assert [part.blocks.tolist() for part in job.parts] == [[1, 2], [77]]
    engine.report({job.number: 1})
    engine.step(request, 10)
    engine.index.finished(request, table(18), "finished_stopped")
    assert engine.jobs(request) == ()
    assert engine.serve("b", PROMPT) == 8


def test_a_state_is_never_given_for_another_length(engines: Any) -> None:
    engine = engines(FULL, MAMBA)
    request = engine.admit("a", PROMPT)
    engine.step(request, 16, states=[(1, 77, 16)])
    engine.save_all(request)
    engine.index.finished(request, table(18), "finished_stopped")
    again = engine.request("b", PROMPT)
    assert engine.look_up(again) == 16
    engine.index.allocated(again, table(18), 12)
    (load,) = engine.step(again, 0).loads
    assert load.parts[1].slots.tolist() == [NO_SLOT]  # the copy fails, and vLLM computes
    engine.index.reported({}, (), ["b"], ["b"])
    engine.index.finished(again, table(18), "finished_aborted")
