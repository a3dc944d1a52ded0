"""The ``hicache`` command: one file per command, imported only when it is used.

A file ``hicache/cli/<name>.py`` is the command ``hicache <name>``. It holds ``app``, a ``typer.Typer``
with one command (then that is the command itself) or with several (then they are its sub-commands),
and imports what is heavy inside its functions.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hicache.cli._settings import EXIT_INTERRUPTED
from hicache.errors import ConfigError, HiCacheError
from hicache.version import hicache_version

EXIT_REFUSED = 2
"""Exit code when a setting, a file or an argument is refused."""

_COMPLETION = ("install_completion", "show_completion")


class LazyCommands(TyperGroup):
    """Finds the commands by their files and imports one when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # Any: typer keeps the types of its click private
        return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # Any: as above
        if cmd_name not in self.list_commands(ctx):
            return None
        command = typer.main.get_command(import_module(f"{__name__}.{cmd_name}").app)
        command.name = cmd_name
        command.params = [p for p in command.params if p.name not in _COMPLETION]
        _refuse_repeats(command)
        return command


def _refuse_repeats(command: Any) -> None:  # Any: typer keeps the types of its click private
    """Have the command, and its own commands, refuse an option that is given twice and holds one value.

    It would take the last one, and nobody would hear of the other.
    """
    for inner in getattr(command, "commands", {}).values():
        _refuse_repeats(inner)
    parse_args = command.parse_args

    def checked(ctx: Any, args: list[str]) -> Any:  # Any: as above
        words = [word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", args)]
        for param in command.params:
            if param.param_type_name == "option" and not param.multiple and not param.is_flag:
                count = sum(map(words.count, param.opts))
                if count > 1:
                    raise ConfigError([f"{param.opts[0]}: given {count} times; it takes one value, keep one"])
        return parse_args(ctx, args)

    command.parse_args = checked


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"hicache {hicache_version()}")
        raise typer.Exit


@app.callback()
def _hicache(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda value: _show_version(wanted=value),
            is_eager=True,
            help="Show the version.",
        ),
    ] = False,
) -> None:
    """HiCache: a hierarchical KV-cache tier manager for LLM inference."""


class _QuietPipe(io.FileIO):
    """A stream whose reader may leave: what it would not read is not missed, and the exit code stays what it is.

    Any other failure is told once; what still waits in buffers then is dropped.
    """

    _is_broken = False

    def write(self, data: Any, /) -> int:  # Any: a buffer, which has no name in Python 3.11
        if not self._is_broken:
            try:
                return super().write(data)
            except OSError as error:
                self._is_broken = True
                if error.errno != errno.EPIPE:
                    raise
        return memoryview(data).nbytes


def _accept_any_reader() -> None:
    """``hicache replay … | head -1`` ends as it would have ended without ``head``.

    A terminal that has no sign for a character gets a question mark: a report is not lost for a dash in it.
    """
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="replace")
    stdout = sys.stdout
    if stdout is None:  # closed by whoever started us
        return
    pipe = _QuietPipe(stdout.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(pipe), stdout.encoding, "replace", line_buffering=stdout.isatty()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; what HiCache refuses is told on stderr in one block, without a traceback.

    Args:
        arguments: default: those of this process.
    """
    if arguments is None:
        _accept_any_reader()
    try:
        app(args=None if arguments is None else list(arguments), prog_name="hicache")
    except ConfigError as error:
        lines = str(error).splitlines()
        noun = "problem" if len(lines) == 1 else "problems"
        _tell(f"hicache: refused, {len(lines)} {noun}:", *(f"  {line}" for line in lines))
        return EXIT_REFUSED
    except HiCacheError as error:
        _tell(f"hicache: {error}")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        _tell("hicache: interrupted")
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _tell(f"hicache: cannot write the report: {error.strerror}")
        return EXIT_REFUSED
    return 0


def _tell(*lines: str) -> None:
    """On stderr. Where that cannot be written to, the exit code still says what it is to say."""
    with contextlib.suppress(OSError):
        for line in lines:
            typer.echo(line, file=sys.stderr)
