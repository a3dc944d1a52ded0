"""Serve requests with a model of transformers on a HiCache.

::

    with TransformersEngine(model, "hicache.yaml") as engine:
        answer = engine.generate(prompt_ids, max_new_tokens=64, session="chat-17")
        print(answer.tokens, answer.reused)

One request: match, load, import the boundary into a ``DynamicCache``, prefill the rest in chunks that pause where the
lease asks for a checkpoint, decode, release. A layer of the boundary is imported when the model comes to it, so that the
load of later layers goes on meanwhile. What HiCache cannot give, the model computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.cache import HiCache
from hicache.closing import Closing
from hicache.config import HiCacheConfig, load_config
from hicache.config.sizing import chunk_pages
from hicache.engines.transformers_geometry import CacheGeometry, read_geometry
from hicache.engines.transformers_identity import layout_digest, weights_digest
from hicache.engines.transformers_library import RecordingCache, forward, load_library, make_cache
from hicache.engines.transformers_payload import CachePayload, LoadLostError
from hicache.errors import CapacityError, ConfigError
from hicache.lease import Lease
from hicache.types import DEFAULT_NAMESPACE, Namespace, TierTokens

logger = logging.getLogger(__name__)

DEFAULT_CHUNK_TOKENS = 512

_POSITION_TABLES = ("embed_positions", "position_embeddings", "wpe")

Choose = Callable[[torch.Tensor], int]
"""From logits ``[vocabulary]`` to the next token."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got.

    Args:
        tokens: the new tokens, a stop token included.
        stop: ``stop_token`` or ``length``.
        reused: prompt tokens that were not computed.
        source: where they came from; ``by_component``: the same per component.
        kept: tokens of prompt and answer whose payload is in the cache now; less than there are pages where the
            device pool had no room.
    """

    tokens: tuple[int, ...]
    stop: str
    reused: int
    source: TierTokens
    by_component: Mapping[str, TierTokens] = field(default_factory=dict)
    kept: int = 0


class TransformersEngine(Closing):
    """A model and its cache.

    Args:
        model: a causal language model of transformers whose cache is a ``DynamicCache``, in eval mode, on one device.
        config: a HiCache configuration: a YAML file, a preset or a mapping. It gives tiers, policies and
            ``model.page_size``; name, weights, dtype and components of ``model`` are filled in from the model.
        name: of the model, in the store; default: the last part of its path, else its type.
        weights: digest or revision of the weights, in the store; default: a hash over all of them, which reads them
            once (0.2 s per GiB on two cores).
        chunk_tokens: prefill at most this many tokens at once; fewer where L1 is small (``chunk_pages``).
        overrides: settings on top of ``config``, by dotted path.
        open_cache: makes the cache of a configuration; default ``HiCache``.

    Raises:
        EngineUnavailableError: transformers is missing or too old.
        ConfigError: the model cannot be attached, or the configuration does not fit it.

    *Thread*: one request at a time; the model decides whether more is possible.
    """

    def __init__(
        self,
        model: Any,  # of transformers
        config: str | Path | Mapping[str, object],
        *,
        name: str | None = None,
        weights: str | None = None,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        overrides: Mapping[str, object] | None = None,
        open_cache: Callable[[HiCacheConfig], HiCache] = HiCache,
    ) -> None:
        self.library = load_library()
        self.model = model
        self.geometry = read_geometry(model, self.library)
        if chunk_tokens < 1:
            raise ConfigError([f"chunk_tokens: is {chunk_tokens}; expected at least 1"])
        filled = _model_section(model, self.geometry, self.library, name, weights)
        settings = load_config(config, overrides={**(overrides or {}), **filled})
        _check_device(settings, model.device)
        self.cache = open_cache(settings)
        self.chunk_tokens = chunk_pages(settings, chunk_tokens) * self.cache.page_size
        self._max_tokens = _num_learned_positions(model)
        self.payload = CachePayload(self.geometry, self.cache.device, self.cache.page_size)

    def generate(
        self,
        prompt: Sequence[int] | NDArray[np.integer] | torch.Tensor,
        *,
        max_new_tokens: int,
        session: str | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
        stop_tokens: Collection[int] | None = None,
        choose: Choose | None = None,
    ) -> Answer:
        """Run one request.

        Args:
            prompt: token ids, [num_tokens], at least one.
            max_new_tokens: at least 1.
            session: the conversation it belongs to.
            namespace: what else tells payload of equal tokens apart: a salt, a LoRA adapter that is switched on.
            stop_tokens: end the answer; default: the model's ``generation_config.eos_token_id``.
            choose: picks each next token; default: the likeliest.

        Raises:
            ValueError: a bad prompt or count, or more tokens than the model has learned positions for.
            ProtocolError: the engine is closed.
        """
        ids = _token_ids(prompt)
        if not len(ids) or max_new_tokens < 1:
            raise ValueError(
                f"got {len(ids)} prompt tokens and max_new_tokens={max_new_tokens}; expected at least 1 of each"
            )
        num_computed = len(ids) + max_new_tokens - 1  # the last token is never fed back
        if self._max_tokens is not None and num_computed > self._max_tokens:
            raise ValueError(
                f"{len(ids)} prompt tokens and max_new_tokens={max_new_tokens} need {num_computed} positions, and the "
                f"model has learned {self._max_tokens}; shorten the prompt or the answer"
            )
        stops = _stop_tokens(self.model) if stop_tokens is None else frozenset(stop_tokens)
        pick = choose or _likeliest
        with torch.inference_mode(), self.cache.match(ids, session=session, namespace=namespace) as lease:
            run = _Run(self, lease, ids)
            logits = run.prefill()
            answer: list[int] = []
            while True:
                answer.append(int(pick(logits)))
                if answer[-1] in stops or len(answer) == max_new_tokens:
                    break
                logits = run.decode(answer[-1])
            stop = "stop_token" if answer[-1] in stops else "length"
            run.release(stop)
            return Answer(tuple(answer), stop, run.reused, lease.source, dict(lease.by_component), run.kept)

    def close(self) -> None:
        """Close the cache. Idempotent; the model stays."""
        self.cache.close()


class _Run:
    """One request under way.

    ::

        0        reused            kept          position         reserved
        | restored | written, page ends | recorded | not computed yet |

    Wherever there is a state, the lease's private slot holds the one after exactly ``kept`` tokens, so that a release
    at ``kept`` is right at any moment.
    """

    def __init__(self, engine: TransformersEngine, lease: Lease, prompt: NDArray[np.int64]) -> None:
        self._engine = engine
        self._lease = lease
        self._prompt = prompt
        self._tokens = list(map(int, prompt))
        self._page = engine.cache.page_size
        self._begin(lease.load_by_layer())

    def _begin(self, reused: int) -> None:
        """Stand at a boundary."""
        engine = self._engine
        self._cache: RecordingCache = make_cache(engine.library, engine.model.config)
        engine.payload.restore(self._cache, self._lease, reused)
        self.reused = self._position = self.kept = self._published = self._reserved = reused

    def prefill(self) -> torch.Tensor:
        """Compute the prompt from the boundary on; logits of its last token."""
        try:
            return self._prefill()
        except LoadLostError as error:
            logger.debug("request of %d tokens is computed anew: %s", len(self._prompt), error)
            self._begin(self._lease.reused)
            return self._prefill()

    def _prefill(self) -> torch.Tensor:
        length = len(self._prompt)
        marks = {*self._lease.checkpoints, length}
        chunks = range(self.reused + self._engine.chunk_tokens, length, self._engine.chunk_tokens)
        logits = torch.empty(0)
        for pause in sorted({*marks, *chunks}):
            while self._position < pause:
                end = self._reserve(pause)
                logits = self._forward(self._tokens[self._position : end])
                self._keep()
                if self.kept > self._published:
                    self._lease.checkpoint(self.kept, mark=end in marks)
                    self._published = self.kept
        return logits

    def decode(self, token: int) -> torch.Tensor:
        """Compute one more token; logits after it."""
        self._tokens.append(token)
        self._reserve(self._position + 1)
        logits = self._forward([token])
        self._keep()
        return logits

    def release(self, stop: str) -> None:
        """Publish what was kept. The last token of the answer was never computed."""
        self._lease.release(self._tokens, written=self.kept, stop=stop)

    def _forward(self, tokens: list[int]) -> torch.Tensor:
        batch = torch.tensor([tokens], dtype=torch.long, device=self._engine.model.device)
        logits = forward(self._engine.model, batch, self._cache)
        self._position += len(tokens)
        return logits

    def _reserve(self, end: int) -> int:
        """Device slots up to ``end``, or half as far, and so on; how far to compute now.

        Without room for a page the request goes on and keeps nothing more.
        """
        if end <= self._reserved or not self._cache.is_recording:
            return end
        num_pages = -(-(end - self._reserved) // self._page)
        while True:
            try:
                self._lease.reserve(num_pages * self._page)
            except CapacityError as error:
                num_pages //= 2
                if not num_pages:
                    logger.debug("request of %d tokens keeps %d: %s", len(self._tokens), self.kept, error)
                    self._cache.is_recording = False
                    self._cache.recorded.clear()
                    return end
            else:
                self._reserved += num_pages * self._page
                return min(end, self._reserved)

    def _keep(self) -> None:
        """Write whole pages that were computed, and the state after them."""
        end = self._position // self._page * self._page
        if not self._cache.is_recording or end <= self.kept:
            return
        # A prefill pauses at the last page end, and decoding meets each: the states are those of `end`.
        assert end == self._position or not self._engine.geometry.states
        self._engine.payload.write_pages(self._cache, self._lease, self.kept, end)
        self._engine.payload.write_states(self._cache, self._lease)
        self.kept = end


def _model_section(
    model: Any, geometry: CacheGeometry, library: ModuleType, name: str | None, weights: str | None
) -> dict[str, object]:
    """What the configuration says of the model, read from the model."""
    called = PurePath(str(getattr(model, "name_or_path", "") or "")).name
    digest = weights_digest(model) if weights is None else weights
    return {
        "model.name": name or called or model.config.model_type,
        "model.weights": f"{digest}.{layout_digest(geometry, library)}",
        "model.dtype": geometry.dtype,
        "model.components": None,  # a preset's own
        **{f"model.components.{key}": section for key, section in geometry.components().items()},
    }


def _check_device(settings: HiCacheConfig, device: torch.device) -> None:
    configured = settings.tiers.device
    wanted = device.index or 0
    if configured.kind != device.type or (device.type == "cuda" and configured.index != wanted):
        where = f"{configured.kind}:{configured.index}" if configured.kind == "cuda" else configured.kind
        raise ConfigError(
            [
                f"tiers.device: is {where}, but the model is on {device}; "
                f"set kind to {device.type}" + (f" and index to {wanted}" if device.type == "cuda" else "")
            ]
        )


def _token_ids(prompt: Sequence[int] | NDArray[np.integer] | torch.Tensor) -> NDArray[np.int64]:
    if isinstance(prompt, torch.Tensor):
        prompt = prompt.detach().cpu().numpy()
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"a prompt is one row of token ids, got {ids.dtype} {list(ids.shape)}; "
            "pass tokenizer.encode(text), and one prompt a call"
        )
    return ids.astype(np.int64)


def _num_learned_positions(model: Any) -> int | None:
    """Tokens of the longest request, where positions are looked up in a table; None where they are computed."""
    looked_up = any(
        isinstance(module, torch.nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES
        for name, module in model.named_modules()
    )
    limit = getattr(model.config, "max_position_embeddings", None)
    return int(limit) if looked_up and limit else None


def _stop_tokens(model: Any) -> frozenset[int]:
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if known is None:
        return frozenset()
    return frozenset({known} if isinstance(known, int) else known)


def _likeliest(logits: torch.Tensor) -> int:
    return int(logits.argmax())
