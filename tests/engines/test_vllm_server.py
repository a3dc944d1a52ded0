"""Real vLLM over HTTP, in its default layout of processes: what is restored, and that answers stay the same.

vLLM's own prefix cache is emptied before each turn, so every cached token is ours. The server without HiCache keeps its.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.kvevents.subscriber import EventSubscriber
from hicache.testing.doc_blocks import Block, blocks_that_need
from hicache.testing.redis_server import RedisServer, free_port, wait_until
from hicache.testing.tiny_models import VOCABULARY
from hicache.testing.vllm_server import (
    BLOCK,
    PYTHON,
    ROOT,
    SERVED_MODELS,
    Completion,
    ServedModel,
    VllmServer,
    why_not,
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("vllm"),  # two servers at once are enough for a machine
]

MEMORY = {"host": {"capacity": "64MiB"}}
POLICY = {"write": "write_through", "prefetch": {"min_tokens": 0}}
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7}
"""A tiny Gemma's likeliest token is its last one, whatever came before; a drawn one tells contexts apart. (vLLM on the
CPU fails on a seed where a prompt is computed in several chunks.)
"""


@pytest.fixture(scope="module", autouse=True)
def can_run() -> None:
    problem = why_not()
    if problem is not None:
        pytest.skip(problem)


BLOCKS = blocks_that_need("vllm")


def printed_command(block: Block) -> list[str]:
    (command,) = (words for words in block.commands() if words[0] == "vllm")
    return command


def words(count: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(1, VOCABULARY) for _ in range(count)]


def test_the_short_name_is_known_once_the_plugin_has_run() -> None:
    """vLLM runs plugins in each of its processes, and more than once in some."""
    code = (
        "from hicache.engines.vllm_library import register\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "register(), register()\n"
        "print(KVConnectorFactory.get_connector_class_by_name('HiCacheConnector').__module__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([PYTHON, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == "hicache.engines.vllm"


class Pair:
    """A server without HiCache and one with it, on a disk that outlives it."""

    def __init__(self, model: ServedModel, folder: Path, servers: ExitStack) -> None:
        self.model = model
        self._folder = folder
        self._servers = servers
        self._path = model.save(folder)
        self.plain = servers.enter_context(VllmServer(self._path, folder, arguments=model.arguments))
        self.ours = self.start()
        self.plain.wait()
        self.ours.wait()

    @property
    def sampling(self) -> dict[str, Any]:
        return DRAWN if self.model.name == "Gemma3" else GREEDY

    def start(self, **settings: object) -> VllmServer:
        disk = {"kind": "disk", "path": str(self._folder / "disk"), "capacity": "1GiB"}
        tiers = {**MEMORY, "stores": [disk]}
        hicache = {"tiers": tiers, "policy": POLICY, **settings}
        server = VllmServer(self._path, self._folder, hicache=hicache, arguments=self.model.arguments)
        return self._servers.enter_context(server)

    def restart(self) -> None:
        self.ours.close()
        self.ours = self.start().wait()

    def agree(self, one: Completion, other: Completion) -> bool:
        """The same answer; in bfloat16 its beginning, whose rounding differs from server to server also where nothing was restored."""
        length = None if self.model.dtype is torch.float32 else 8
        return one.tokens[:length] == other.tokens[:length]

    def boundary(self, computed: int, prompt: int) -> int:
        """Whole blocks of what was computed, of which at least one token of the prompt is left."""
        return min(computed, prompt - 1) // self.model.block * self.model.block


@pytest.fixture(scope="module", params=SERVED_MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as servers:
        yield Pair(SERVED_MODELS[request.param], tmp_path_factory.mktemp("vllm"), servers)


def test_every_turn_reuses_all_whole_blocks_and_gets_the_same_answer(pair: Pair) -> None:
    turn = 2 * pair.model.block + 17
    prompt, computed = words(turn, 1), 0
    got = Completion((), 0)
    for number in range(3):
        pair.ours.forget()
        wanted = pair.plain.complete(prompt, **pair.sampling)
        got = pair.ours.complete(prompt, **pair.sampling)
        assert pair.agree(got, wanted), f"turn {number}"
        assert got.cached == pair.boundary(computed, len(prompt)), f"turn {number}"
        computed = len(prompt) + len(got.tokens) - 1  # the last token was sampled, never computed
        if pair.model.block > 32:  # a state is left where a block ends, and only there
            computed = computed // pair.model.block * pair.model.block
        prompt = [*prompt, *got.tokens, *words(turn, 2 + number)]
    assert len(set(got.tokens)) > 4  # what says nothing of its context would prove nothing


def test_after_a_restart_hits_come_from_the_disk(pair: Pair) -> None:
    prompt = words(3 * pair.model.block + 9, 30)
    first = pair.ours.complete(prompt, **pair.sampling)
    assert first.cached == 0
    pair.restart()
    again = pair.ours.complete(prompt, **pair.sampling)
    assert again.cached == 3 * pair.model.block
    assert pair.agree(again, first)
    assert pair.agree(again, pair.plain.complete(prompt, **pair.sampling))
    hits = pair.ours.metrics()
    assert hits["vllm:external_prefix_cache_hits_total"] == again.cached


class Sharing:
    """Two servers of one model, each with memory of its own, and one Redis behind both.

    One is started by the command that README.md shows, the other by that of the guide.
    """

    def __init__(self, model: ServedModel, folder: Path, servers: ExitStack) -> None:
        self.redis = servers.enter_context(RedisServer(folder / "redis"))
        path = model.save(folder)
        # No limit of time decides anything here: on a busy machine a call may take seconds, and a Redis that is
        # gone refuses at once.
        store = {"kind": "redis", "url": self.redis.url, "timeout": "20s", "breaker": {"enabled": False}}
        patient = {
            "store_timeout": "60s",
            "wait_limit": "120s",
            "prefetch": {"min_tokens": 0, "mode": "wait_complete"},
        }
        hicache = {
            "tiers": {**MEMORY, "stores": [store]},
            "policy": {**POLICY, **patient, "eviction": "session"},
        }
        # Room for little more than one request: several at once are preempted in turn.
        cramped = (*model.arguments, "--max-model-len", "512", "--num-gpu-blocks-override", "24")
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        told = {"enable_kv_cache_events": True, "endpoint": self.events, "replay_endpoint": self.replay}
        self.metrics_port = free_port()
        readme, guide = (printed_command(block) for block in BLOCKS)
        self.first = servers.enter_context(
            VllmServer(
                path,
                folder,
                hicache={**hicache, "metrics": {"port": self.metrics_port}},
                printed=readme,
                arguments=(*model.arguments, "--kv-events-config", json.dumps(told)),
            )
        )
        self.second = servers.enter_context(
            VllmServer(path, folder, hicache=hicache, printed=guide, arguments=cramped)
        )
        self.first.wait()
        self.second.wait()


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharing]:
    with ExitStack() as servers:
        yield Sharing(SERVED_MODELS["full"], tmp_path_factory.mktemp("shared"), servers)


@pytest.mark.redis
def test_what_one_server_computed_the_other_has_from_redis(sharing: Sharing) -> None:
    prompt = words(201, 40)
    computed = sharing.first.complete(prompt)
    assert computed.cached == 0
    sharing.first.forget()
    wait_until(lambda: len(sharing.redis.names()) >= 6, "the pages are in Redis")
    restored = sharing.second.complete(prompt)
    assert (restored.cached, restored.tokens) == (192, computed.tokens)


@pytest.mark.redis
def test_what_a_salt_has_in_redis_no_other_one_finds(sharing: Sharing) -> None:
    """Each server has memory of its own, so what the second one restores is Redis'."""
    prompt, before = words(201, 44), len(sharing.redis.names())
    sharing.first.complete(prompt, cache_salt="a")
    sharing.first.forget()
    # Seven pages; one of them may be the last of the test before, and parents are written before children.
    wait_until(lambda: len(sharing.redis.names()) >= before + 7, "the pages are in Redis")
    assert sharing.second.complete(prompt, cache_salt="b").cached == 0
    assert sharing.second.complete(prompt).cached == 0
    assert sharing.second.complete(prompt, cache_salt="a").cached == 192


