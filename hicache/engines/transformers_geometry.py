"""What one model keeps in its ``DynamicCache``, as components of HiCache.

Kinds of layers come from the model's config; shapes and dtypes from a forward pass over a few tokens, so that no formula
of a model family has to be repeated here::

    layer type of transformers              component      rule
    full_attention                          full           path
    sliding_attention, chunked_attention    swa            window(w - 1): a token attends to itself and w - 1 before it
    linear_attention, conv                  mamba          checkpoint
    hybrid                                  full + mamba
    hybrid_sliding                          swa + mamba
    mlp, moe, keys of another layer         none

A layer's row in a slot (sizes padded to 8 bytes, and to the largest layer of the component)::

    page    | keys   [page_size, heads, head size] | values [page_size, heads, head size] |
    state   | conv 0 | recurrent 0 | conv 1 | ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from hicache.engines.transformers_library import RecordingCache, forward, make_cache
from hicache.errors import ConfigError
from hicache.types import ComponentSpec, ReuseRule

FULL, WINDOW, STATE = "full", "swa", "mamba"
PROBE_TOKENS = 4
_ALIGNMENT_BYTES = 8
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_OTHER_CACHES = ("static", "offloaded_static", "offloaded", "quantized", "paged")
_KNOWN_TYPES = "full_attention, sliding_attention, chunked_attention, linear_attention, conv, hybrid, hybrid_sliding, mlp, moe"


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Keys and values of one layer.

    Args:
        layer: its index in the ``DynamicCache``.
        component, row: the component, and which layer of it this is.
        key_shape, value_shape: heads and head size.
        key_dtype, value_dtype: of the tensors.
        window: of the attention, in tokens, the token itself included; None: unlimited.
    """

    layer: int
    component: str
    row: int
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    window: int | None

    @property
    def key_bytes(self) -> int:
        """Of one token."""
        return math.prod(self.key_shape) * self.key_dtype.itemsize

    @property
    def value_bytes(self) -> int:
        """Of one token."""
        return math.prod(self.value_shape) * self.value_dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state, ``[1, *shape]``, at ``offset`` bytes of the layer's row."""

    is_conv: bool
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StatePart:
    """The recurrent and conv states of one layer.

    Args:
        layer, component, row: see ``TokenPart``.
        tensors: in the order of their offsets.
        carried: indices of states that a layer marks as following an earlier one.
    """

    layer: int
    component: str
    row: int
    tensors: tuple[StateTensor, ...]
    carried: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        last = self.tensors[-1]
        return _aligned(last.offset + last.num_bytes)


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Everything that a boundary of this model consists of.

    Args:
        tokens, states: by ascending layer.
        specs: the components, sizes of one rank.
        device: where the model is.
    """

    tokens: tuple[TokenPart, ...]
    states: tuple[StatePart, ...]
    specs: tuple[ComponentSpec, ...]
    device: torch.device

    @property
    def dtype(self) -> str:
        """Label of the payload's dtype, ``float32``."""
        first = self.tokens[0].key_dtype if self.tokens else self.states[0].tensors[0].dtype
        return str(first).removeprefix("torch.")

    def components(self) -> dict[str, dict[str, object]]:
        """The section ``model.components`` of a configuration."""
        return {spec.name: _section(spec) for spec in self.specs}


def read_geometry(model: Any, library: ModuleType) -> CacheGeometry:  # Any: of transformers
    """Derive components from a model.

    Args:
        model: a causal language model of transformers, in eval mode.
        library: ``transformers``.

    Raises:
        ConfigError: the model keeps something that this adapter cannot restore exactly; says which layer and what.
    """
    config = model.config.get_text_config(decoder=True)
    _check_model(model, config)
    try:
        cache = make_cache(library, model.config)
    except KeyError as error:
        raise _refusal(
            f"a layer type {error} has no DynamicCache layer; known types: {_KNOWN_TYPES}"
        ) from error
    probe = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            forward(model, probe, cache)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise _refusal(f"a pass over {PROBE_TOKENS} tokens with a DynamicCache failed: {error}") from error
    kinds = _kinds(library)
    windows = {int(layer.sliding_window) for layer in cache.layers if hasattr(layer, "sliding_window")}
    tokens: list[TokenPart] = []
    states: list[StatePart] = []
    for number, layer in enumerate(cache.layers):
        if type(layer) not in kinds:
            raise _refusal(_unknown(number, layer, config))
        has_tokens, has_state = kinds[type(layer)]
        if has_tokens:
            tokens.append(_token_part(number, layer, cache, windows, tokens))
        if has_state:
            states.append(_state_part(number, layer, len(states)))
    if not tokens and not states:
        raise _refusal("no layer keeps anything in its DynamicCache")
    return CacheGeometry(tuple(tokens), tuple(states), tuple(_specs(tokens, states)), model.device)


