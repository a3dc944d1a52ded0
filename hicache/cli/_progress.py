"""How far a replay is: a bar on a terminal, a line for every tenth elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[float], None]
"""Called after each request with the hit rate so far."""

NUM_LINES = 10


@contextlib.contextmanager
def replay_progress(console: Console, total: int, *, quiet: bool) -> Iterator[Advance]:
    """Show ``total`` requests going by.

    Args:
        console: where to; never where the report goes.
        quiet: show nothing.
    """
    if quiet:
        yield lambda _rate: None
    elif console.is_terminal:
        with _bar(console, total) as advance:
            yield advance
    else:
        yield _lines(console, total)


@contextlib.contextmanager
def _bar(console: Console, total: int) -> Iterator[Advance]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("hit rate {task.fields[rate]:.4f}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("replay", total=total, rate=0.0)
        yield lambda rate: bar.update(task, advance=1, rate=rate)


def _lines(console: Console, total: int) -> Advance:
    done = 0

    def advance(rate: float) -> None:
        nonlocal done
        done += 1
        if done * NUM_LINES // total > (done - 1) * NUM_LINES // total:
            console.print(
                f"replayed {done:,} of {total:,} requests, hit rate {rate:.4f}",
                highlight=False,
                soft_wrap=True,
            )

    return advance
