"""``hicache top``: what it shows, at any width, and what it says when nobody answers."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hicache.cache import HiCache
from hicache.cli import main
from hicache.cli._numbers import Numbers, numbers_of, reader
from hicache.cli._top_view import View, render
from hicache.config import load_config

Samples = list[tuple[str, Mapping[str, str], float]]


@pytest.fixture(scope="module")
def cache(short_folder: Path) -> Iterator[HiCache]:
    """A cache that has served three conversations, with its socket and its port open."""
    folder = short_folder / "top"
    folder.mkdir(mode=0o700)
    settings: dict[str, object] = {
        "admin.socket": str(folder / "a.sock"),
        "metrics.port": 0,
        "tiers.stores": [{"kind": "memory", "capacity": "64MiB", "name": "near"}],
        "model.page_size": 64,
        "sessions.idle_after": "1h",
        "sessions.expire_after": "2h",
    }
    with HiCache(load_config("cpu", overrides=settings, environ={})) as made:
        for turn in range(6):
            prompt = np.arange(640) + turn % 3
            with made.match(prompt, session=f"s{turn % 3}") as lease:
                lease.load()
                lease.reserve(len(prompt) - lease.reused)
                lease.release(prompt)
        made.drain()
        yield made


def target(cache: HiCache, way: str) -> list[str]:
    if way == "socket":
        return ["--socket", str(cache.config.admin.path)]
    assert cache.metrics is not None
    return ["--metrics", str(cache.metrics.port)]


def shown(now: Numbers, before: Numbers | None = None, *, width: int = 100) -> str:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(render(View(now, before, width)))
    return capture.get()


def reading(
    read_s: float, *, requests: int, device: int, computed: int, extra: Samples | None = None
) -> Numbers:
    samples: Samples = [
        ("hicache_info", {"version": "9.9", "core": "rust"}, 1),
        ("hicache_requests_total", {}, requests),
        ("hicache_prompt_tokens_total", {"source": "device"}, device),
        ("hicache_prompt_tokens_total", {"source": "computed"}, computed),
    ]
    return numbers_of(samples + (extra or []), read_s)


def row(text: str, first: str) -> str:
    (line,) = (line for line in text.splitlines() if line.strip().startswith(first))
    return " ".join(line.split())


# ---- a running cache -----------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["socket", "port"])
def test_once_shows_the_cache_by_either_way(
    cache: HiCache, way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with contextlib.suppress(SystemExit):  # typer's own way to end well
        assert main(["top", "--once", *target(cache, way)]) == 0
    text = capsys.readouterr().out
    tokens = cache.stats().tokens
    assert f"{tokens.hit_rate:.4f}" in row(text, "since start")
    assert row(text, "near").startswith("near closed ")
    assert "sessions: waiting 3" in text


def test_two_ways_to_the_cache_are_one_too_many(
    cache: HiCache, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a socket that a variable names, a port on the command line is the better word."""
    assert main(["top", "--once", *target(cache, "socket"), *target(cache, "port")]) == 2
    assert "top: --socket and --metrics both name the cache; keep one" in capsys.readouterr().err
    monkeypatch.setenv("HICACHE_ADMIN_SOCKET", "/nowhere")
    with contextlib.suppress(SystemExit):
        assert main(["top", "--once", *target(cache, "port")]) == 0


def test_both_ways_read_the_same_numbers(cache: HiCache) -> None:
    """But for what changes by being read: nothing does."""
    by_socket = reader(str(cache.config.admin.path), None)()
    assert cache.metrics is not None
    by_port = reader(None, str(cache.metrics.port))()
    # An exposition names every label and the creation times of none: both are made by one collector.
    assert by_socket.values == by_port.values
    assert by_socket.values


@pytest.mark.timeout(400)
def test_a_terminal_is_redrawn_until_ctrl_c(cache: HiCache) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "LINES": "50", "TERM": "xterm"}
    command = [sys.executable, "-c", "import sys; from hicache.cli import main; sys.exit(main(sys.argv[1:]))"]
    command += ["top", "--interval", "0.2", *target(cache, "socket")]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    try:
        received, limit_s = b"", time.monotonic() + 60
        while b"last 0.2" not in received and time.monotonic() < limit_s:
            if select.select([leader], [], [], 1)[0]:
                received += os.read(leader, 65536)
        assert b"last 0.2" in received, received.decode(errors="replace")
        process.send_signal(signal.SIGINT)
        limit_s = time.monotonic() + 100
        while process.poll() is None and time.monotonic() < limit_s:
            with contextlib.suppress(OSError):  # its end was closed
                if select.select([leader], [], [], 0.1)[0]:
                    os.read(leader, 65536)
        assert process.wait(1) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