@pytest.mark.redis
def test_another_salt_or_a_reset_in_between_finds_nothing(sharing: Sharing) -> None:
    prompt, server = words(201, 41), sharing.first
    assert server.complete(prompt, cache_salt="a").cached == 0
    server.forget()
    assert server.complete(prompt, cache_salt="b").cached == 0
    server.forget()
    assert server.complete(prompt, cache_salt="a", headers={"X-Session-ID": "conv-42"}).cached == 192
    server.reset_everything()
    assert server.complete(prompt, cache_salt="a").cached == 0


@pytest.mark.redis
def test_a_session_is_known_by_its_header(sharing: Sharing) -> None:
    def sessions() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{sharing.metrics_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return sum(
            float(value) for value in re.findall(r"^hicache_sessions\{.*\} ([0-9.e+]+)$", text, re.MULTILINE)
        )

    before, prompt = sessions(), words(65, 42)
    for name in ("chat-1", "chat-2", "chat-1"):
        answer = sharing.first.complete(prompt, headers={"X-Session-ID": name})
        prompt = [*prompt, *answer.tokens]
    assert sessions() - before == 2


@pytest.mark.redis
def test_vllm_publishes_where_pages_are(sharing: Sharing) -> None:
    """Of one prompt: in memory when it was saved, in the store when Redis has it, each page behind its parent."""
    prompt, server = words(4 * BLOCK + 1, 43), sharing.first
    server.complete(prompt)
    server.forget()
    wanted = [tuple(prompt[begin : begin + BLOCK]) for begin in range(0, 4 * BLOCK, BLOCK)]

    def chain(medium: str) -> list[tuple[int, ...]]:
        """The prompt's pages as a router puts them together: from its first page on, by parents."""
        with EventSubscriber(sharing.events, sharing.replay) as subscriber:
            batches = list(subscriber.catch_up())
        pages: dict[object, tuple[object, tuple[int, ...]]] = {}
        for tag, fields in (event for batch in batches for event in batch.events):
            if fields.get("medium") != medium:
                continue
            hashes, tokens, parent = (
                fields.get(name) for name in ("block_hashes", "token_ids", "parent_block_hash")
            )
            assert isinstance(hashes, list)
            for number, block in enumerate(hashes):
                if tag != "BlockStored":
                    del pages[block]
                    continue
                assert isinstance(tokens, list)
                pages[block] = parent, tuple(tokens[number * BLOCK : (number + 1) * BLOCK])
                parent = block
        found: list[tuple[int, ...]] = []
        at: object = None
        while True:
            onward = [block for block, (parent, tokens) in pages.items() if parent == at and tokens in wanted]
            if not onward:
                return found
            [at] = onward
            found.append(pages[at][1])

    def is_told() -> bool:
        server.complete(words(3, 44), max_tokens=1)  # events go out with a step
        return chain("STORAGE") == wanted

    wait_until(is_told, "the pages in Redis are told")
    assert chain("CPU") == wanted


@pytest.mark.redis
def test_requests_that_preempt_each_other_get_their_own_answers(sharing: Sharing) -> None:
    prompts = [words(330, 50 + number) for number in range(3)]
    wanted = [sharing.first.complete(prompt, max_tokens=150).tokens for prompt in prompts]
    with ThreadPoolExecutor(3) as clients:
        calls = [
            clients.submit(sharing.second.complete, prompt, max_tokens=150, cache_salt="p")
            for prompt in prompts
        ]
        got = [call.result().tokens for call in calls]
    assert got == wanted
    assert sharing.second.metrics()["vllm:num_preemptions_total"] > 0


@pytest.mark.redis
def test_metrics_count_what_was_loaded_and_saved(sharing: Sharing) -> None:
    prompt, server = words(129, 60), sharing.first
    server.complete(prompt)
    server.forget()
    before = server.metrics()
    assert server.complete(prompt).cached == 128
    after = server.metrics()
    page_bytes = 32 * 2 * 2 * 2 * 32 * 4  # tokens, layers, K and V, heads, head size, bytes
    grown = {name: after[name] - before[name] for name in after if "hicache" in name or "external" in name}
    assert grown["vllm:external_prefix_cache_hits_total"] == 128
    assert grown["vllm:hicache_external_tokens_total"] == 128
    assert grown["vllm:hicache_load_bytes_total"] == 4 * page_bytes


@pytest.mark.redis
def test_without_redis_nothing_is_found_and_nothing_fails(sharing: Sharing) -> None:
    """Last: it stops the Redis that the others need."""
    prompt = words(201, 70)
    first = sharing.first.complete(prompt)
    sharing.first.forget()
    sharing.redis.kill()
    missed = sharing.second.complete(prompt)
    assert (missed.cached, missed.tokens) == (0, first.tokens)
    sharing.second.forget()
    again = sharing.second.complete(prompt)
    assert (again.cached, again.tokens) == (192, first.tokens)  # its own memory still has it
