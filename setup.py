"""The one thing that pyproject.toml cannot say: whether to build the Rust tree core.

``HICACHE_RUST`` is ``auto`` (default: build it, and where that fails say so and ship the Python core alone),
``required`` (failure is fatal) or ``off`` (a wheel for any platform).
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

CHOICES = ("auto", "required", "off")
CRATE = Path("rust/hicache-py/Cargo.toml")


def why_not(choice: str) -> str | None:
    """What keeps the core from being built, apart from the compiler."""
    if choice == "off":
        return "HICACHE_RUST=off"
    if not CRATE.exists():
        return f"{CRATE} is not part of these sources"
    try:
        import setuptools_rust  # noqa: F401
    except ImportError:
        return "setuptools-rust is not installed"
    return None if shutil.which("cargo") else "cargo is not installed (https://rustup.rs)"


choice = os.environ.get("HICACHE_RUST", "auto")
if choice not in CHOICES:
    raise SystemExit(f"HICACHE_RUST: expected one of {', '.join(CHOICES)}; found {choice!r}")
problem = why_not(choice)
if problem is None:
    from setuptools_rust import Binding, RustExtension

    core = RustExtension(
        "hicache.radix._core",
        path=str(CRATE),
        binding=Binding.PyO3,
        debug=False,  # an editable install would get a debug build, ten times slower
        optional=choice == "auto",
        py_limited_api=True,
    )
    setup(rust_extensions=[core], options={"bdist_wheel": {"py_limited_api": "cp311"}})
elif choice == "required":
    raise SystemExit(f"HICACHE_RUST=required: the Rust core cannot be built: {problem}")
else:
    if choice == "auto":
        sys.stderr.write(f"warning: HiCache is built without its Rust core, which is faster: {problem}\n")
    setup()
