"""``hicache doctor``: what runs on this machine, and why."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from hicache.cli._start import FAILS, config_findings
from hicache.cli.config import Settings, read_settings
from hicache.config import HiCacheConfig, load_config
from hicache.errors import ConfigError, CoreUnavailableError
from hicache.radix.core import CORE_VARIABLE, core_kind, is_debug_build

EXIT_FAILS = 1

app = typer.Typer(help="Say what runs on this machine, and why.", add_completion=False)


@app.command()
def doctor(
    config: Annotated[
        str | None, typer.Option(help="a YAML file or preset: what of it does not fit this machine")
    ] = None,
    settings: Settings = None,
) -> None:
    """Say which tree core runs and why, what it stands on, and what of the machine stands in its way.

    Exit code 1 if the configuration would not start here.
    """
    if settings and config is None:
        raise ConfigError(["--set: overrides keys of a configuration; add --config FILE or a preset"])
    found = _findings(
        None if config is None else load_config(config, overrides=read_settings(settings or []))
    )
    for name, value in found:
        typer.echo(f"{name:10} {value}")
    if any(name == FAILS for name, _ in found):
        raise typer.Exit(EXIT_FAILS)


def _findings(config: HiCacheConfig | None) -> list[tuple[str, str]]:
    return [
        ("hicache", _version("hicache")),
        ("core", _core()),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", _version("torch")),
        *_machine(config),
    ]


def _core() -> str:
    try:
        kind, reason = core_kind()
    except CoreUnavailableError as error:
        return f"none: {error}"
    if kind == "rust" and is_debug_build():
        reason += "; a debug build, which is slow: build it with HICACHE_RUST=required pip install ."
    return f"{kind} ({reason}; {CORE_VARIABLE}=auto|rust|python chooses)"


def _machine(config: HiCacheConfig | None) -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        return [("cuda", f"unknown: torch cannot be imported ({error})")]
    from hicache.cli._machine import machine_findings

    found = list(machine_findings(torch))
    if config is not None:
        found += config_findings(torch, config)
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
