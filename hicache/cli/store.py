"""``hicache store``: look into a disk store, verify it, copy pages out and in, remove some."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from hicache.cli._settings import (
    STDOUT,
    check_json_target,
    report_console,
    run_until_interrupted,
    write_json,
)
from hicache.cli.config import Settings, read_settings
from hicache.errors import ConfigError, HiCacheError

if TYPE_CHECKING:
    from hicache.tiers.disk import DiskStore
    from hicache.tiers.disk_pages import DiskPages

T = TypeVar("T")

app = typer.Typer(
    help="Look into a disk store, verify it, copy pages out and in, remove some.",
    no_args_is_help=True,
    add_completion=False,
)

EXIT_BAD_PAGES = 1

Folder = Annotated[str | None, typer.Option("--path", help="The store's folder.")]
Config = Annotated[
    str | None,
    typer.Option("--config", help="A YAML file or preset whose disk store is meant, in place of --path."),
]
JsonTarget = Annotated[
    str | None, typer.Option("--json", help="Write the report as one JSON object; - for stdout.")
]
Capacity = Annotated[
    str | None, typer.Option(help="Limit of the folder, like 100GiB; default: the configuration's, or none.")
]


@app.callback()
def _store() -> None:
    """Look into a disk store, verify it, copy pages out and in, remove some.

    The folder may be in use: these commands are one more process at work in it.
    """


def _check_json_target(json_file: str | None, path: str | None) -> None:
    from hicache.tiers.disk_tools import check_target

    if json_file is not None and json_file != STDOUT and path is not None:
        check_target(Path(json_file), Path(path))
    check_json_target(json_file)


@app.command()
def stat(
    path: Folder = None, config: Config = None, settings: Settings = None, json_file: JsonTarget = None
) -> None:
    """Show what a store holds."""
    from hicache.tiers.disk_tools import count_components

    async def look(store: DiskStore) -> dict[str, object]:
        components = await store.run(count_components)
        ledger = store.pages.ledger
        return {
            "path": store.path,
            "pages": store.stats().num_pages,
            "used_bytes": store.stats().used_bytes,
            "capacity_bytes": store.stats().capacity_bytes,
            "journal_bytes": ledger.journal_bytes,
            "segments": len(ledger.slots.owners),
            "other_processes": (await store.run(lambda pages: pages.ledger.num_owners)) - 1,
            "components": {name: {"pages": n, "bytes": size} for name, (n, size) in components.items()},
            "errors": store.stats().errors,
        }

    _check_json_target(json_file, path)
    report = _run(look, path, config, settings)
    _print_table(json_file, f"store {report['path']}", report)
    write_json(json_file, report)


@app.command()
def scrub(
    path: Folder = None, config: Config = None, settings: Settings = None, json_file: JsonTarget = None
) -> None:
    """Read and verify every page and remove those that are bad; exit code 1 if there were any."""
    from hicache.tiers import disk_tools

    async def verify(store: DiskStore) -> dict[str, object]:
        result = await _run_tool(store, disk_tools.scrub)
        findings = await store.run(lambda pages: pages.ledger.check_integrity())
        return {
            "path": store.path,
            "pages": result.num_pages,
            "payload_bytes": result.num_bytes,
            "bad_pages_removed": result.num_bad,
            "errors": store.stats().errors,
            "findings": findings,
        }

    _check_json_target(json_file, path)
    report = _run(verify, path, config, settings)
    _print_table(json_file, f"store {report['path']}", report)
    write_json(json_file, report)
    if report["bad_pages_removed"] or report["findings"] or report["errors"]:
        raise typer.Exit(EXIT_BAD_PAGES)


@app.command("export")
def export_(
    target: Annotated[Path, typer.Argument(help="The archive to write.")],
    path: Folder = None,
    config: Config = None,
    settings: Settings = None,
) -> None:
    """Write all pages to one file; exit code 1 if some could not be read."""
    from hicache.tiers.disk_tools import ExportResult, check_target, export_pages

    async def copy(store: DiskStore) -> tuple[ExportResult, dict[str, int]]:
        check_target(target, Path(store.path))
        result = await _run_tool(store, lambda pages, progress: export_pages(pages, target, progress))
        return result, store.stats().errors

    result, errors = _run(copy, path, config, settings)
    left_out = f", {result.num_left_out} left out: bad, or gone meanwhile" if result.num_left_out else ""
    typer.echo(f"{result.num_pages} pages written to {target}{left_out}{_told(errors)}")
    if result.num_left_out or errors:
        raise typer.Exit(EXIT_BAD_PAGES)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="An archive, or a folder of the older format.")],
    path: Folder = None,
    config: Config = None,
    settings: Settings = None,
    capacity: Capacity = None,
) -> None:
    """Put the pages of an archive, or of a folder of the older format, into a store; makes it if need be.

    Exit code 1 if not all of them are there in the end.
    """
    from hicache.tiers.disk_tools import ImportResult, check_source, import_pages

    if not source.exists():
        raise HiCacheError(
            f"{source}: no such file or folder; name an archive or a folder of the older format"
        )
    check_source(source)

    async def copy(store: DiskStore) -> tuple[ImportResult, dict[str, int]]:
        return await import_pages(store, source), store.stats().errors

    result, errors = _run(copy, path, config, settings, capacity=capacity, make=True)
    parts = [
        f"{result.num_stored} pages stored",
        f"{result.num_evicted} stored and evicted again for want of room",
        f"{result.num_refused} refused for want of room" + (" or for errors" if errors else ""),
        f"{result.num_bad} bad",
    ]
    if result.num_displaced:
        parts.append(f"{result.num_displaced} others left the store")
    typer.echo(", ".join(parts) + _told(errors))
    if not result.is_complete or errors:
        raise typer.Exit(EXIT_BAD_PAGES)


@app.command()
def delete(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Page keys in hexadecimal, or their first digits.")
    ] = None,
    component: Annotated[str | None, typer.Option(help="All pages of this component.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All pages.")] = False,
    path: Folder = None,
    config: Config = None,
    settings: Settings = None,
) -> None:
    """Remove pages and give their space back; exit code 1 if the folder could not be changed."""
    from hicache.tiers.disk_tools import find_keys

    prefixes = keys or []
    for prefix in prefixes:
        if not prefix or len(prefix) > 64 or set(prefix.lower()) - set("0123456789abcdef"):
            raise ConfigError([f"store delete: {prefix!r} is no key; expected up to 64 hexadecimal digits"])
    if sum((bool(prefixes or component is not None), everything)) != 1:
        raise ConfigError(
            ["store delete: say what: keys, --component NAME (or both: what is in both), or --all"]
        )

    async def remove(store: DiskStore) -> tuple[int, dict[str, int]]:
        if everything:
            return await store.clear(), store.stats().errors
        found = await store.run(lambda pages: find_keys(pages, prefixes=prefixes, component=component))
        return await store.delete(found), store.stats().errors

    num_removed, errors = _run(remove, path, config, settings)
    typer.echo(f"{num_removed} pages removed{_told(errors)}")
    if errors:
        raise typer.Exit(EXIT_BAD_PAGES)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _run(
    command: Callable[[DiskStore], Coroutine[Any, Any, T]],  # Any: asyncio's business
    path: str | None,
    config: str | None,
    settings: list[str] | None,
    *,
    capacity: str | None = None,
    make: bool = False,
) -> T:
    """Open the store that is meant and run a command on it."""
    from hicache.tiers.disk import DiskStore
    from hicache.tiers.disk_folder import is_in_use

    folder, capacity_bytes = _which(path, config, settings, capacity)
    if not make and not is_in_use(folder):
        raise HiCacheError(f"{folder} holds no disk store; name the folder of one with --path, or a --config")

    async def run() -> T:
        store = DiskStore(folder, capacity_bytes)
        await store.open()
        try:
            return await command(store)
        finally:
            await store.close()

    return run_until_interrupted(run())


async def _run_tool(store: DiskStore, tool: Callable[[DiskPages, Callable[[int], None]], T]) -> T:
    """Run what takes long in one of the store's threads; it ends at the next page when we are interrupted."""
    stop = threading.Event()

    def go_on(_: int) -> None:
        if stop.is_set():
            raise HiCacheError("interrupted")

    return await store.run(lambda pages: tool(pages, go_on), stop)


