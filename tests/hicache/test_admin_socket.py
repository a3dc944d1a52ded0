"""The admin socket: who gets in, what is understood, and what it takes to be shut out."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicache.admin_socket import MAX_CONNECTIONS, MAX_LINE_BYTES, AdminSocket
from hicache.cli import main
from hicache.closing import Closing
from hicache.config import load_config
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
MEMORY = {"kind": "memory", "name": "ram", "capacity": "1MiB"}


@pytest.fixture
def path(socket_folder: Path) -> Path:
    return socket_folder / "private" / "admin.sock"


@pytest.fixture
def rig(make_rig: MakeRig, path: Path) -> Rig:
    return make_rig(device=64, host=64, tiers__stores=[MEMORY], admin__socket=str(path))


class Client(Closing):
    """One connection."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(20)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")

    def send(self, raw: bytes) -> None:
        self._socket.sendall(raw)

    def read(self) -> Any:  # Any: JSON, None for the end
        line = self._lines.readline()
        return json.loads(line) if line else None

    def ask(self, command: object) -> Any:  # Any: JSON
        self.send(json.dumps(command).encode() + b"\n")
        return self.read()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def ctl(path: Path, *arguments: str) -> int:
    command, *rest = arguments
    try:
        return main(["ctl", command, "--socket", str(path), *rest])
    except SystemExit as stop:
        return int(stop.code or 0)


# ---- who gets in -------------------------------------------------------------------------------------------------------
def test_nothing_listens_unless_it_is_asked_for(make_rig: MakeRig) -> None:
    assert make_rig(device=16).cache._admin_socket is None


