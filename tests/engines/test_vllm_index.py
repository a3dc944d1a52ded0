"""The scheduler's part of the vLLM connector, with a stand-in for vLLM: what is found, saved, held and let go."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cache import HiCache
from hicache.config import load_config
from hicache.engines.vllm_geometry import Component, Geometry, GroupPart, LayerPart
from hicache.engines.vllm_index import RequestIndex, Step, namespace_of
from hicache.engines.vllm_messages import CopyJob
from hicache.tiers.shared import SharedPool
from hicache.types import NO_SLOT, Namespace, ReuseRule

PAGE = 4
FULL = Component("full", ReuseRule.PATH, 0, (GroupPart(0, (LayerPart("a", 64, "f32"),)),))
SWA = Component("swa", ReuseRule.WINDOW, 7, (GroupPart(1, (LayerPart("b", 64, "f32"),)),))
MAMBA = Component("mamba", ReuseRule.CHECKPOINT, 0, (GroupPart(1, (LayerPart("m", 64, "f32"),)),))


class Blocks:
    """Counts who holds which block of vLLM's pool."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def hold(self, blocks: Sequence[int]) -> None:
        self.held.update(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        self.held.subtract(blocks)
        self.held += Counter()


class Engine:
    """As much of vLLM's scheduler as the index sees; a worker that does what the test says."""

    def __init__(self, *components: Component, num_ranks: int = 1) -> None:
        self.geometry = Geometry(PAGE, num_ranks, components)
        settings = {
            "model": {"name": "m", "page_size": PAGE, "components": self.geometry.sections()},
            "tiers": {"device": {"kind": "cpu", "capacity": "1MiB"}},
        }
        self.cache = HiCache(load_config(settings, environ={}), device_pool=SharedPool, background=False)
        self.blocks = Blocks()
        self.index = RequestIndex(self.cache, self.geometry)
        self.index.bind(self.blocks)
        self.begun: list[CopyJob] = []

    def request(self, name: str, tokens: Sequence[int], **values: Any) -> Any:
        fields = {
            "request_id": name,
            "all_token_ids": list(tokens),
            "num_tokens": len(tokens),
            "num_computed_tokens": 0,
            "cache_salt": None,
            "session_id": None,
            "lora_request": None,
            "mm_features": [],
            "prompt_embeds": None,
        }
        return SimpleNamespace(**{**fields, **values})

    def look_up(self, request: Any, num_local: int = 0) -> int:
        """Ask until there is an answer."""
        while (found := self.index.matched(request, num_local)) is None:
            self.index._holds[request.request_id].found.result(10)
        return found

    def step(
        self, request: Any, num_tokens: int, tables: Any = None, states: Sequence[tuple[int, int, int]] = ()
    ) -> Step:
        """Schedule ``num_tokens`` of a request; the jobs that are to begin."""
        begun = self.index.step(
            {request.request_id: num_tokens} if num_tokens else {},
            lambda _: tables if tables is not None else table(request.num_tokens),
            {request.request_id: states},
        )
        request.num_computed_tokens += num_tokens
        self.begun.extend(begun.saves)  # the cache's thread may have been as quick as that
        return begun

    def jobs(self, request: Any) -> tuple[CopyJob, ...]:
        """The saves that workers are to begin, once the cache's thread has reserved their slots."""
        for _ in self.ticks():
            self.step(request, 0)
            if self.begun or not self.index.has_work:
                break
        saves, self.begun = tuple(self.begun), []
        return saves

    def report(self, saves: Mapping[int, int], failed: Sequence[int] = ()) -> None:
        """Workers have ended saves; each that all of them have ended is published, or dropped."""
        pending = {
            number
            for number, count in saves.items()
            if self.index._saving[number].num_reports + count >= self.geometry.num_ranks
        }
        self.index.reported(saves, failed, (), ())
        for _ in self.ticks():
            self.index.reported({}, (), (), ())
            if not pending & self.index._saving.keys():
                break

    def save_all(self, request: Any) -> None:
        """Workers do whatever there is to do."""
        while jobs := self.jobs(request):
            self.report({job.number: self.geometry.num_ranks for job in jobs})
        self.rest()

    def rest(self) -> None:
        """Until every hold that is over has let go of its lease."""
        for _ in self.ticks():
            if len(self.index._tasks) <= len(self.index._holds.keys() | self.index._loading.keys()):
                break

    def ticks(self) -> Iterator[int]:
        """Rounds of the cache's thread; it comes to rest in far fewer than these."""
        for number in range(10_000):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.index._loop).result(10)
            yield number
        raise AssertionError("the cache's thread does not come to rest")

    def serve(self, name: str, tokens: Sequence[int], **values: Any) -> int:
        """One request from look-up to end, in one chunk; what it reused."""
        request = self.request(name, tokens, **values)
        reused = self.look_up(request)
        self.index.allocated(request, table(len(tokens)), reused)
        request.num_computed_tokens = reused
        loads = self.step(request, len(tokens) - reused).loads
        assert [job.request for job in loads] == ([name] if reused else [])
        self.index.reported({}, (), [name] if reused else (), ())
        self.index.finished(request, table(len(tokens)), "finished_stopped")
        self.save_all(request)
        return reused


