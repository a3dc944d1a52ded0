"""The one thing that pyproject.toml cannot say: whether to build the Rust tree core.

``HICACHE_RUST`` is ``auto`` (default), ``required`` or ``off``. This version has no Rust core yet: ``auto``
and ``off`` build the pure Python package, and ``required`` refuses instead of shipping something slower
than what was asked for.
"""

import os

from setuptools import setup

CHOICES = ("auto", "required", "off")

choice = os.environ.get("HICACHE_RUST", "auto")
if choice not in CHOICES:
    raise SystemExit(f"HICACHE_RUST: expected one of {', '.join(CHOICES)}; found {choice!r}")
if choice == "required":
    raise SystemExit(
        "HICACHE_RUST=required: this version of HiCache has no Rust core yet. Unset HICACHE_RUST, or set it to"
        " auto or off, to build the pure Python package."
    )

setup()