@pytest.mark.usefixtures("rig")
def test_socket_and_folder_are_the_owners_alone(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_open_to_others_is_refused(make_rig: MakeRig, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"admin.socket: the folder .* \(mode 755\) is not yours alone"):
        make_rig(device=16, admin__socket=str(folder / "admin.sock"))


def test_another_user_is_hung_up_on(rig: Rig, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with Client(path) as client:
        assert client.read() is None
    assert rig.cache.admin.status()["writes_paused"] is False


def test_a_socket_left_by_a_dead_process_is_taken_over_and_a_live_one_is_not(
    make_rig: MakeRig, path: Path
) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    first = make_rig(device=16, admin__socket=str(path))
    with pytest.raises(ConfigError, match="another process listens"):
        make_rig(device=16, admin__socket=str(path))
    first.close()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there and no socket"):
        make_rig(device=16, admin__socket=str(path))
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("value", "match"),
    [("admin.sock", "expected a path from / or ~ on"), ("/" + "x" * 120, "longer than 100")],
)
def test_a_path_that_cannot_be_a_socket_is_refused(value: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_config("cpu", overrides={"admin.socket": value}, environ={})


# ---- what is understood ------------------------------------------------------------------------------------------------
def test_each_command_does_what_the_method_does_and_answers_with_its_report(
    rig: Rig, path: Path, t: T
) -> None:
    rig.serve(t(16), session="chat")
    rig.cache.drain()
    with Client(path) as client:
        assert client.ask({"command": "status"})["result"]["stores"] == ["ram"]
        assert client.ask({"command": "pause"}) == {"ok": True, "result": {"changed": True}}
        assert client.ask({"command": "resume"}) == {"ok": True, "result": {"changed": True}}
        cleared = client.ask({"command": "clear", "session": "chat"})["result"]
        assert (cleared["slots"]["device"], cleared["kept_slots"]) == ({"full": 4}, 0)
        second = {"kind": "memory", "name": "second", "capacity": "1MiB"}
        attached = client.ask({"command": "attach", "store": second})
        assert attached == {"ok": True, "result": {"stores": ["ram", "second"], "warnings": []}}
        shrunk = client.ask({"command": "capacity", "store": "second", "capacity": "512KiB"})["result"]
        assert shrunk == {
            "before": {"bytes": 1 << 20},
            "after": {"bytes": 1 << 19},
            "is_reached": True,
            "freed_bytes": 0,
            "warnings": [
                (
                    "tiers.stores.1.capacity: 512KiB (524288 bytes) is less than tiers.stores.0 above it, 1MiB"
                    " (1048576 bytes): such a tier only costs"
                )
            ],
        }
        assert client.ask({"command": "detach", "name": "second"})["result"]["stores"] == ["ram"]
        policy = client.ask({"command": "policy", "changes": {"eviction": "slru"}})["result"]
        assert policy == {"changed": {"eviction": ["adaptive", "slru"]}, "warnings": []}
    rig.check_idle()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"nonsense", "Invalid JSON"),
        (b"[]", "should be an object"),
        (b"{}", "Unable to extract tag"),
        (b'{"command": "explode"}', "does not match any of the expected tags"),
        (b'{"command": "pause", "now": 1}', "now: Extra inputs are not permitted"),
        (b'{"command": "clear", "everything": "yes"}', "everything: Input should be a valid boolean"),
        (b'{"command": "clear", "tokens": [-1]}', "tokens.0: Input should be greater than or equal to 0"),
        (b'{"command": "clear"}', "clear takes one of"),
        (b'{"command": "clear", "session": "nobody"}', "session 'nobody' is not known"),
        (b'{"command": "clear", "everything": true, "wait_s": 1e9}', "wait_s: Input should be less than"),
        (
            b'{"command": "policy", "changes": {"eviction": "best"}}',
            "policy.eviction: found 'best'",
        ),
        (
            b'{"command": "capacity", "capacity": "1TiB"}',
            "tiers.host.capacity: found 1TiB, but L2 was made with",
        ),
        (b'{"command": "detach", "name": "tape"}', "no store is called 'tape'"),
        pytest.param(b"[" * 200_000, "recursion limit exceeded", id="endless nesting"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words_and_the_connection_lives_on(
    rig: Rig, path: Path, line: bytes, error: str
) -> None:
    before = rig.cache.admin.status()
    with Client(path) as client:
        client.send(line + b"\n")
        reply = client.read()
        assert reply["ok"] is False
        assert error in reply["error"]
        assert client.ask({"command": "status"})["ok"] is True
    assert rig.cache.admin.status() == before


# ---- being shut out ----------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("rig")
def test_a_line_without_end_is_cut_off(path: Path) -> None:
    with Client(path) as client:
        client.send(b"x" * (MAX_LINE_BYTES + 1))
        assert client.read()["error"] == f"a line is longer than {MAX_LINE_BYTES} bytes"
        assert client.read() is None


def test_whoever_says_nothing_is_hung_up_on(rig: Rig, path: Path) -> None:
    other = path.with_name("second.sock")
    with AdminSocket(rig.cache.admin, other, idle_s=0.05), Client(other) as client:
        assert client.read() is None


@pytest.mark.usefixtures("rig")
def test_there_are_only_so_many_connections(path: Path) -> None:
    clients = [Client(path) for _ in range(MAX_CONNECTIONS)]
    assert all(client.ask({"command": "status"})["ok"] for client in clients)
    with Client(path) as client:
        assert client.read() is None
    for each in clients:
        each.close()


def test_closing_the_cache_hangs_up_and_takes_the_socket_away(rig: Rig, path: Path) -> None:
    with Client(path) as client:
        assert client.ask({"command": "status"})["ok"]
        rig.close()
        assert client.read() is None
    assert not path.exists()


# ---- hicache ctl -------------------------------------------------------------------------------------------------------
def test_ctl_prints_the_report(
    rig: Rig, path: Path, t: T, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rig.serve(t(16))
    rig.cache.drain()
    prefix = tmp_path / "prefix.json"
    prefix.write_text(json.dumps(t(8).tolist()))
    assert ctl(path, "clear", "--tokens", str(prefix)) == 0
    assert json.loads(capsys.readouterr().out)["slots"]["device"] == {"full": 3}
    for arguments in (
        ["status"],
        ["pause"],
        ["resume"],
        ["attach", "kind=memory", "name=second", "capacity=1MiB", "breaker.enabled=false"],
        ["capacity", "1MiB", "--store", "second"],
        ["detach", "second"],
        ["policy", "eviction=fifo", "prefetch.mode=best_effort"],
        ["clear", "--salt", "tenant"],
        ["clear", "--all"],
    ):
        assert ctl(path, *arguments) == 0, arguments
    assert (rig.cache.config.policy.eviction, rig.cache.config.policy.prefetch.mode) == (
        "fifo",
        "best_effort",
    )
    rig.check_idle()


@pytest.mark.usefixtures("rig")
def test_ctl_ends_with_the_caches_words(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(path, "detach", "tape") == 2
    assert "no store is called 'tape'; there are: ram" in capsys.readouterr().err
    assert ctl(path, "clear", "--tokens", "/nowhere.json") == 2
    assert "--tokens: /nowhere.json cannot be read" in capsys.readouterr().err
    for setting in ("eviction", "=slru"):
        assert ctl(path, "policy", setting) == 2
        assert f"policy {setting}: expected KEY=VALUE, like eviction=slru" in capsys.readouterr().err
    assert ctl(path, "policy", "eviction=") == 2
    assert "policy eviction=: no value; expected KEY=VALUE, like eviction=slru" in capsys.readouterr().err
    assert ctl(path, "attach", "kind") == 2
    assert "attach kind: expected KEY=VALUE, like kind=memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--all", "--session", "chat"],
        ["--session", "chat", "--default-namespace"],
        ["--all", "--salt", "x"],
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("rig")
def test_ctl_clear_names_its_own_options(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert ctl(path, "clear", *arguments) == 2
    assert "clear: expected one of --all, --session, or --tokens, --salt, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "holds no list; expected token ids"),
        ("[1, true]", "has True at 1; expected 0 to 2147483647"),
        ("[1, 2, -1]", "has -1 at 2; expected"),
        (f"[{2**31}]", "has 2147483648 at 0; expected"),
        pytest.param("[" * 200_000, "is nested too deeply; expected token ids", id="endless nesting"),
    ],
)
@pytest.mark.usefixtures("rig")
def test_ctl_names_the_token_that_is_none(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    file = tmp_path / "prefix.json"
    file.write_text(text)
    assert ctl(path, "clear", "--tokens", str(file)) == 2
    assert f"--tokens: {file} {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["clear", "--session", ""], "--session: found 0 letters; expected a name of 1 to"),
        (["attach", "kind=disk"], "tiers.stores.1.path: missing"),
        (["capacity", "0"], "tiers.host.capacity: found '0'"),
        (["policy", "prefetch.mode=never"], "policy.prefetch.mode: found 'never'"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("rig")
def test_ctl_names_keys_and_options_and_no_arguments_of_the_interface(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert ctl(path, *arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "(mapping)" not in error


def test_ctl_says_when_nobody_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(tmp_path / "none.sock", "status") == 2
    assert "is the cache running, with admin.socket set to this?" in capsys.readouterr().err


def test_ctl_says_when_something_else_answers(
    socket_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = socket_folder / "other.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"[" * 200_000 + b"\n")

        other = threading.Thread(target=reply)
        other.start()
        try:
            assert ctl(path, "status") == 2
        finally:
            other.join()
    assert f"{path} answered something else than a cache" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["ctl", "status"], ["top", "--once"]], ids=" ".join)
def test_a_socket_without_a_name_is_told_with_what_is_expected(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([*command, "--socket", ""]) == 2
    assert "--socket: found an empty text; expected the cache's admin.socket" in capsys.readouterr().err
