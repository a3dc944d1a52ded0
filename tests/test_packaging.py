"""What ships: the package list, the folders on disk and the content of a built wheel are one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED_FOLDERS = ("config", "radix", "tiers", "transfer")
SOURCES = ("hicache", *LINKED_FOLDERS)


def python_modules() -> set[str]:
    """Archive names of every module on disk, read from the real folders and not through the links."""
    names = {f"hicache/{path}" for folder in LINKED_FOLDERS for path in modules_below(ROOT, folder)}
    return names | set(modules_below(ROOT, "hicache"))


def modules_below(parent: Path, folder: str) -> list[str]:
    found: list[str] = []
    for directory, subdirectories, files in os.walk(parent / folder):  # os.walk stays out of links
        subdirectories[:] = [name for name in subdirectories if name != "__pycache__"]
        relative = Path(directory).relative_to(parent)
        found += [str(PurePosixPath(relative) / name) for name in files if name.endswith((".py", ".pyi"))]
    return found


def packages_on_disk() -> set[str]:
    return {str(PurePosixPath(name).parent).replace("/", ".") for name in python_modules()}


def setuptools_table() -> dict[str, Any]:  # Any: TOML
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return table


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that no build/ of the checkout leaks into it."""
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for folder in SOURCES:
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run(
        [*command, "-w", str(wheels), str(source)],
        env={
            **os.environ,
            "HICACHE_RUST": "off",
        },  # a wheel for any platform, whatever CI wants of the checkout
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = wheels.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.parametrize("folder", LINKED_FOLDERS)
def test_each_root_folder_is_linked_into_the_package_by_a_relative_link(folder: str) -> None:
    assert (ROOT / "hicache" / folder).readlink() == Path(f"../{folder}")


def test_the_package_list_names_exactly_the_folders_that_hold_modules() -> None:
    listed = setuptools_table()["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_on_disk()


def test_every_package_has_an_init_module() -> None:
    modules = python_modules()
    assert [
        name for name in packages_on_disk() if f"{name.replace('.', '/')}/__init__.py" not in modules
    ] == []


def test_the_folder_map_names_exactly_the_linked_folders() -> None:
    assert setuptools_table()["package-dir"] == {f"hicache.{folder}": folder for folder in LINKED_FOLDERS}


def test_a_wheel_holds_every_module_once(wheel_names: list[str]) -> None:
    shipped = [name for name in wheel_names if name.endswith((".py", ".pyi"))]
    assert sorted(shipped) == sorted(python_modules())


def test_a_wheel_holds_the_presets_the_kernel_and_the_type_marker(wheel_names: list[str]) -> None:
    presets = {f"hicache/config/presets/{path.name}" for path in (ROOT / "config/presets").glob("*.yaml")}
    shipped = {
        name for name in wheel_names if not name.endswith((".py", ".pyi")) and ".dist-info/" not in name
    }
    assert shipped == {"hicache/py.typed", "hicache/transfer/page_copy.cu", *presets}


def test_a_wheel_installs_no_top_level_name_but_hicache(wheel_names: list[str]) -> None:
    tops = {PurePosixPath(name).parts[0] for name in wheel_names}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"hicache"}


def test_a_wheel_runs_on_any_platform(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize("folder", LINKED_FOLDERS)
def test_a_linked_folder_imports_from_an_unpacked_wheel(wheel: Path, tmp_path: Path, folder: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hicache.{folder} as m; print(m.__file__)"
    )
    command = [sys.executable, "-I", "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    assert run.stdout.strip() == str(tmp_path / "hicache" / folder / "__init__.py")


def test_a_wheel_holds_the_licence(wheel_names: list[str]) -> None:
    assert [name for name in wheel_names if name.endswith("/LICENSE")] != []


def test_setup_refuses_a_choice_it_does_not_know() -> None:
    run = run_setup("maybe")
    assert run.returncode != 0
    assert "expected one of auto, required, off" in run.stderr


@pytest.mark.parametrize(
    ("choice", "is_refused", "said"),
    [
        pytest.param("required", True, "cargo is not installed", id="required"),
        pytest.param("auto", False, "warning: HiCache is built without its Rust core", id="auto"),
        pytest.param("off", False, "", id="off"),
    ],
)
def test_without_cargo_only_a_required_rust_core_is_an_error(
    choice: str, is_refused: bool, said: str
) -> None:
    run = run_setup(choice, PATH="")
    assert (run.returncode != 0) == is_refused
    assert said in run.stderr


def run_setup(choice: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "--version"]
    merged = {**os.environ, **environment, "HICACHE_RUST": choice}
    return subprocess.run(
        command, cwd=ROOT, env=merged, capture_output=True, text=True, check=False, timeout=250
    )
