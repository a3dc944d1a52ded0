"""A vLLM engine in this process, one step at a time, for a tiny model on the CPU: scheduler, model and connector are real.

It runs where vLLM can be imported (``make test-vllm``). ``hicache.testing.vllm_server`` is the same over HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hicache.closing import Closing
from hicache.engines.vllm_copies import BlockCopies
from hicache.engines.vllm_index import RequestIndex
from hicache.testing.vllm_server import BLOCK, ServedModel

HANGS_AFTER_S = 100.0
"""Real seconds: an engine that has not come to rest by then never will. Not steps: an idle one makes thousands while it waits."""
NUM_LOGPROBS = 5
POLICY: Mapping[str, object] = {"write": "write_through", "prefetch": {"min_tokens": 0}}
HOST: Mapping[str, object] = {"host": {"capacity": "64MiB"}}
MEMORY: Mapping[str, object] = {"tiers": HOST, "policy": POLICY}
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # it compiles the counting of log-probabilities, for half a minute
}


@dataclass(frozen=True, slots=True)
class Answered:
    """What one request got.

    Args:
        cached: prompt tokens that were not computed.
        logprobs: of each new token, the likeliest tokens' logarithms of their probabilities, descending.
        stop: why it ended: ``length``, ``abort``, ``error``.
    """

    tokens: tuple[int, ...]
    cached: int
    logprobs: tuple[tuple[float, ...], ...]
    stop: str


class VllmEngine(Closing):
    """``LLMEngine`` with the connector, in the layout of one process.

    Args:
        model: which, and how it is served.
        path: its checkpoint.
        hicache: configuration of the connector.
        policy: ``kv_load_failure_policy``.
        arguments: more of ``EngineArgs``.
    """

    def __init__(
        self,
        model: ServedModel,
        path: Path,
        hicache: Mapping[str, object],
        *,
        policy: str = "recompute",
        **arguments: Any,
    ) -> None:
        os.environ.update(_SETTINGS)
        vllm = import_module("vllm")
        self._sampling: Any = vllm.SamplingParams
        transfer = import_module("vllm.config").KVTransferConfig(
            kv_connector="HiCacheConnector",
            kv_connector_module_path="hicache.engines.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=dict(hicache),
        )
        fields = {
            "model": str(path),
            "dtype": str(model.dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 4096,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "kv_transfer_config": transfer,
        }
        made = import_module("vllm.engine.arg_utils").EngineArgs(**{**fields, **arguments})
        self.engine: Any = import_module("vllm.v1.engine.llm_engine").LLMEngine.from_engine_args(made)
        self._names = itertools.count()
        self._ended: dict[str, Any] = {}

    # ---- parts ---------------------------------------------------------------------------------
    @property
    def scheduler(self) -> Any:
        """VLLM's."""
        return self.engine.engine_core.engine_core.scheduler

    @property
    def index(self) -> RequestIndex:
        found: RequestIndex = self.scheduler.connector.index
        return found

    @property
    def copies(self) -> BlockCopies:
        """The worker's part."""
        group = import_module("vllm.distributed.kv_transfer").get_kv_transfer_group()
        found: BlockCopies = group.copies
        return found

    @property
    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    # ---- requests ------------------------------------------------------------------------------
    def add(
        self, prompt: Sequence[int], *, max_tokens: int = 8, salt: str | None = None, lora: Any = None
    ) -> str:
        """Begin a request; its name."""
        name = f"r{next(self._names)}"
        asked: dict[str, object] = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            asked["cache_salt"] = salt
        sampling = self._sampling(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=NUM_LOGPROBS,
        )
        self.engine.add_request(name, asked, sampling, lora_request=lora)
        return name

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self._ended[output.request_id] = output

    def step_until(self, is_so: Callable[[], bool]) -> None:
        """A step may do less than all that it could, since look-ups have only so much time in each."""
        until_s = time.monotonic() + HANGS_AFTER_S
        while not is_so():
            assert time.monotonic() < until_s, "the engine never comes there"
            self.step()

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])

    def answer(self, name: str) -> Answered:
        """Step until a request has ended."""
        self.step_until(lambda: name in self._ended)
        return _answered(self._ended.pop(name))

    def ask(self, prompt: Sequence[int], **asked: Any) -> Answered:
        return self.answer(self.add(prompt, **asked))

    def ask_at_once(self, prompts: Sequence[Sequence[int]], **asked: Any) -> list[Answered]:
        names = [self.add(prompt, **asked) for prompt in prompts]
        return [self.answer(name) for name in names]

    def cold(self, prompt: Sequence[int], **asked: Any) -> Answered:
        """The answer of a request for which nothing can be found, by vLLM neither."""
        answer = self.ask(prompt, salt=f"cold {next(self._names)}", **asked)
        assert answer.cached == 0
        return answer

    # ---- all of it -----------------------------------------------------------------------------
    def rest(self) -> None:
        """Step until there is nothing left to do, saves included."""
        self.step_until(lambda: not self.scheduler.has_requests())

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that every hit is the connector's."""
        self.rest()
        assert self.engine.reset_prefix_cache()

    @contextmanager
    def held(self, *, loads: bool) -> Iterator[None]:
        """Loads, or saves, that begin meanwhile wait until the block is left."""
        gate = threading.Event()
        self.copies._threads[loads].submit(gate.wait)  # noqa: SLF001  # jobs behind it wait, as behind a slow one
        try:
            yield
        finally:
            gate.set()

    def check(self) -> None:
        """At rest: no block is held, no slot is leased, and the tree's books are right."""
        self.rest()
        tasks, loop = self.index._tasks, self.index._loop  # noqa: SLF001  # leases end on a thread that nobody waits for
        until_s = time.monotonic() + HANGS_AFTER_S
        while tasks and time.monotonic() < until_s:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        cache = self.index.cache
        assert cache.drain()
        assert cache.audit() == []
        assert not self.index.has_work
        assert (
            self.num_free_blocks == self.scheduler.kv_cache_config.num_blocks - 1
        )  # one is never given away
        assert all(pool.protected == pool.lease_owned == 0 for pool in cache.stats().pools.values())

    def close(self) -> None:
        self.engine.engine_core.shutdown()


