"""Options that several commands share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from hicache.errors import HiCacheError

if TYPE_CHECKING:
    from rich.console import Console

EXIT_INTERRUPTED = 130
GRACE_S = 1.0
"""How long a running request may take to end by itself after Ctrl-C."""
STDOUT = "-"
MIN_COLUMNS = 80
"""Room for every table with all its figures."""
WHOLE_COLUMNS = 100_000
"""For files and pipes: what reads them looks for whole lines."""
T = TypeVar("T")


def is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter was given on the command line, not by a variable or its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def report_console(json_target: str | None) -> Console:
    """Where tables go: stdout, unless the JSON object is to be alone there."""
    return table_console(stderr=json_target == STDOUT)


def table_console(*, stderr: bool = False, least: int = MIN_COLUMNS) -> Console:
    """A console that cuts no figure off: a terminal that is narrower than tables need breaks their lines.

    A file or a pipe has no width: each row is one line there. What stands in brackets or between colons is no
    markup: paths and names are shown as they are.
    """
    from rich.console import Console

    console = Console(stderr=stderr, markup=False, emoji=False)
    console.width = max(console.width, least) if console.file.isatty() else WHOLE_COLUMNS
    return console


def check_json_target(target: str | None) -> None:
    """Refuse a target that cannot be written before the work, not after it."""
    if target is None or target == STDOUT:
        return
    try:
        Path(target).open("a", encoding="utf-8").close()
    except OSError as error:
        raise HiCacheError(f"--json {target}: {error.strerror}; name a file that can be written") from error


def write_json(target: str | None, report: Mapping[str, object]) -> None:
    """Write one object to a file, or to stdout for ``-``."""
    if target is None:
        return
    text = json.dumps(report, indent=2)
    if target == STDOUT:
        typer.echo(text)  # where stdout is closed, nowhere
        return
    try:
        with Path(target).open("w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise HiCacheError(f"--json {target}: {error.strerror}") from error


def interrupted(done: int, total: int) -> typer.Exit:
    """What a command raises that Ctrl-C ended; it says how far it came, since what was shown is no result."""
    typer.echo(f"hicache: interrupted, {done:,} of {total:,} requests", err=True)
    return typer.Exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that Ctrl-C (or SIGTERM) sets.

    The running request gets ``GRACE_S`` to end by itself, so that the cache is never left half-way;
    after that, or at a second Ctrl-C, ``KeyboardInterrupt`` ends whatever it waits for.
    """
    stop = threading.Event()

    def ask(_signum: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def insist(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, ask),
        signal.SIGTERM: signal.signal(signal.SIGTERM, ask),
        signal.SIGALRM: signal.signal(signal.SIGALRM, insist),
    }
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_until_interrupted(work: Coroutine[Any, Any, T]) -> T:  # Any: asyncio's business
    """``asyncio.run``; Ctrl-C cancels the work at once, and a second one does not wait for it to end.

    The handler that asyncio itself sets has no wakeup descriptor: a signal just before the loop begins to wait would be
    noticed only with the loop's next event, when all pages of a batch are through.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            if task.cancelling():
                raise KeyboardInterrupt
            task.cancel()

        # A command in the background of a shell has Ctrl-C ignored, and goes on ignoring it.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        return await work

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
