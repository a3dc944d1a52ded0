"""The one place that knows the releases of transformers: what is called how, and which are too old."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, cast

import torch

from hicache.errors import EngineUnavailableError

OLDEST = (5, 24)
_INSTALL = f"pip install 'transformers>={OLDEST[0]}.{OLDEST[1]}'"


def load_library() -> ModuleType:
    """``transformers``, with its cache classes.

    Raises:
        EngineUnavailableError: it is missing or too old; says which version is wanted.
    """
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise EngineUnavailableError(f"transformers cannot be imported ({error}); {_INSTALL}") from error
    version = str(library.__version__)
    if release(version) < OLDEST:
        raise EngineUnavailableError(f"transformers {version} is too old for this adapter; {_INSTALL}")
    import_module("transformers.cache_utils")
    return library


def release(version: str) -> tuple[int, ...]:
    """Major and minor number: ``5.24.0.dev0`` is (5, 24)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


class RecordingCache(Protocol):
    """A ``DynamicCache`` that also keeps what each forward pass adds.

    A sliding layer forgets what lies before its window while a chunk is computed, but a page is shared as a whole.
    """

    layers: list[Any]
    recorded: dict[int, list[tuple[torch.Tensor, torch.Tensor]]]
    """Per layer, keys and values ``[1, heads, num_tokens, head size]`` in the order of the tokens."""
    is_recording: bool
    pending: dict[int, Callable[[], None]]
    """Per layer, what fills in the keys and values that the cache began with, just before they are read."""


def make_cache(library: ModuleType, config: Any) -> RecordingCache:
    """An empty cache for a model's config. Raises ``KeyError`` for a layer type that transformers lacks."""
    made = _recording_class(library)(config)
    return cast("RecordingCache", made)


@functools.cache
def _recording_class(library: ModuleType) -> Any:  # Any: a class that exists once transformers is there
    class Recording(library.DynamicCache):  # type: ignore[misc, name-defined]  # its base is known at run time only
        def __init__(self, config: Any) -> None:
            super().__init__(config=config)
            self.recorded: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            self.is_recording = True
            self.pending: dict[int, Callable[[], None]] = {}

        def update(
            self,
            key_states: torch.Tensor,
            value_states: torch.Tensor,
            layer_idx: int,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            fill = self.pending.pop(layer_idx, None)
            if fill is not None:
                fill()
            if self.is_recording:
                self.recorded.setdefault(layer_idx, []).append((key_states, value_states))
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    return Recording


def forward(model: Any, tokens: torch.Tensor, cache: RecordingCache) -> torch.Tensor:
    """Run the model over more tokens of one request.

    Args:
        tokens: int64 [1, num_tokens], on the model's device.
        cache: the tokens before; gets these, too.

    Returns:
        Logits of the last token, ``[vocabulary]``.
    """
    model_class: Any = type(model)
    cache_argument, keeps_last = _arguments(model_class)
    arguments: dict[str, Any] = {cache_argument: cache, "use_cache": True}
    if keeps_last:
        arguments["logits_to_keep"] = 1
    logits: torch.Tensor = model(input_ids=tokens, **arguments).logits
    return logits[0, -1]


@functools.cache
def _arguments(model_class: Any) -> tuple[str, bool]:
    """What the forward pass calls the cache, and whether it can leave out logits that nobody reads."""
    names = inspect.signature(model_class.forward).parameters
    return "cache" if "cache" in names else "past_key_values", "logits_to_keep" in names
