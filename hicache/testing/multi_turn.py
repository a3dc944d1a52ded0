"""A hit-rate test for your own CI: late turns of a synthetic load against what they would hit with room for all.

::

    from hicache.testing.multi_turn import check_multi_turn

    def test_late_turns_are_reused() -> None:
        check_multi_turn("hicache.yaml", sessions=20, turns=30, user=300, output=200)

The configuration's tiers are really made and every reused byte is compared, so it has to fit the machine that
runs the test; ``overrides`` make it smaller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache.config import HiCacheConfig, device_slots, host_slots, load_config
from hicache.explain import UNSEEN
from hicache.replay.multiturn import MultiTurnResult, Round, run_multi_turn
from hicache.replay.simulated import Served
from hicache.workload import MultiTurn, Request, check_reuse

MAX_CAUSES = 4
"""So many causes are named for each turn; the rest is summed up."""


@dataclass(frozen=True, slots=True)
class ShortTurn:
    """A turn that hit less than it should.

    Args:
        turn: from 1.
        expected_tokens, hit_tokens: over all sessions.
        causes: what is missing, in tokens: component, tier that it left, and why, in words.
    """

    turn: int
    expected_tokens: int
    hit_tokens: int
    causes: Mapping[str, int]

    def __str__(self) -> str:
        lost = self.expected_tokens - self.hit_tokens
        share = self.hit_tokens / self.expected_tokens
        lines = [f"turn {self.turn}: {share:.2%} of {self.expected_tokens:,} tokens, {lost:,} short"]
        most = sorted(self.causes.items(), key=lambda cause: (-cause[1], cause[0]))
        lines += [f"    {tokens:,}  {cause}" for cause, tokens in most[:MAX_CAUSES]]
        rest = sum(tokens for _, tokens in most[MAX_CAUSES:])
        return "\n".join([*lines, *([f"    {rest:,}  for other reasons"] if rest else [])])


class MultiTurnShortfallError(AssertionError):
    """Late turns hit less than they should, or the cache was not sound.

    Attributes:
        short_turns: those turns, in order.
        result: all figures.
    """

    def __init__(self, message: str, short_turns: Sequence[ShortTurn], result: MultiTurnResult) -> None:
        super().__init__(message)
        self.short_turns = tuple(short_turns)
        self.result = result


def check_multi_turn(
    config: HiCacheConfig | Mapping[str, object] | str | Path,
    *,
    sessions: int = 8,
    turns: int = 20,
    system: int = 0,
    user: int = 300,
    output: int = 200,
    shuffled: bool = False,
    from_turn: int | None = None,
    least_share: float = 0.995,
    overrides: Mapping[str, object] | None = None,
    seed: int = 0,
) -> MultiTurnResult:
    """Assert that each late turn hits what a cache with room for everything would.

    Args:
        config: a loaded configuration, its tree, a YAML file, or a preset.
        sessions, turns, system, user, output, shuffled: the load, in tokens; see ``hicache.workload.MultiTurn``.
        from_turn: the first turn that counts, from 1; default: the second half.
        least_share: of the closed form's hits in that turn, above 0 and at most 1.
        overrides: settings by dotted path, like ``{"tiers.device.capacity": "64MiB"}``; not with a loaded ``config``.
        seed: of the tokens and of the order.

    Returns:
        All figures: by turn, tier and component.

    Raises:
        MultiTurnShortfallError: an ``AssertionError`` that names each short turn with component, tier and cause.
        ValueError: the load or what is asked of it makes no sense.
        ConfigError: the configuration is refused.
    """
    load = MultiTurn(
        sessions=sessions, turns=turns, system=system, user=user, output=output, shuffled=shuffled
    )
    first = turns // 2 + 1 if from_turn is None else from_turn
    if not 1 <= first <= turns:
        raise ValueError(f"from_turn is {first}, expected 1 to {turns}, the last turn")
    if not 0 < least_share <= 1:
        raise ValueError(f"least_share is {least_share}, expected above 0 and at most 1")
    loaded = _explaining(config, overrides)
    check_reuse(load, loaded.model.page_size, first)
    causes: dict[int, Counter[str]] = {}

    def note(request: Request, served: Served) -> None:
        causes.setdefault(request.turn, Counter()).update(_causes(served))

    result = run_multi_turn(load, loaded, seed=seed, on_served=note)
    short = [
        _short(row, causes[row.turn])
        for row in result.rounds
        if row.turn >= first and row.tokens.hit < least_share * row.expected_tokens
    ]
    unsound = list(_unsound(result))
    if short or unsound:
        raise MultiTurnShortfallError(
            "\n".join([*unsound, *_story(short, load, loaded, first, least_share)]), short, result
        )
    return result


def _explaining(
    config: HiCacheConfig | Mapping[str, object] | str | Path,
    overrides: Mapping[str, object] | None,
) -> HiCacheConfig:
    """The configuration, with a ledger that can say why something is missing."""
    if not isinstance(config, HiCacheConfig):
        return load_config(config, overrides={**(overrides or {}), "explain.enabled": True})
    if overrides:
        raise ValueError("overrides are for a configuration that is not loaded yet; change it before loading")
    explain = config.explain.model_copy(update={"enabled": True})
    return config.model_copy(update={"explain": explain})


def _causes(served: Served) -> Counter[str]:
    """What one request did not get that somebody had sent before: tokens by component, tier and cause."""
    causes: Counter[str] = Counter()
    explanation = served.explanation
    for lost in explanation.lost if explanation is not None else ():
        if lost.cause in UNSEEN:
            continue
        words = [lost.component] if lost.component is not None else []
        words.append(lost.cause.replace("_", " "))
        if lost.departure is not None:
            words.append(f"from {lost.departure.tier.name.lower()} ({lost.departure.cause})")
        causes[" ".join(words)] += lost.num_tokens
    return causes


def _short(row: Round, causes: Mapping[str, int]) -> ShortTurn:
    missing = row.expected_tokens - row.tokens.hit
    named = dict(causes)
    unnamed = missing - sum(named.values())
    if unnamed > 0:
        named["never kept: an earlier turn did not fit the device tier"] = unnamed
    return ShortTurn(row.turn, row.expected_tokens, row.tokens.hit, named)


def _unsound(result: MultiTurnResult) -> Iterator[str]:
    run = result.replay
    if run.stamp_mismatches:
        yield f"{run.stamp_mismatches} of {run.pages_checked} pages had wrong bytes"
    yield from (f"audit: {finding}" for finding in run.audit_errors)


def _story(
    short: Sequence[ShortTurn], load: MultiTurn, config: HiCacheConfig, first: int, least_share: float
) -> Iterator[str]:
    if not short:
        return
    yield (
        f"{len(short)} of turns {first} to {load.turns} hit less than {least_share:.1%}"
        " of what a cache with room for everything hits"
    )
    yield from (f"  {turn}" for turn in short)
    length = load.prompt_length(load.turns - 1) + load.output
    yield f"  load: {load.sessions} sessions, {length:,} tokens each in the end, pages of {config.model.page_size}"
    yield f"  tiers: {_tiers(config)}"


def _tiers(config: HiCacheConfig) -> str:
    parts = []
    for name, slots in (("device", device_slots(config)), ("host", host_slots(config))):
        held = ", ".join(f"{count:,} of {component}" for component, count in slots.items())
        parts.append(f"{name} holds {held}" if held else f"no {name} tier")
    stores = ", ".join(store.kind for store in config.tiers.stores)
    parts.append(f"stores: {stores}" if stores else "no store")
    remedy = "Raise tiers.<tier>.capacity, or add a tier below"
    if config.tiers.host is not None and config.policy.write == "write_through_selective":
        remedy += ", or set policy.write to write_through or write_back: what L1 evicts before its second use is dropped"
    return "; ".join(parts) + f". {remedy}"
