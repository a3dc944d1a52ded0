"""Redis servers for tests: real ones, on loopback, each with its own folder, stopped by their own handle.

    with RedisServer(folder) as server:
        store = RedisStore(server.url)
        server.client.keys()            # around the store

Needs ``redis-server``, or what ``HICACHE_TEST_REDIS_SERVER`` names; certificates need ``openssl``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from hicache.closing import Closing

START_LIMIT_S = 60.0
_POLL_S = 0.02
_PORTS = range(10_000, 32_768)


def free_port() -> int:
    """A port of loopback that nobody listens on now, and that nobody gets by chance before it is used.

    The kernel gives those above ``_PORTS`` to who asks for any; another process of the tests begins elsewhere.
    """
    for port in _own_ports():
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as servers do: old connections do no harm
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a cycle never ends")


@functools.cache
def _own_ports() -> Iterator[int]:
    """The same iterator each time, so that no port is given twice in a row."""
    begin = os.getpid() * 2011 % len(_PORTS)
    return itertools.cycle([*_PORTS[begin:], *_PORTS[:begin]])


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files of a CA made for one test run, and of a server's and a client's certificate."""

    ca_file: Path
    cert_file: Path
    key_file: Path


def make_certificates(folder: Path) -> Certificates:
    """A CA of our own and a certificate for ``localhost`` and 127.0.0.1 that it has signed."""
    folder.mkdir(parents=True, exist_ok=True)
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    cert, key, request = folder / "server.pem", folder / "server.key", folder / "server.csr"
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    sign = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial"]
    new_key = ["-newkey", "rsa:2048", "-nodes"]
    for arguments in (
        ["req", "-x509", *new_key, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=test CA"],
        ["req", *new_key, "-keyout", key, "-out", request, "-subj", "/CN=localhost"],
        ["x509", "-req", "-in", request, "-out", cert, "-days", "2", "-extfile", extensions, *sign],
    ):
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
    return Certificates(ca, cert, key)


class RedisServer(Closing):
    """A ``redis-server`` process, started at once.

    Args:
        folder: where it keeps its files; made if missing.
        settings: directives as in ``redis.conf``, without dashes.
        certificates: serve TLS, and nothing but TLS.
        users: ACL lines without the word ``user``.
        password: of the default user.
        is_sentinel: run as a sentinel.
        is_clustered: run as a node of a cluster, whose members talk at ``bus_port``.
        port: default: a free one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: Sequence[str] = (),
        certificates: Certificates | None = None,
        users: Sequence[str] = (),
        password: str | None = None,
        is_sentinel: bool = False,
        is_clustered: bool = False,
        port: int | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port() if port is None else port
        self.bus_port = free_port() if is_clustered else None
        self._folder = folder
        self._certificates = certificates
        self._password = password
        self._is_sentinel = is_sentinel
        self._process: subprocess.Popen[bytes] | None = None
        lines = ["bind 127.0.0.1", f'dir "{folder}"', "appendonly no", 'save ""']
        if certificates is None:
            lines.append(f"port {self.port}")
        else:
            lines += [
                "port 0",
                f"tls-port {self.port}",
                f'tls-ca-cert-file "{certificates.ca_file}"',
                f'tls-cert-file "{certificates.cert_file}"',
                f'tls-key-file "{certificates.key_file}"',
                "tls-auth-clients optional",
            ]
        if is_clustered:
            lines += ["cluster-enabled yes", f"cluster-port {self.bus_port}"]
        lines += [*settings, *(f"user {line}" for line in users)]
        if password is not None:
            lines.append(f"requirepass {password}")
        self._conf = folder / "redis.conf"
        self._conf.write_text("".join(f"{line}\n" for line in lines))
        self.start()

    @property
    def url(self) -> str:
        """For a store: one server, without credentials."""
        return f"{'redis' if self._certificates is None else 'rediss'}://127.0.0.1:{self.port}"

    @property
    def client(self) -> redis.Redis:
        """A blocking client with all rights; close it, or let the test end."""
        tls: dict[str, Any] = {}  # Any: keyword arguments of redis-py
        if self._certificates is not None:
            tls = {
                "ssl": True,
                "ssl_ca_certs": str(self._certificates.ca_file),
                "ssl_certfile": str(self._certificates.cert_file),
                "ssl_keyfile": str(self._certificates.key_file),
            }
        return redis.Redis(
            "127.0.0.1", self.port, password=self._password, protocol=2, single_connection_client=True, **tls
        )

    def ask(self, *words: object) -> Any:  # Any: whatever it answers
        """Run one command, with all rights."""
        with self.client as client:
            reply: Any = client.execute_command(*words)
            return reply

    def change_password(self, password: str | None) -> None:
        """Ask every client for another password from now on, those that are connected too; None: for none."""
        with self.client as client:
            client.config_set("requirepass", password or "")
            if password is not None:
                client.client_kill_filter(_type="normal", skipme=True)
        self._password = password

    def names(self) -> list[bytes]:
        """All keys it has."""
        return list(self.ask("KEYS", "*"))

    # ---- life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, again at the same port after it was stopped; returns once it answers."""
        program = os.environ.get("HICACHE_TEST_REDIS_SERVER", "redis-server")
        arguments = [program, str(self._conf), *(["--sentinel"] if self._is_sentinel else [])]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(arguments, stdout=log, stderr=log)
        wait_until(self._answers, f"redis-server in {self._folder} to answer")

    def stop(self) -> None:
        """End it as an administrator would. Idempotent."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a power cut would. Idempotent."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """``kill``."""
        self.kill()

    def pause(self) -> None:
        """It keeps its connections and answers nobody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on after ``pause``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(how)
        self._process.wait(timeout=START_LIMIT_S)
        self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"redis-server ended at once: {(self._folder / 'log').read_text()[-2000:]}")
        with contextlib.suppress(redis.ConnectionError), self.client as client:
            return bool(client.ping())
        return False