def _kinds(library: ModuleType) -> Mapping[type, tuple[bool, bool]]:
    """Per exact class: does it keep tokens, does it keep a state? A subclass may keep more, so it is not known."""
    classes = library.cache_utils
    return {
        classes.DynamicLayer: (True, False),
        classes.DynamicSlidingWindowLayer: (True, False),
        classes.LinearAttentionLayer: (False, True),
        classes.LinearAttentionAndFullAttentionLayer: (True, True),
        classes.LinearAttentionAndSlidingWindowAttentionLayer: (True, True),
        classes.DummyLayer: (False, False),
    }


def _check_model(model: Any, config: Any) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refusal("it is an encoder-decoder; a decoder-only model is needed")
    if model.training:
        raise _refusal("it is in training mode, where dropout makes every pass another; call model.eval()")
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise _refusal(
            f"its weights are spread over {', '.join(devices)}; load it onto one device, without device_map='auto'"
        )
    asked = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if asked in _OTHER_CACHES:
        raise _refusal(
            f"its generation_config asks for a cache of kind {asked!r}, which HiCache would replace by its own tiers; "
            "set model.generation_config.cache_implementation = None"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for section in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if section.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            raise _refusal(
                f"its rope_type is {section['rope_type']}, under which a key depends on the length of the whole "
                "request, so that a prefix cannot be shared; set another rope_type"
            )


def _unknown(number: int, layer: Any, config: Any) -> str:
    types = getattr(config, "layer_types", None) or []
    named = f" (layer type {types[number]})" if number < len(types) else ""
    return f"layer {number}{named} keeps a {type(layer).__name__}; known layer types: {_KNOWN_TYPES}"


def _token_part(
    number: int, layer: Any, cache: RecordingCache, windows: set[int], before: Sequence[TokenPart]
) -> TokenPart:
    recorded = cache.recorded.get(number, [])
    if sum(int(keys.shape[-2]) for keys, _ in recorded) != PROBE_TOKENS or recorded[0][0].ndim != 4:
        raise _refusal(
            f"layer {number} did not put its keys into the DynamicCache that it was given; "
            "a model with a cache of its own cannot be attached"
        )
    keys, values = recorded[0]
    window = int(layer.sliding_window) if hasattr(layer, "sliding_window") else None
    component = FULL
    if window is not None:
        component = WINDOW if len(windows) == 1 else f"{WINDOW}_{window}"
        if window < 2:
            raise _refusal(f"layer {number} has a window of {window} token; expected at least 2")
    return TokenPart(
        number,
        component,
        sum(part.component == component for part in before),
        (int(keys.shape[1]), int(keys.shape[3])),
        (int(values.shape[1]), int(values.shape[3])),
        keys.dtype,
        values.dtype,
        window,
    )


def _state_part(number: int, layer: Any, row: int) -> StatePart:
    tensors: list[StateTensor] = []
    offset = 0
    for index in range(layer.number_of_states):
        for is_conv, tensor in ((True, layer.conv_states[index]), (False, layer.recurrent_states[index])):
            if tensor is not None:
                part = StateTensor(is_conv, index, tuple(tensor.shape[1:]), tensor.dtype, offset)
                tensors.append(part)
                offset = _aligned(offset + part.num_bytes)
    if not tensors:
        raise _refusal(
            f"layer {number} did not put its state into the DynamicCache that it was given; "
            "a model that keeps its state elsewhere cannot be attached"
        )
    carried = tuple(index for index, has in layer.has_previous_state.items() if has)
    return StatePart(number, STATE, row, tuple(tensors), carried)


def _specs(tokens: Sequence[TokenPart], states: Sequence[StatePart]) -> Iterator[ComponentSpec]:
    for name in dict.fromkeys(part.component for part in tokens):
        parts = [part for part in tokens if part.component == name]
        token_bytes = max(_aligned(part.key_bytes + part.value_bytes) for part in parts)
        window = parts[0].window
        yield ComponentSpec(
            name,
            ReuseRule.PATH if window is None else ReuseRule.WINDOW,
            window_tokens=0 if window is None else window - 1,
            num_layers=len(parts),
            bytes_per_token=token_bytes * len(parts),
        )
    if states:
        state_bytes = max(part.num_bytes for part in states)
        yield ComponentSpec(
            STATE, ReuseRule.CHECKPOINT, num_layers=len(states), state_bytes=state_bytes * len(states)
        )


def _section(spec: ComponentSpec) -> dict[str, object]:
    section: dict[str, object] = {"rule": str(spec.rule), "layers": spec.num_layers}
    if spec.is_checkpoint:
        return section | {"state_bytes": spec.state_bytes}
    if spec.window_tokens:
        section["window"] = spec.window_tokens
    return section | {"bytes_per_token": spec.bytes_per_token}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _refusal(why: str) -> ConfigError:
    return ConfigError([f"this model cannot be attached to HiCache: {why}"])
