"""``hicache top``: what a running cache does, live."""

from __future__ import annotations

from typing import Annotated

import typer

from hicache.errors import ConfigError, HiCacheError

app = typer.Typer(add_completion=False)


@app.command()
def top(
    context: typer.Context,
    socket_path: Annotated[
        str | None, typer.Option("--socket", envvar="HICACHE_ADMIN_SOCKET", help="The cache's admin.socket.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="The cache's metrics port, instead.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one reading, since the start, and end.")] = False,
) -> None:
    """Show a running cache: hit rates, pools, queues, stores, sessions. Ctrl-C ends it."""
    from hicache.cli._numbers import reader
    from hicache.cli._settings import is_given, stop_on_interrupt, table_console
    from hicache.cli._top_view import View, render

    if metrics is not None and is_given(context, "socket_path"):
        raise ConfigError(["top: --socket and --metrics both name the cache; keep one"])
    read = reader(socket_path, metrics)
    console = table_console(least=1)  # a narrow one sees less
    now = read()
    if once:
        console.print(render(View(now, None, console.width)), highlight=False)
        return
    if not console.is_terminal:
        raise HiCacheError("top redraws a terminal, and stdout is none; use --once")
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    before, trouble = None, ""
    with stop_on_interrupt() as stop, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(
                Group(render(View(now, before, console.width)), Text(trouble, style="bold red")), refresh=True
            )
            if stop.wait(interval):
                return
            try:
                before, now, trouble = now, read(), ""
            except HiCacheError as error:  # it may come back: the last reading stays, with what is wrong
                trouble = str(error)
