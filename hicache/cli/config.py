"""``hicache config``: check a configuration, or show where each of its values comes from."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hicache.cli._settings import table_console
from hicache.config import (
    DiskStoreConfig,
    HiCacheConfig,
    config_warnings,
    device_budget,
    device_slots,
    dump_config,
    explain_config,
    host_budget,
    host_slots,
    load_config,
    store_bytes,
)
from hicache.config.layers import parse_argument
from hicache.config.notes import size_notes
from hicache.config.secrets import HIDDEN, is_doubtful
from hicache.config.units import approximate_bytes
from hicache.errors import ConfigError

if TYPE_CHECKING:  # rich is imported when a table is printed
    from rich.table import Table

app = typer.Typer(help="Check or show a configuration.", no_args_is_help=True, add_completion=False)

DEFAULT_SOURCE = "cpu"
NOT_HERE = "valid; would not start here: see the warnings, or run hicache doctor --config"
"""Instead of OK, of what is right but not for this machine."""

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, like tiers.host.capacity=1GiB."),
]


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="A YAML file, or a preset: cpu, cuda, hybrid, redis.")],
    settings: Settings = None,
) -> None:
    """Check a configuration and print what it comes to; exit code 2 if it is refused.

    Warnings tell what would fail or not fit if it were started on this machine.
    """
    from hicache.cli._start import (
        code_failures,
        disk_warnings,
        gpu_failures,
        gpu_warnings,
        start_failures,
    )

    config = load_config(file, overrides=read_settings(settings or []))
    refused = list(code_failures(config))
    if refused:  # code of the user's own, or a core that cannot run it
        raise ConfigError(refused)
    failures = [*start_failures(config), *gpu_failures(config)]
    typer.echo(f"{file}: {NOT_HERE if failures else 'OK'}")
    _print(_capacity_table(config))
    for line in _stores(config):
        typer.echo(line)
    for note in size_notes(config):
        typer.echo(f"note: {note}")
    for warning in chain(failures, gpu_warnings(config), disk_warnings(config), config_warnings(config)):
        typer.echo(f"warning: {warning}")


@app.command()
def reference() -> None:
    """Print every key with its type, default and meaning, as Markdown."""
    from hicache.config.reference import configuration_page

    typer.echo(configuration_page())


@app.command()
def show(
    file: Annotated[
        str, typer.Argument(help=f"A YAML file, or a preset; default: the preset {DEFAULT_SOURCE}.")
    ] = DEFAULT_SOURCE,
    settings: Settings = None,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print the effective configuration as YAML.")
    ] = False,
) -> None:
    """Show every key of the effective configuration, its value, and where it comes from."""
    overrides = read_settings(settings or [])
    if as_yaml:
        typer.echo(dump_config(load_config(file, overrides=overrides)), nl=False)
        return
    from rich.table import Table
    from rich.text import Text

    rows = explain_config(file, overrides=overrides)
    typer.echo(f"effective configuration of {file}")
    table = Table()
    for heading in ("key", "value", "origin"):
        table.add_column(heading, overflow="fold")
    for key, value, origin in rows:
        said = f"({HIDDEN})" if value != "null" and is_doubtful(key, value.strip("'")) else value
        table.add_row(*(Text(cell) for cell in (key, said, origin)))
    _print(table)


@app.command("import")
def import_(
    file: Annotated[
        str,
        typer.Argument(help="An LMCache YAML, or SGLang's flags (a command, YAML, JSON) or extra config."),
    ],
    origin: Annotated[
        str | None, typer.Option("--from", help="lmcache or sglang; default: by what stands in it.")
    ] = None,
    base: Annotated[
        str, typer.Option(help="A YAML file or a preset of ours: the model and L1, which theirs do not tell.")
    ] = DEFAULT_SOURCE,
    out: Annotated[str | None, typer.Option(help="Write there; default: to stdout.")] = None,
) -> None:
    """Write another cache's settings as ours, and name what has no counterpart."""
    from hicache.config.imports import import_config

    imported = import_config(file, origin=origin, base=base)
    if out is None:
        typer.echo(imported.text, nl=False)
    else:
        try:
            with Path(out).open("x", encoding="utf-8") as target:
                target.write(imported.text)
        except OSError as error:
            raise ConfigError([f"--out {out}: {error.strerror}; name a new file"]) from None
    for key, text in imported.notes:
        typer.echo(f"{key}: {text}", err=True)


def read_settings(
    settings: list[str], *, option: str = "--set ", example: str = "tiers.host.capacity=1GiB"
) -> dict[str, object]:
    """``KEY=VALUE`` options as overrides.

    Args:
        option, example: what such a setting follows on the command line, and what one looks like.

    Raises:
        ConfigError: naming every one that is not so.
    """
    overrides: dict[str, object] = {}
    problems: list[str] = []
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            problems.append(f"{option}{setting}: expected KEY=VALUE, like {example}")
            continue
        try:
            overrides[path.strip()] = parse_argument(path.strip(), text)
        except ConfigError as error:
            problems.extend(f"{path} (argument): {problem}" for problem in error.problems)
    if problems:
        raise ConfigError(problems)
    return overrides


def _capacity_table(config: HiCacheConfig) -> Table:
    """Slots and bytes of one rank, per tier and component; of a budget that all share, the most of each."""
    from rich.table import Table
    from rich.text import Text

    ranks = config.ranks.count
    table = Table(caption_justify="left")
    shared = {"device": device_budget(config), "host": host_budget(config)}
    captions = [f"of one rank out of {ranks}"] if ranks > 1 else []
    captions += [
        f"{tier}: one budget of {approximate_bytes(budget.num_units * budget.unit_bytes)} for all components; each row"
        " is what that component could have alone"
        for tier, budget in shared.items()
        if budget is not None
    ]
    table.caption = "\n".join(captions) or None
    for heading in ("tier", "component", "rule"):
        table.add_column(heading)
    for heading in ("slots", "slot bytes", "bytes", "tokens"):
        table.add_column(heading, justify="right")
    page_size = config.model.page_size
    for tier, slots in (("device", device_slots(config)), ("host", host_slots(config))):
        for spec in config.model.specs():
            if spec.name not in slots:
                continue
            count, slot_bytes = slots[spec.name], spec.slot_bytes(page_size)
            most = "≤" if shared[tier] is not None else ""
            tokens = "" if spec.is_checkpoint else f"{count * page_size:,}"
            cells = (tier, spec.name, str(spec.rule), f"{most}{count:,}", f"{slot_bytes:,}")
            table.add_row(*(Text(c) for c in (*cells, approximate_bytes(count * slot_bytes), tokens)))
    return table


def _stores(config: HiCacheConfig) -> list[str]:
    lines = []
    for store, capacity in zip(config.tiers.stores, store_bytes(config), strict=True):
        place = getattr(store, "path", None) or getattr(store, "url", "")
        if isinstance(store, DiskStoreConfig) and store.directory is not None:
            bound = f"{approximate_bytes(store.capacity)} over all that share it"
        else:
            bound = "no bound of ours" if capacity is None else f"{approximate_bytes(capacity)} a rank"
        lines.append(f"store {store.name}: {store.kind} {place}".rstrip() + f", {bound}")
    return lines


def _print(table: Table) -> None:
    table_console().print(table, highlight=False)
