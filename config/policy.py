"""When payload moves, and how long anything may take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from hicache.config.fields import Bytes, Fraction, Problem, Seconds, SecondsOrZero, Section, one_of
from hicache.config.units import format_duration, parse_duration
from hicache.types import DEFAULT_TAIL_TOKENS

EVICTION_POLICIES = ("adaptive", "lru", "fifo", "mru", "filo", "lfu", "slru", "priority", "tlru", "session")
SESSION_POLICIES = ("adaptive", "session")
"""Those that know which sessions are over."""
GRANULARITIES = ("page", "leaf")
ADMISSIONS = ("all", "ranked")
STORE_ADMISSIONS = ("all", "unless_over")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_MODES = ("best_effort", "wait_complete", "timeout")

Write = Literal["write_through", "write_through_selective", "write_back"]


def _recompute(value: object) -> str | float | None:
    if value is None:
        return None
    if value == "auto":
        return "auto"
    seconds = parse_duration(value)
    if seconds <= 0:
        raise ValueError(f"found {value!r}; expected auto, or a duration above 0 such as 100ms")
    return seconds


def _write_recompute(value: str | float | None) -> str | None:
    return format_duration(value) if isinstance(value, int | float) else value


class PrefetchConfig(Section):
    """L3 to L2 ahead of a load: how long a request waits for it."""

    mode: Annotated[
        Literal["best_effort", "wait_complete", "timeout"],
        BeforeValidator(one_of("a prefetch mode", PREFETCH_MODES)),
    ] = Field(default="timeout", description="best_effort, wait_complete or timeout")
    min_tokens: int = Field(default=256, ge=0, description="do not prefetch less than this many tokens")
    timeout_base: SecondsOrZero = Field(default=2.0, description="the wait of mode timeout: this")
    timeout_per_1024_tokens: SecondsOrZero = Field(default=0.1, description="plus this per 1,024 tokens")
    timeout_max: Seconds = Field(default=30.0, description="and never more than this")
    recompute_per_1024_tokens: Annotated[
        Literal["auto"] | float | None,
        BeforeValidator(_recompute),
        PlainSerializer(_write_recompute, return_type=str | None, when_used="json"),
    ] = Field(
        default=None,
        description="what the engine takes to prefill 1,024 tokens, or auto: as it was seen to take; what L2 and"
        " L3 would give later is computed instead; default: all that is found is loaded",
    )

    def problems(self) -> Iterator[Problem]:
        if self.timeout_base > self.timeout_max:
            yield Problem(
                ("timeout_base",),
                f"{format_duration(self.timeout_base)} is over timeout_max,"
                f" {format_duration(self.timeout_max)}; expected at most that",
            )


class Watermark(Section):
    """Free fraction of one tier: below ``low``, demote in the background until ``high``; 0/0 is off.

    The lowest tier has nothing to demote to: there room is made when it is needed.
    """

    low: Fraction = Field(default=0.02, description="free fraction that starts demotion")
    high: Fraction = Field(default=0.05, description="free fraction that ends it")

    def problems(self) -> Iterator[Problem]:
        if self.low > self.high:
            yield Problem(("low",), f"{self.low} is over high, {self.high}; expected at most that")
        if self.high == 1:
            yield Problem(("high",), "found 1, which would empty the tier; expected less")

    @property
    def is_on(self) -> bool:
        return self.high > 0


class WatermarksConfig(Section):
    """One watermark for each pool."""

    device: Watermark = Field(default=Watermark(), description="of L1: a mapping {low, high}")
    host: Watermark = Field(default=Watermark(), description="of L2: a mapping {low, high}")


class QueuesConfig(Section):
    """Bounds on bytes under way to and from the store; a full queue drops work and counts it."""

    store: Bytes = Field(default=256 * 2**20, description="bytes waiting to be stored, L2 to L3")
    prefetch: Bytes = Field(default=256 * 2**20, description="bytes waiting to be fetched, L3 to L2")


def _eviction(value: object) -> str:
    """A known policy, or what may be the dotted path of a class; the core loads it."""
    if isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split(".")):
        return value
    return one_of("an eviction policy", EVICTION_POLICIES)(value)


class PolicyConfig(Section):
    """Eviction, writing down, fetching up."""

    eviction: Annotated[str, BeforeValidator(_eviction)] = Field(
        default="adaptive",
        description=f"which payload goes first: {', '.join(EVICTION_POLICIES)}, or the dotted path of a class",
    )
    granularity: Annotated[
        Literal["page", "leaf"], BeforeValidator(one_of("a granularity", GRANULARITIES))
    ] = Field(default="page", description="page trims the tail of a leaf, leaf frees it whole")
    tail_tokens: int = Field(
        default=DEFAULT_TAIL_TOKENS,
        ge=0,
        description="what tlru gives up of each conversation's end before anything else",
    )
    admission: Annotated[Literal["all", "ranked"], BeforeValidator(one_of("an admission", ADMISSIONS))] = (
        Field(
            default="all",
            description="ranked: a full L2 declines what would be the first to leave it again",
        )
    )
    store_admission: Annotated[
        Literal["all", "unless_over"], BeforeValidator(one_of("an admission", STORE_ADMISSIONS))
    ] = Field(
        default="all",
        description="unless_over: L3 declines what only sessions used that are over (closed, one-shot)",
    )
    write: Annotated[Write, BeforeValidator(one_of("a write policy", WRITE_POLICIES))] = Field(
        default="write_through_selective",
        description="copy down at once, after the second use, or on eviction (write_back)",
    )
    prefetch: PrefetchConfig = Field(
        default=PrefetchConfig(), description="a mapping like {mode: timeout, min_tokens: 256}"
    )
    watermarks: WatermarksConfig = Field(
        default=WatermarksConfig(), description="a mapping {device: {low, high}, host: {low, high}}"
    )
    queues: QueuesConfig = Field(default=QueuesConfig(), description="a mapping {store, prefetch}")
    wait_limit: Seconds = Field(default=30.0, description="bound of every wait for a copy")
    store_timeout: Seconds = Field(default=5.0, description="bound of one batch of a store")


def _idle_after(value: object) -> str | float:
    return "auto" if value == "auto" else parse_duration(value)


def _write_idle_after(value: str | float) -> str:
    return value if isinstance(value, str) else format_duration(value)


class SessionsConfig(Section):
    """How long a session that says nothing counts as alive."""

    idle_after: Annotated[
        Literal["auto"] | float,
        BeforeValidator(_idle_after),
        PlainSerializer(_write_idle_after, return_type=str, when_used="json"),
    ] = Field(default="auto", description="auto (60s for now), or a duration")
    # As far as the ages go that are told apart (return_hazard.py): a shorter memory would learn that nobody returns later.
    expire_after: Seconds = Field(
        default=14_400.0, description="forget a session that was not seen this long"
    )

    def problems(self) -> Iterator[Problem]:
        if self.idle_after != "auto" and self.idle_after > self.expire_after:
            yield Problem(
                ("idle_after",),
                f"{format_duration(self.idle_after)} is over expire_after,"
                f" {format_duration(self.expire_after)}; expected at most that",
            )
