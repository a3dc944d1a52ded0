"""What ``--components`` means: the payload of a hybrid model, in units of one block's path payload."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hicache.errors import ConfigError

PATH = "full"
UNITS = 1_000_000
"""A block of path payload. Costs are whole millionths of it, so that sums are exact."""
MOST_BLOCKS = 1_000_000


class Placement(StrEnum):
    """Where a hybrid model keeps boundaries (``--marks``)."""

    CHOSEN = "chosen"
    """At ends, forks and the ends of shared prefixes, and spare ones; each but the spare ages by itself."""
    ENDS = "ends"
    """At the ends of prompts, going with their blocks: what the chosen placement is measured against."""
    EVERYWHERE = "everywhere"
    """At every block, going with it."""


@dataclass(frozen=True, slots=True)
class Window:
    """``units`` a block; a boundary needs its last ``blocks``."""

    units: int
    blocks: int


@dataclass(frozen=True, slots=True)
class HybridComponents:
    """A path component and what a boundary needs besides.

    Args:
        text: as it was written.
        state_units: of all states at one boundary.
        windows: each window component.
        placement: where boundaries are kept.
        read_as: each component in words, to be shown: whether a cost is that of a state or a window is easily missed.
    """

    text: str
    state_units: int
    windows: tuple[Window, ...]
    placement: Placement = Placement.CHOSEN
    read_as: tuple[str, ...] = ()

    @property
    def mark_blocks(self) -> float:
        """What one mark costs where no other shares its windows."""
        return self.mark_units(MOST_BLOCKS) / UNITS

    def mark_units(self, end: int) -> int:
        """The same for a mark ``end`` blocks from the root."""
        return self.state_units + sum(window.units * min(window.blocks, end) for window in self.windows)


def parse_components(text: str, marks: str | None = None) -> HybridComponents:
    """``full+mamba=2``: a state of two blocks; ``full+swa=0.5x2``: half a block's payload, a window of two blocks.

    Any number of either may follow ``full``. ``marks`` names the placement. Raises ``ConfigError`` for anything else.
    """
    if marks is not None and marks not in list(Placement):
        raise ConfigError([f"--marks: found {marks!r}; expected {', '.join(Placement)}"])
    first, *rest = text.strip().split("+")
    if first != PATH or not rest:
        raise _refusal(f"found {text.strip()!r}; expected {PATH} and at least one more component")
    names = [PATH]
    state_units = 0
    windows: list[Window] = []
    read_as = [f"{PATH}: a path"]
    for word in rest:
        name, equals, costs = word.partition("=")
        if not name.isidentifier() or not equals:
            raise _refusal(f"{word!r} has no cost; expected a name, =, and a cost in blocks")
        if name in names:
            raise _refusal(f"{name} stands there twice; expected each component once")
        names.append(name)
        cost, times, blocks = costs.partition("x")
        units = _units(name, cost)
        if not times:
            state_units += units
            read_as.append(f"{name}: a state of {_said(units)}")
        elif blocks.isascii() and blocks.isdigit() and 0 < int(blocks) <= MOST_BLOCKS:
            windows.append(Window(units, int(blocks)))
            read_as.append(f"{name}: {_said(units)} for each block of a window of {int(blocks)}")
        else:
            raise _refusal(f"{name} has a window of {blocks!r}; expected 1 to {MOST_BLOCKS} whole blocks")
    return HybridComponents(
        text.strip(), state_units, tuple(windows), Placement(marks or Placement.CHOSEN), tuple(read_as)
    )


def _said(units: int) -> str:
    return f"{units / UNITS:g} block{'' if units == UNITS else 's'}"


def _units(name: str, cost: str) -> int:
    try:
        blocks = float(cost)
    except ValueError:
        blocks = -1
    if not 0 <= blocks <= MOST_BLOCKS:  # nan is refused, too
        raise _refusal(f"{name} costs {cost!r}; expected 0 to {MOST_BLOCKS} blocks")
    return round(blocks * UNITS)


def _refusal(problem: str) -> ConfigError:
    forms = f"{PATH}+mamba=2 (a state of 2 blocks) or {PATH}+swa=0.5x2 (0.5 a block, window of 2)"
    return ConfigError([f"--components: {problem}; write it like {forms}"])
