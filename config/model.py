"""What is cached: the model, its components, and this process's place among its ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from hicache.config.fields import (
    MAX_PORT,
    Bytes,
    Name,
    Problem,
    Seconds,
    Section,
    Text,
    is_port,
    nearest,
    one_of,
)
from hicache.config.units import describe
from hicache.types import MAX_PAGE_SIZE, ComponentSpec, ReuseRule

Backend = Literal["none", "gloo"]
RANK_BACKENDS = get_args(Backend)
RULES = tuple(rule.value for rule in ReuseRule)
_HOST_PORT = re.compile(r"(\[[^\]\s]+\]|[^\s:\[\]]+):(-?\d+)", re.ASCII)
_DOTTED_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


def _rule(value: str) -> str:
    if value in RULES or _DOTTED_CLASS.fullmatch(value):
        return value
    near = nearest(value, RULES)
    hint = f"did you mean {near}? " if near else ""
    raise ValueError(
        f"found {describe(value)}; {hint}a rule is one of {', '.join(RULES)},"
        " or the dotted path of a class of your own"
    )


class ComponentConfig(Section):
    """One kind of payload, per rank: the bytes that one process keeps for a token or a state."""

    rule: Annotated[str, AfterValidator(_rule)] = Field(
        description="what must be resident for reuse: path, window, checkpoint, or a dotted class"
    )
    window: int | None = Field(
        default=None, ge=1, description="tokens that a window rule needs, for example 1024"
    )
    layers: int = Field(default=1, ge=1, description="layers that carry this payload")
    bytes_per_token: Bytes | None = Field(
        default=None, description="payload of one token over all layers, for example 24KiB"
    )
    state_bytes: Bytes | None = Field(
        default=None,
        description="one state over all layers, for example 19MiB (checkpoint only); one that does not divide over"
        " its layers is padded by less than a byte a layer",
    )

    def problems(self) -> Iterator[Problem]:
        if self.rule == ReuseRule.CHECKPOINT:
            yield from self._needs("state_bytes", "the size of one state over all layers, like 19MiB")
            yield from self._contradicts("bytes_per_token", "its size is state_bytes, whatever the length")
            yield from self._contradicts("window", "only a window rule has one")
            return
        yield from self._needs("bytes_per_token", "payload of one token over all layers, like 24KiB")
        yield from self._contradicts("state_bytes", "only a checkpoint has one")
        if self.rule == ReuseRule.WINDOW:
            yield from self._needs("window", "how many trailing tokens are needed, like 1024")
        if self.rule == ReuseRule.PATH:
            yield from self._contradicts("window", "only a window rule has one")
        if self.bytes_per_token is not None and self.bytes_per_token % self.layers:
            yield Problem(
                ("bytes_per_token",),
                f"{self.bytes_per_token} bytes do not divide over {self.layers} layers;"
                f" expected a multiple of {self.layers}",
            )

    def spec(self, name: str) -> ComponentSpec:
        """The component as the other layers know it.

        A state is one blob to us, so one that does not divide over its layers (a rounded ``19MiB``
        over 36) is padded by less than a byte a layer; pools can then always be cut by layer.
        """
        state_bytes = self.state_bytes or 0
        return ComponentSpec(
            name=name,
            rule=ReuseRule(self.rule) if self.rule in RULES else self.rule,
            window_tokens=self.window or 0,
            num_layers=self.layers,
            bytes_per_token=self.bytes_per_token or 0,
            state_bytes=-(-state_bytes // self.layers) * self.layers,
        )

    def _needs(self, key: str, what: str) -> Iterator[Problem]:
        if getattr(self, key) is None:
            yield Problem((key,), f"missing, but rule {self.rule} needs it: {what}")

    def _contradicts(self, key: str, why: str) -> Iterator[Problem]:
        if getattr(self, key) is not None:
            yield Problem((key,), f"contradicts rule {self.rule} ({why}); remove it")


class ModelConfig(Section):
    """The model whose payload is cached."""

    name: Text = Field(description="which model; part of the identity in L3")
    weights: Text | None = Field(
        default=None, description="digest or revision of the weights, to tell fine-tunes apart"
    )
    dtype: Text = Field(default="uint8", description="label of the payload's dtype; part of the identity")
    page_size: int = Field(ge=1, le=MAX_PAGE_SIZE, description=f"tokens a page, 1 to {MAX_PAGE_SIZE}")
    max_tokens: int | None = Field(
        default=None, ge=1, description="tokens of the longest request, prompt and answer; for warnings"
    )
    components: dict[Name, ComponentConfig] = Field(
        description="the payloads: a mapping of name to {rule, layers, bytes_per_token, ...}"
    )

    def problems(self) -> Iterator[Problem]:
        if not self.components:
            yield Problem(("components",), "is empty; expected at least one component")
        folded: dict[str, str] = {}
        for name in self.components:
            first = folded.setdefault(name.lower().replace("-", "_"), name)
            if first != name:
                yield Problem(
                    ("components", name),
                    f"differs from {first} only in case or dashes; choose another name",
                )

    def specs(self) -> tuple[ComponentSpec, ...]:
        """All components, in the order of the file."""
        return tuple(component.spec(name) for name, component in self.components.items())

    @property
    def reusable_tokens(self) -> int | None:
        """The longest prefix that can ever be reused: one token is left to compute, pages are whole."""
        if self.max_tokens is None:
            return None
        return (self.max_tokens - 1) // self.page_size * self.page_size

    @property
    def can_hit(self) -> bool:
        """Whether any request is long enough to reuse a page."""
        return self.reusable_tokens != 0


class RanksConfig(Section):
    """This process's place; capacities in the file are totals over all ranks."""

    tp_size: int = Field(default=1, ge=1, description="ranks of tensor parallelism")
    tp_rank: int = Field(default=0, ge=0, description="this process's tensor rank, from 0")
    pp_size: int = Field(default=1, ge=1, description="ranks of pipeline parallelism")
    pp_rank: int = Field(default=0, ge=0, description="this process's pipeline rank, from 0")
    cp_size: int = Field(default=1, ge=1, description="ranks of context parallelism")
    cp_rank: int = Field(default=0, ge=0, description="this process's context rank, from 0")
    backend: Annotated[Backend, BeforeValidator(one_of("a backend", RANK_BACKENDS))] = Field(
        default="none", description="how the ranks agree on what they reuse: none (not at all), or gloo"
    )
    address: Text | None = Field(
        default=None, description="host:port where rank 0 meets the others; the same on all ranks"
    )
    timeout: Seconds = Field(
        default=120.0, description="how long a rank waits for the slowest one before it gives up"
    )

    def problems(self) -> Iterator[Problem]:
        for axis in ("tp", "pp", "cp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            if rank >= size:
                yield Problem(
                    (f"{axis}_rank",),
                    f"found {rank}, but {axis}_size is {size}; expected 0 to {size - 1}",
                )

        if self.backend == "none":
            if self.address is not None:
                yield Problem(("address",), "given without a backend; expected backend: gloo, or no address")
            return
        if self.count == 1:
            yield Problem(
                ("backend",),
                f"found {self.backend}, but one rank has nobody to agree with; expected none,"
                " or the number of ranks in tp_size, pp_size or cp_size",
            )
        if self.address is None:
            yield Problem(("address",), f"missing, but backend {self.backend} needs host:port of rank 0")
        elif (found := _HOST_PORT.fullmatch(self.address)) is None:
            yield Problem(
                ("address",), f"found {describe(self.address)}; expected host:port, like 10.0.0.7:29600"
            )
        elif not is_port(found[2]):
            yield Problem(
                ("address",), f"found port {found[2]} in {describe(self.address)}; expected 1 to {MAX_PORT}"
            )

    @property
    def count(self) -> int:
        """Processes that share the configured capacities."""
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def number(self) -> int:
        """This process among all of them, from 0: tensor ranks count fastest, pipeline ranks slowest."""
        return (self.pp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank
