"""Pictures of what a benchmark measured. Needs matplotlib (``pip install 'hicache[plot]'``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache.errors import ConfigError, HiCacheError

PICTURES = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class HitRateCurves:
    """Hit rate over capacity.

    Args:
        title, subtitle: what was measured, and on which load.
        capacity_label: of the horizontal axis, with its unit.
        capacities: ascending, above 0.
        by_policy: hit rates, one for each capacity.
        bound: the same for the clairvoyant bound; None where it is not known.
        ceiling: what a cache with room for all hits.
    """

    title: str
    subtitle: str
    capacity_label: str
    capacities: Sequence[float]
    by_policy: Mapping[str, Sequence[float]]
    bound: Sequence[float] | None
    ceiling: float


def check_picture(target: str) -> None:
    """Refuse a picture that could not be drawn or written, before the work. Raises ``ConfigError``."""
    path = Path(target)
    if path.suffix.lower() not in PICTURES:
        raise ConfigError([f"--plot: {target!r}; expected a file that ends in {' or '.join(PICTURES)}"])
    if not path.parent.is_dir():
        raise ConfigError([f"--plot: {target!r}: there is no folder {str(path.parent)!r}; make it first"])
    try:
        import matplotlib as _  # noqa: F401, ICN001
    except ImportError as error:
        raise ConfigError(["--plot: needs matplotlib; run: pip install 'hicache[plot]'"]) from error


def draw_hit_rates(target: str, curves: HitRateCurves) -> None:
    """Write one self-contained picture; its ending says which kind.

    Raises:
        ConfigError: see ``check_picture``.
        HiCacheError: the file cannot be written.
    """
    check_picture(target)
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    # A fixed salt and no date: the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "hicache", "font.size": 10}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(curves.ceiling, color="0.6", linestyle=":", label="room for everything")
        if curves.bound is not None:
            axes.plot(
                curves.capacities,
                curves.bound,
                color="black",
                linestyle="--",
                marker="x",
                label="clairvoyant bound",
            )
        for marker, (policy, rates) in zip("osD^vP*hX<>" * 3, curves.by_policy.items(), strict=False):
            axes.plot(curves.capacities, rates, marker=marker, markersize=5, label=policy)
        axes.set_xscale("log")
        axes.set_xticks(list(curves.capacities))
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        axes.set_ylim(0, 1.02)
        axes.set_xlabel(curves.capacity_label)
        axes.set_ylabel("token hit rate (reused / prompt tokens)")
        figure.suptitle(f"{curves.title}\n{curves.subtitle}", x=0.01, ha="left", fontsize=10)
        axes.grid(visible=True, color="0.9")
        axes.set_axisbelow(True)
        figure.legend(loc="outside right center", frameon=False)
        try:
            metadata = {"Date": None} if target.lower().endswith(".svg") else None
            figure.savefig(target, metadata=metadata, dpi=150)
        except OSError as error:
            raise HiCacheError(f"--plot {target}: {error.strerror}") from error