# ---- what is shown -------------------------------------------------------------------------------------
def test_rates_are_those_between_two_readings() -> None:
    before = reading(10.0, requests=100, device=1000, computed=1000)
    now = reading(12.0, requests=110, device=1900, computed=1100)
    assert row(shown(now, before), "last 2 s") == "last 2 s 0.9000 900 0 0 100 5.0"


def test_one_reading_has_no_rates() -> None:
    text = shown(reading(10.0, requests=100, device=30, computed=10))
    assert "last" not in text
    assert row(text, "since start") == "since start 0.7500 30 0 0 10 –"


def test_a_cache_that_began_anew_has_no_rates_yet() -> None:
    before = reading(10.0, requests=100, device=1000, computed=1000)
    now = reading(12.0, requests=1, device=30, computed=10)
    assert "last" not in shown(now, before)


def test_a_breaker_that_is_open_and_broken_invariants_are_told() -> None:
    states = {"closed": 0, "open": 1, "probing": 0}
    extra: Samples = [
        ("hicache_store_breaker_state", {"store": "far", "state": s}, v) for s, v in states.items()
    ]
    extra.append(("hicache_store_used_bytes", {"store": "far"}, 3 * 2**30))
    extra.append(("hicache_audit_findings_total", {}, 2))
    text = shown(reading(1.0, requests=1, device=1, computed=1, extra=extra))
    assert row(text, "far").startswith("far open 3GiB")
    assert "audits found 2 broken invariants" in text


def test_slots_in_use_are_those_that_are_not_free() -> None:
    slots = {"free": 25, "evictable": 50, "protected": 10, "lease_owned": 10, "in_flight": 5}
    extra: Samples = [
        ("hicache_slots", {"component": "full", "tier": "device", "state": s}, v) for s, v in slots.items()
    ]
    extra.append(("hicache_dead_weight_bytes", {"component": "full", "tier": "device"}, 2048))
    text = shown(reading(1.0, requests=1, device=1, computed=1, extra=extra))
    assert row(text, "device") == "device full 100 75% 20 5 2KiB –"


@pytest.mark.parametrize("width", [30, 40, 60, 71, 72, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(cache: HiCache, width: int) -> None:
    text = shown(reader(str(cache.config.admin.path), None)(), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert f"{cache.stats().tokens.hit_rate:.4f}" in text
    assert re.search(r"waiting 3", text.replace("\n", " "))


# ---- what cannot be shown ------------------------------------------------------------------------------
def test_a_socket_where_nobody_listens_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--socket", str(tmp_path / "none.sock")]) == 2
    error = capsys.readouterr().err
    assert "No such file or directory; is the cache running, with admin.socket set to this?" in error


def test_a_port_where_nobody_listens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["top", "--once", "--metrics", f"127.0.0.1:{port}"]) == 2
    assert "refused; is the cache running, with metrics.port set to this?" in capsys.readouterr().err


def test_a_package_that_the_cache_lacks_is_told_by_the_command_s_name(
    cache: HiCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hicache.metrics", None)
    assert main(["top", "--once", *target(cache, "socket")]) == 2
    assert capsys.readouterr().err.startswith(
        "hicache: top: needs the package prometheus-client; pip install"
    )


@pytest.mark.parametrize("body", [b"hello\n", b"# TYPE up gauge\nup 1\n", b"\xff\xfe", b"a{ 1\n"])
def test_a_port_of_something_else_is_refused(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert main(["top", "--once", "--metrics", str(server.server_port)]) == 2
        server.shutdown()
    assert "answers, but not with the numbers of a cache" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["here", "127.0.0.1:", "127.0.0.1:x", "0", "70000"])
def test_an_address_that_is_none_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--metrics", address]) == 2
    assert "is no PORT or HOST:PORT, like 127.0.0.1:9400" in capsys.readouterr().err


def test_without_a_cache_to_ask_the_options_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HICACHE_ADMIN_SOCKET", raising=False)
    assert main(["top"]) == 2
    assert "--socket (its admin.socket) or --metrics HOST:PORT" in capsys.readouterr().err


def test_without_a_terminal_once_is_asked_for(cache: HiCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *target(cache, "socket")]) == 2
    assert "use --once" in capsys.readouterr().err
