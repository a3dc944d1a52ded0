"""``hicache doctor``: what runs on this machine, and why."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from hicache.errors import CoreUnavailableError
from hicache.radix.core import CORE_VARIABLE, core_kind, is_debug_build

app = typer.Typer(help="Say what runs on this machine, and why.", add_completion=False)


@app.command()
def doctor() -> None:
    """Say which tree core runs and why, and the versions of what it stands on."""
    for name, value in _findings():
        typer.echo(f"{name:10} {value}")


def _findings() -> list[tuple[str, str]]:
    return [
        ("hicache", _version("hicache")),
        ("core", _core()),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", _version("torch")),
        ("cuda", _cuda()),
    ]


def _core() -> str:
    try:
        kind, reason = core_kind()
    except CoreUnavailableError as error:
        return f"none: {error}"
    if kind == "rust" and is_debug_build():
        reason += "; a debug build, which is slow: build it with HICACHE_RUST=required pip install ."
    return f"{kind} ({reason}; {CORE_VARIABLE}=auto|rust|python chooses)"


def _cuda() -> str:
    try:
        import torch
    except ImportError as error:
        return f"unknown: torch cannot be imported ({error})"
    if not torch.cuda.is_available():
        return f"not available (torch was built for {torch.version.cuda or 'the CPU'})"
    return f"{torch.version.cuda}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
