"""``hicache config check`` and ``show``."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

import hicache.cli
from hicache.cli import main
from hicache.config import dump_config, load_config
from hicache.errors import HiCacheError


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def run(*arguments: str) -> int:
    """The exit code of ``hicache arguments``."""
    with pytest.raises(SystemExit) as caught:
        sys.exit(main(arguments))
    code = caught.value.code
    assert isinstance(code, int)
    return code


def rows(table: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if "│" in line
    ]


def test_check_prints_slots_bytes_and_stores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("config", "check", "cpu") == 0
    out = capsys.readouterr().out
    assert out.startswith("cpu: OK")
    assert rows(out) == [
        ["device", "full", "path", "8,192", "8,192", "64MiB", "4,194,304"],
        ["host", "full", "path", "32,768", "8,192", "256MiB", "16,777,216"],
    ]
    assert "store disk: disk auto, 2GiB a rank" in out
    path = tmp_path / "x"
    assert (
        run("config", "check", "cpu", "--set", "ranks.tp_size=2", "--set", f"tiers.stores.0.path={path}") == 0
    )
    assert f"store disk: disk {path}, 2GiB over all that share it" in capsys.readouterr().out


def test_check_marks_what_components_share(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "hybrid.yaml"
    file.write_text(
        "model: {name: m, page_size: 16, components: {full: {rule: path, bytes_per_token: 64B},"
        " mamba: {rule: checkpoint, layers: 3, state_bytes: 4KiB}}}\n"
        "tiers: {device: {kind: cpu, capacity: 1MiB}, host: {capacity: 2MiB, pinned: false}}\n"
    )
    assert run("config", "check", str(file)) == 0
    out = capsys.readouterr().out
    assert rows(out)[0] == ["device", "full", "path", "≤1,024", "1,024", "1MiB", "16,384"]
    assert rows(out)[3][:4] == ["host", "mamba", "checkpoint", "≤508"]
    text = " ".join(out.split())
    assert (
        "device: one budget of 1MiB for all components; each row is what that component could have alone"
        in text
    )
    assert "host: one budget of 2MiB for all components" in text
    assert (
        "note: model.components.mamba.state_bytes: 4096 bytes do not divide over 3 layers; a state takes 4098, of"
        " which 2 are padding"
    ) in text
    assert "note: tiers.host: a slot of mamba is 4098 bytes and takes 12 units of 344, 0.7% more" in text
    assert (
        run("config", "check", str(file), "--set", "tiers.device.split=fixed", "--set", "tiers.host=null")
        == 0
    )
    out = capsys.readouterr().out
    assert "≤" not in out
    assert "budget" not in out


def test_check_prints_warnings_and_still_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check", "cpu", "--set", "model.max_tokens=400") == 0
    assert "warning: model.page_size: a page of 512 tokens" in capsys.readouterr().out


def test_check_says_that_it_shows_one_rank_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check", "cpu", "--set", "ranks.tp_size=2") == 0
    out = capsys.readouterr().out
    assert rows(out)[0][3] == "4,096"
    assert "of one rank out of 2" in out


def test_a_refusal_prints_all_problems_on_stderr_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("model: {name: m, pagesize: 3}\npolicy: {eviction: lur}\n")
    assert run("config", "check", str(path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == "hicache: refused, 4 problems:"
    assert "did you mean page_size?" in captured.err
    assert "Traceback" not in captured.err


def test_show_prints_value_and_origin_of_every_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE__TIERS__HOST__CAPACITY", "1GiB")
    assert run("config", "show", "cpu", "--set", "policy.eviction=mru", "--set", "model.weights=007") == 0
    found = {key: (value, origin) for key, value, origin in rows(capsys.readouterr().out)}
    assert found["tiers.host.capacity"] == ("1GiB", "environment HICACHE__TIERS__HOST__CAPACITY")
    assert found["policy.eviction"] == ("mru", "argument")
    assert found["model.weights"] == ("'007'", "argument")
    assert found["model.page_size"] == ("512", "file cpu.yaml:15")
    assert found["policy.granularity"] == ("page", "default")


def test_show_without_a_file_shows_the_cpu_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show") == 0
    assert "effective configuration of cpu" in capsys.readouterr().out


def test_show_prints_markup_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--set", "model.name=[red]x[/red]") == 0
    assert "[red]x[/red]" in capsys.readouterr().out


def test_show_as_yaml_is_the_effective_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "hybrid", "--yaml", "--set", "model.page_size=32") == 0
    out = capsys.readouterr().out
    config = load_config(yaml.safe_load(out), environ={})
    assert config.model.page_size == 32
    assert dump_config(config) == out


def test_show_never_prints_the_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    (tmp_path / "secret").write_text("hunter2")
    for key, value in (("password_env", "SECRET"), ("password_file", str(tmp_path / "secret"))):
        for command in ("show", "check"):
            assert run("config", command, "redis", "--set", f"tiers.stores.0.{key}={value}") == 0
    captured = capsys.readouterr()
    assert "hunter2" not in captured.out + captured.err


@pytest.mark.parametrize("setting", ["policy.eviction", "=lru", ""], ids=str)
def test_a_setting_that_is_no_pair_is_refused(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--set", setting) == 2
    assert "expected KEY=VALUE" in capsys.readouterr().err


def test_a_setting_that_is_no_yaml_is_refused_with_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--set", "tiers.host={") == 2
    assert "tiers.host (argument): not valid YAML" in capsys.readouterr().err


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("confg") == 2
    assert "confg" in capsys.readouterr().err


# ---- how commands are found ------------------------------------------------------------------------
def fake_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "fake.py").write_text(text)
    monkeypatch.setattr(hicache.cli, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "hicache.cli.fake", raising=False)


def test_a_file_with_one_command_is_that_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import typer\napp = typer.Typer()\n@app.command()\ndef go(n: int) -> None:\n    'Go on.'\n    typer.echo(n)\n"
    fake_command(monkeypatch, tmp_path, text)
    assert run("fake", "7") == 0
    assert capsys.readouterr().out == "7\n"
    assert run("fake", "--help") == 0
    out = capsys.readouterr().out
    assert "Go on." in out
    assert "completion" not in out


def test_a_command_that_cannot_be_imported_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_command(monkeypatch, tmp_path, "import no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main(["--help"])


def test_any_error_of_ours_is_one_block_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = ModuleType("hicache.cli.config")
    module.app = typer.Typer()

    @module.app.command()
    def fail() -> None:
        raise HiCacheError("no room")

    monkeypatch.setitem(sys.modules, "hicache.cli.config", module)
    assert run("config") == 2
    assert capsys.readouterr().err == "hicache: no room\n"


def test_check_refuses_a_tree_core_that_cannot_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_CORE", "fast")
    assert run("config", "check", "cpu") == 2
    assert "'fast' is not a tree core; choose auto, rust, python" in capsys.readouterr().err


SECRET_PLACES = ["password_env", "password_file", "codec.key_env", "codec.key_file"]


@pytest.mark.parametrize("key", SECRET_PLACES)
@pytest.mark.parametrize("command", ["config show", "config check", "store stat --config", "doctor --config"])
def test_a_secret_written_where_its_name_belongs_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, key: str
) -> None:
    """Nor is one that stands where no secret may be; ``tests/config/test_redis_url.py`` has those in addresses."""
    variable = "HICACHE__TIERS__STORES__0__" + key.upper().replace(".", "__")
    monkeypatch.setenv(variable, "hunter2")
    with pytest.raises(SystemExit):
        sys.exit(main([*command.split(), "redis"]))
    out, err = capsys.readouterr()
    assert "hunter2" not in out + err
    assert command != "config show" or "not shown, since it may be the secret itself" in out


@pytest.mark.parametrize(
    "key", ["password", "passwd", "token", "secret", "auth", "codec.key", "username.password"]
)
def test_the_value_of_a_key_that_is_unknown_is_not_shown(
    capsys: pytest.CaptureFixture[str], key: str
) -> None:
    assert run("config", "show", "redis", "--set", f"tiers.stores.0.{key}=hunter2") == 2
    assert "hunter2" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("password_env", "CACHE_PASSWORD"),
        ("password_file", "/run/secrets/cache"),
        ("codec.key_env", "KEY"),
        ("codec.key_file", "~/key"),
    ],
)
def test_where_a_secret_is_is_shown(capsys: pytest.CaptureFixture[str], key: str, value: str) -> None:
    assert run("config", "show", "redis", "--set", f"tiers.stores.0.{key}={value}") == 0
    (row,) = (row for row in rows(capsys.readouterr().out) if row[0] == f"tiers.stores.0.{key}")
    assert row[1] == value