class EngineStand(Closing):
    """Has one engine at a time, for vLLM's state is the process's; who wants the same one again gets it, emptied.

    Args:
        folder: for checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: VllmEngine | None = None
        self._wanted: tuple[object, ...] = ()

    def engine(
        self, model: ServedModel, hicache: Mapping[str, object] = MEMORY, **arguments: Any
    ) -> VllmEngine:
        wanted = model.name, repr(hicache), repr(arguments)
        if self._made is not None and wanted == self._wanted:
            self._made.forget()
            return self._made
        self.close()
        path = self._folder / model.name
        if not path.exists():
            model.save(self._folder)
        self._made, self._wanted = VllmEngine(model, path, hicache, **arguments), wanted
        return self._made

    def close(self) -> None:
        """Stop the engine, as vLLM does once its core has nothing left to do. Idempotent."""
        if self._made is not None:
            self._made.rest()
            self._made.close()
            self._made = None


def distance(one: Answered, other: Answered, num_tokens: int = 4) -> float:
    """How far apart the logarithms of probabilities are, in the first tokens of two answers."""
    pairs = zip(one.logprobs[:num_tokens], other.logprobs[:num_tokens], strict=True)
    return max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def rounding(model: ServedModel) -> float:
    """What the order of additions may move; what is wrong moves more by orders of magnitude."""
    return 1e-4 if model.dtype is torch.float32 else 0.15


def agree(model: ServedModel, one: Answered, other: Answered) -> bool:
    """Whether two answers are the same; in bfloat16 as far as rounding does not choose another token."""
    length = None if model.dtype is torch.float32 else 4
    return one.tokens[:length] == other.tokens[:length] and distance(one, other) < rounding(model)


def _answered(output: Any) -> Answered:
    (only,) = output.outputs
    return Answered(
        tuple(only.token_ids),
        int(output.num_cached_tokens or 0),
        tuple(
            tuple(sorted((found.logprob for found in each.values()), reverse=True)[:NUM_LOGPROBS])
            for each in only.logprobs or ()
        ),
        str(only.finish_reason),
    )
