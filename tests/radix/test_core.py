"""Which tree core runs, and what is said about it."""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType

import pytest

from hicache.cli import main
from hicache.errors import CoreUnavailableError
from hicache.radix.core import CORE_VARIABLE, EXTENSION, core_kind, is_debug_build, make_core
from hicache.testing.trees import tree_config
from hicache.types import ComponentSpec

PYTHON_RULE = ComponentSpec("odd", "somewhere.OddRule")


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == EXTENSION:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.delitem(sys.modules, EXTENSION, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Nothing(), *sys.meta_path])


def test_without_the_extension_auto_takes_python_and_says_why(no_extension: None) -> None:
    assert core_kind("auto") == ("python", "the extension was not built")


def test_without_the_extension_asking_for_rust_is_an_error(no_extension: None) -> None:
    with pytest.raises(CoreUnavailableError, match="was not built"):
        core_kind("rust")


def test_a_broken_extension_is_an_error_even_for_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == EXTENSION:
                raise ImportError("undefined symbol: PyOdd")

    monkeypatch.delitem(sys.modules, EXTENSION, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(CoreUnavailableError, match="broken: undefined symbol"):
        core_kind("auto")


def test_an_installed_extension_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CORE_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, EXTENSION, ModuleType(EXTENSION))
    assert core_kind() == ("rust", "the extension is installed")


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORE_VARIABLE, "python")
    assert core_kind() == ("python", "asked for")


def test_a_rule_written_in_python_takes_the_python_core() -> None:
    kind, reason = core_kind("auto", [PYTHON_RULE])
    assert kind == "python"
    assert "somewhere.OddRule of odd is written in Python" in reason


def test_a_rule_written_in_python_cannot_have_the_rust_core() -> None:
    with pytest.raises(CoreUnavailableError, match="written in Python"):
        core_kind("rust", [PYTHON_RULE])


@pytest.mark.skipif(
    os.environ.get("HICACHE_REQUIRE_RUST") != "1", reason="asks for the Rust core: HICACHE_REQUIRE_RUST=1"
)
def test_where_the_rust_core_is_required_it_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CORE_VARIABLE, raising=False)
    assert core_kind() == ("rust", "the extension is installed")
    assert type(make_core(tree_config())).__name__ == "RustTreeCore"
    assert not is_debug_build()


def test_an_unknown_core_is_an_error() -> None:
    with pytest.raises(CoreUnavailableError, match="choose auto, rust, python"):
        core_kind("haskell")


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hicache.radix.core"):
        make_core(tree_config(), "python")
    assert caplog.messages == ["tree core: python (asked for)"]


def test_doctor_says_which_core_runs_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["doctor"])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["core"].startswith("{} ({}".format(*core_kind()))
    assert {"python", "torch", "cuda"} <= set(lines)
