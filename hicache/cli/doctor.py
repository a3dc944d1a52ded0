"""``hicache doctor``: what runs on this machine, and why."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from hicache.config import load_config
from hicache.errors import CoreUnavailableError
from hicache.radix.core import CORE_VARIABLE, core_kind, is_debug_build

app = typer.Typer(help="Say what runs on this machine, and why.", add_completion=False)


@app.command()
def doctor(
    config: Annotated[
        str | None, typer.Option(help="a YAML file or preset: what of it does not fit this machine")
    ] = None,
) -> None:
    """Say which tree core runs and why, what it stands on, and what of the machine stands in its way."""
    for name, value in _findings(config):
        typer.echo(f"{name:10} {value}")


def _findings(config: str | None = None) -> list[tuple[str, str]]:
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


def _machine(config: str | None) -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        return [("cuda", f"unknown: torch cannot be imported ({error})")]
    from hicache.cli._machine import config_findings, machine_findings

    found = list(machine_findings(torch))
    if config is not None:
        found += config_findings(torch, load_config(config))
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
