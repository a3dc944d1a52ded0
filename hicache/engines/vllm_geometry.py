"""What of vLLM's KV cache is kept, as components: from the groups of its ``KVCacheConfig``.

::

    group 0  full attention, 2 layers      ->  full    path
    group 1  sliding window 64, 2 layers   \
    group 2  sliding window 64, 2 layers   /  swa_63  window, one page holds a block of both groups
    group 3  GatedDeltaNet, 3 layers       ->  mamba   checkpoint, one state

Groups with the same rule become one component. A page is one block of each of its groups, the layers' bytes one after
another, once for each tensor-parallel rank. Groups overlay each other in vLLM's memory, so a block number means
something only together with its group.

Specs are told apart by the names of their classes, so that this module needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from hicache.errors import ConfigError
from hicache.types import MAX_PAGE_SIZE, ReuseRule

LAYOUT_VERSION = 1
"""Raise it when a page's bytes are laid out in another way."""
_PATHS = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec"})
_WINDOWS = frozenset({"SlidingWindowSpec", "ChunkedLocalAttentionSpec"})


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One layer's share of a page: ``num_bytes`` of its block, without padding."""

    layer: str
    num_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class GroupPart:
    """One group's share of a page: a block of group ``index``, layer after layer."""

    index: int
    layers: tuple[LayerPart, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.layers)


@dataclass(frozen=True, slots=True)
class Component:
    """Groups that are reused by the same rule."""

    name: str
    rule: ReuseRule
    window_tokens: int
    groups: tuple[GroupPart, ...]

    @property
    def rank_bytes(self) -> int:
        """Bytes of a page, or of a state, in one rank."""
        return sum(group.num_bytes for group in self.groups)


@dataclass(frozen=True, slots=True)
class Geometry:
    """All components, and the tokens of a page, which is a block of vLLM's."""

    page_size: int
    num_ranks: int
    components: tuple[Component, ...]

    @property
    def has_states(self) -> bool:
        return any(component.rule is ReuseRule.CHECKPOINT for component in self.components)

    def sections(self) -> dict[str, dict[str, object]]:
        """The components as ``model.components`` of a configuration has them."""
        return {component.name: self._section(component) for component in self.components}

    def digest(self, *more: object) -> str:
        """Hash of how bytes lie in a page, 8 hexadecimal letters; ``more`` is what else it hangs on."""
        described = repr((LAYOUT_VERSION, self, more))
        return blake3(described.encode()).hexdigest()[:8]

    def _section(self, component: Component) -> dict[str, object]:
        section: dict[str, object] = {"rule": component.rule.value}
        num_bytes = component.rank_bytes * self.num_ranks
        if component.rule is ReuseRule.CHECKPOINT:
            return {**section, "state_bytes": num_bytes}
        if component.rule is ReuseRule.WINDOW:
            section["window"] = component.window_tokens
        return {**section, "bytes_per_token": -(-num_bytes // self.page_size)}


def read_geometry(kv_cache_config: Any, num_ranks: int) -> Geometry:  # Any: vLLM's KVCacheConfig
    """The components of a model.

    Raises:
        ConfigError: a group keeps something that cannot be restored exactly; names group and layers.
    """
    problems: list[str] = []
    parts: dict[tuple[ReuseRule, int], list[GroupPart]] = {}
    block_sizes: set[int] = set()
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if not group.enable_kv_transfer:
            continue
        specs = list(_layer_specs(group))
        try:
            rules = {_rule(spec) for _, spec in specs}
            if len(rules) != 1:
                raise _UnsupportedError(f"its layers are reused in different ways: {sorted(rules)}")
            if group.is_eagle_group:
                raise _UnsupportedError("it belongs to a draft model; start without speculative decoding")
            layers = tuple(LayerPart(name, _num_bytes(spec), _dtype(spec)) for name, spec in specs)
        except _UnsupportedError as error:
            names = ", ".join(name for name, _ in specs[:3])
            problems.append(f"KV cache group {index} ({names}, …) cannot be kept: {error}")
            continue
        parts.setdefault(rules.pop(), []).append(GroupPart(index, layers))
        block_sizes |= {int(spec.block_size) for _, spec in specs}
    if not parts and not problems:
        problems.append("the model has no KV cache that could be kept")
    if len(block_sizes) > 1:
        problems.append(f"groups have blocks of {sorted(block_sizes)} tokens; expected one size for all")
    if block_sizes and max(block_sizes) > MAX_PAGE_SIZE:
        problems.append(f"blocks have {max(block_sizes)} tokens; expected at most {MAX_PAGE_SIZE}")
    if problems:
        raise ConfigError(problems, source="model")
    components = tuple(
        Component(_name(rule, window, parts), rule, window, tuple(groups))
        for (rule, window), groups in sorted(parts.items())
    )
    return Geometry(block_sizes.pop(), num_ranks, components)


class _UnsupportedError(Exception):
    """Why a group cannot be kept."""


def _layer_specs(group: Any) -> Iterator[tuple[str, Any]]:
    per_layer: Mapping[str, Any] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    for name in group.layer_names:
        yield name, per_layer.get(name, group.kv_cache_spec)


def _rule(spec: Any) -> tuple[ReuseRule, int]:
    """How a layer's payload is reused, and the tokens of its window, else 0."""
    kind = type(spec).__name__
    if kind in _PATHS:
        return ReuseRule.PATH, 0
    if kind == "SlidingWindowSpec":
        # The next token sees itself and the window - 1 before it.
        return ReuseRule.WINDOW, max(1, spec.sliding_window - 1 + spec.extra_retained_tokens)
    if kind == "ChunkedLocalAttentionSpec":
        return ReuseRule.WINDOW, spec.attention_chunk_size
    if kind == "MambaSpec":
        if spec.mamba_cache_mode != "align":
            raise _UnsupportedError(
                f"states are kept in mode {spec.mamba_cache_mode!r}; start with --enable-prefix-caching and"
                " --mamba-cache-mode align"
            )
        return ReuseRule.CHECKPOINT, 0
    known = ", ".join(sorted(_PATHS | _WINDOWS | {"MambaSpec"}))
    raise _UnsupportedError(f"{kind} is not one of {known}")


def _num_bytes(spec: Any) -> int:
    if type(spec).__name__ == "MambaSpec":
        return int(spec.state_content_size_bytes)
    return int(spec.unpadded_page_size_bytes)


def _dtype(spec: Any) -> str:
    return str(getattr(spec, "dtype", None) or getattr(spec, "dtypes", ""))


def _name(rule: ReuseRule, window: int, rules: Sequence[tuple[ReuseRule, int]] | Mapping[Any, Any]) -> str:
    if rule is ReuseRule.PATH:
        return "full"
    if rule is ReuseRule.CHECKPOINT:
        return "mamba"
    num_windows = sum(other is ReuseRule.WINDOW for other, _ in rules)
    return "swa" if num_windows == 1 else f"swa_{window}"
