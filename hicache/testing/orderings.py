"""Eviction policies as a user would write them, for tests of what is named by dotted path."""

from __future__ import annotations

from hicache.radix.ordering import Facts, Ordering


class UsesOverAge(Ordering):
    """Fewest uses first; among equals the youngest."""

    def rank(self, facts: Facts) -> int:
        return 1000 * facts.uses - facts.created


class OldestUseInBands(Ordering):
    """Least recently used first, but in bands of eight; whole bands tie."""

    tells_uses_apart = False
    tells_ages_apart = False

    def rank(self, facts: Facts) -> int:
        return facts.used // 8


class Broken(Ordering):
    """Always fails."""

    def rank(self, facts: Facts) -> int:
        raise RuntimeError("this policy never works")


class Unreliable(Ordering):
    """Fails in every way that a policy can."""

    def rank(self, facts: Facts) -> int:
        match (facts.used + facts.uses) % 4:
            case 0:
                raise ZeroDivisionError("a policy's own mistake")
            case 1:
                return 2**70
            case 2:
                return None  # type: ignore[return-value]  # on purpose
            case _:
                return -facts.used