def _told(errors: Mapping[str, int]) -> str:
    """Errors of a store, for the end of a line."""
    return "".join(f"; {count} times {name}" for name, count in sorted(errors.items()))


def _which(
    path: str | None, config: str | None, settings: list[str] | None, capacity: str | None
) -> tuple[str, int | None]:
    """Folder and capacity of the store that the options mean."""
    from hicache.config import load_config
    from hicache.config.tiers import DiskStoreConfig
    from hicache.config.units import parse_bytes

    limit = None
    if capacity is not None:
        try:
            limit = parse_bytes(capacity)
        except ValueError as error:
            raise ConfigError([f"--capacity: {error}"]) from error
    if (path is None) == (config is None):
        raise ConfigError(
            ["store: name the folder with --path, or a configuration with --config (one of them)"]
        )
    if path is not None:
        return str(Path(path).expanduser().absolute()), limit
    assert config is not None
    loaded = load_config(config, overrides=read_settings(settings or []))
    for section in loaded.tiers.stores:
        if isinstance(section, DiskStoreConfig) and section.directory is not None:
            return str(section.directory), section.capacity if limit is None else limit
    raise ConfigError([f"{config}: tiers.stores has no disk store with a folder of its own; use --path"])


def _print_table(json_target: str | None, title: str, report: Mapping[str, object]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = report_console(json_target)
    console.print(title, highlight=False)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _rows(report):
        table.add_row(Text(name), Text(value))
    console.print(table)


def _rows(report: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in report.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            rows += _rows(value, f"{label}: ")
        elif isinstance(value, list):
            rows += [(label, str(item)) for item in value] or [(label, "none")]
        else:
            rows.append(
                (label, f"{value:,}" if isinstance(value, int) else "none" if value is None else str(value))
            )
    return rows