def table(num_tokens: int, first: int = 1) -> tuple[list[int], list[int]]:
    """Blocks of both groups, none of them the same."""
    count = -(-num_tokens // PAGE)
    return list(range(first, first + count)), list(range(100 + first, 100 + first + count))


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Engine] = []

    def make(*components: Component, num_ranks: int = 1) -> Engine:
        made.append(Engine(*(components or (FULL,)), num_ranks=num_ranks))
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
    request = engine.request("a", PROMPT)
    engine.look_up(request)
    engine.index.allocated(request, table(18), 0)
    engine.step(request, 18)
    (job,) = engine.jobs(request)
    engine.report({job.number: 1}, failed=[job.number])
    engine.index.finished(request, table(18), "finished_stopped")
    engine.save_all(request)
    assert not engine.blocks.held
    assert engine.serve("b", PROMPT) == 0


def test_an_answer_is_saved_when_it_is_over_but_not_its_last_token(engines: Any) -> None:
    engine = engines()
    request = engine.request("a", PROMPT)
    engine.look_up(request)
    engine.index.allocated(request, table(18), 0)
    engine.step(request, 18)
    request.all_token_ids += range(50, 56)  # 24 tokens, of which the last was sampled only
    request.num_tokens = 24
    request.num_computed_tokens = 24
    engine.index.finished(request, table(24), "finished_length_capped")
    engine.save_all(request)
    assert engine.serve("b", [*request.all_token_ids, 99]) == 20


def test_a_preempted_request_starts_anew_and_keeps_what_it_saved(engines: Any) -> None:
    engine = engines()
    request = engine.request("a", PROMPT)
    engine.look_up(request)
    engine.index.allocated(request, table(18), 0)
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


def test_slots_that_a_load_reads_outlive_the_request(engines: Any) -> None:
    engine = engines()
    engine.serve("a", PROMPT)
    request = engine.request("b", PROMPT)
    engine.look_up(request)
    engine.index.allocated(request, table(18), 16)
    engine.step(request, 0)
    engine.index.finished(request, table(18), "finished_aborted")
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


def test_equal_tokens_are_unequal_under_another_salt_adapter_picture_or_reset() -> None:
    request = Engine.request  # an unbound helper: it needs no engine
    lora = SimpleNamespace(lora_name="x", lora_path="/x")
    other = SimpleNamespace(lora_name="x", lora_path="/y")
    picture = SimpleNamespace(identifier="x")
    variants = [
        namespace_of(request(None, "r", [1], **values), epoch)  # type: ignore[arg-type]
        for values, epoch in (
            ({}, None),
            ({"cache_salt": ""}, None),
            ({"cache_salt": "x"}, None),
            ({"lora_request": lora}, None),
            ({"lora_request": other}, None),
            ({"mm_features": [picture]}, None),
            ({}, "x"),
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
    request = engine.request("a", PROMPT)
    engine.look_up(request)
    engine.index.allocated(request, table(18), 0)
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
    request = engine.request("a", PROMPT)
    engine.look_up(request)
    engine.index.allocated(request, table(18), 0)
    engine.step(request, 18, ([1, 2, 3, 4, 5], [0, 0, 0, 104, 105]))
    assert engine.jobs(request) == ()
    assert engine.index.counts["saves_too_late"] > 0
    engine.index.finished(request, ([1, 2, 3, 4, 5], [0, 0, 0, 104, 105]), "finished_stopped")
    engine.save_all(request)
    assert engine.serve("b", PROMPT) == 0


def test_states_are_saved_where_vllm_leaves_them_and_only_there(engines: Any) -> None:
    engine = engines(FULL, MAMBA)
    request = engine.request("a", PROMPT)
    engine.look_up(request)
    engine.index.allocated(request, table(18), 0)
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
    request = engine.request("a", PROMPT)
    engine.look_up(request)
    engine.index.allocated(request, table(18), 0)
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