class RedisCluster(Closing):
    """Masters that share the slots between them; no replicas.

    Args:
        folder: with a folder for each node.
        num_masters: at least three, so that two still agree on what one is.
    """

    def __init__(self, folder: Path, num_masters: int = 3) -> None:
        settings = ("cluster-node-timeout 1000", "cluster-require-full-coverage no")
        self.nodes: list[RedisServer] = []
        try:
            for n in range(num_masters):
                node = RedisServer(folder / f"node-{n}", settings=settings, is_clustered=True)
                self.nodes.append(node)
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """For a store: a cluster, with all nodes as endpoints."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def close(self) -> None:
        """End all nodes. Idempotent."""
        for node in self.nodes:
            node.kill()

    def is_whole(self) -> bool:
        """Whether every node sees every other one at work."""
        for node in self.nodes:
            rows = node.ask("CLUSTER", "NODES").splitlines()  # as two words: else redis-py parses it
            info = node.ask("CLUSTER", "INFO")
            if len(rows) < len(self.nodes) or any(b"fail" in row or b"handshake" in row for row in rows):
                return False
            if b"cluster_state:ok" not in info or b"cluster_slots_ok:16384" not in info:
                return False
        return True

    def owner(self, name: bytes) -> RedisServer:
        """The node that serves a key's slot."""
        slot: int = self.nodes[0].ask("CLUSTER KEYSLOT", name)
        return self.nodes[slot * len(self.nodes) // 16384]

    def _join(self) -> None:
        count = len(self.nodes)
        bounds = [-(-n * 16384 // count) for n in range(count + 1)]
        for n, node in enumerate(self.nodes):
            node.ask("CLUSTER ADDSLOTSRANGE", bounds[n], bounds[n + 1] - 1)
            node.ask("CLUSTER SET-CONFIG-EPOCH", n + 1)
        for node in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER MEET", "127.0.0.1", node.port, node.bus_port)
        wait_until(self.is_whole, "the cluster to agree on its slots")


def wait_until(reached: Callable[[], bool], what: str) -> None:
    """Poll, bounded: for the start of processes only, never for the outcome of a race."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while not reached():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {START_LIMIT_S:g} s for {what}")
        time.sleep(_POLL_S)
