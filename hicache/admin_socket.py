"""A local socket for ``hicache ctl``: one JSON object a line, one answer a line.

::

    {"command": "clear", "session": "chat-17"}
    {"ok": true, "result": {"slots": {...}, "kept_slots": 0, "undeleted_pages": 0}}
    {"ok": false, "error": "..."}

Only the process's own user gets in: the folder is 0700, the socket 0600, and the kernel is asked who is at
the other end. Whoever says nothing for a while, or too much at once, is shut out; the cache never waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import struct
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from hicache.admin import Admin
from hicache.closing import Closing
from hicache.config.fields import Section
from hicache.errors import ConfigError, HiCacheError
from hicache.types import MAX_SESSION_NAME, Namespace

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 4 << 20
"""A prefix of 300,000 tokens fits."""
IDLE_S = 30.0
MAX_CONNECTIONS = 4
MAX_WAIT_S = 600.0
JOIN_S = 5.0
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


# ---- commands --------------------------------------------------------------------------------
class NamespaceParts(Section):
    """A namespace as JSON: ``null`` is absent, an empty text is not."""

    salt: str | None = None
    lora: str | None = None
    extra: str | None = None


class Clear(Section):
    """Drop everything, or what a namespace, a session or a prefix has; wait so long for what is held."""

    command: Literal["clear"]
    everything: bool = False
    namespace: NamespaceParts | None = None
    session: str | None = Field(default=None, min_length=1, max_length=MAX_SESSION_NAME)
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S)

    def run(self, admin: Admin) -> object:
        parts = self.namespace
        return admin.clear(
            everything=self.everything,
            namespace=None if parts is None else Namespace(parts.salt, parts.lora, parts.extra),
            session=self.session,
            tokens=self.tokens,
            wait_s=self.wait_s,
        )


class Pause(Section):
    """Write nothing more to L3."""

    command: Literal["pause"]

    def run(self, admin: Admin) -> object:
        return {"changed": admin.pause_writes()}


class Resume(Section):
    """Write to L3 again."""

    command: Literal["resume"]

    def run(self, admin: Admin) -> object:
        return {"changed": admin.resume_writes()}


class Attach(Section):
    """Open one more store."""

    command: Literal["attach"]
    store: dict[str, Any]  # Any: the loader of the configuration checks it

    def run(self, admin: Admin) -> object:
        return admin.attach(self.store)


class Detach(Section):
    """Close the store named."""

    command: Literal["detach"]
    name: str

    def run(self, admin: Admin) -> object:
        return admin.detach(self.name)


class Capacity(Section):
    """Of L2, or of the store named."""

    command: Literal["capacity"]
    capacity: str | int
    store: str | None = None

    def run(self, admin: Admin) -> object:
        if self.store is None:
            return admin.set_host_capacity(self.capacity)
        return admin.set_store_capacity(self.store, self.capacity)


class Policy(Section):
    """Change keys of ``policy``."""

    command: Literal["policy"]
    changes: dict[str, Any] = Field(min_length=1)  # Any: as above

    def run(self, admin: Admin) -> object:
        return admin.set_policy(self.changes)


class Status(Section):
    """What runs and how it is set."""

    command: Literal["status"]

    def run(self, admin: Admin) -> object:
        return admin.status()


class Numbers(Section):
    """All samples that Prometheus would read."""

    command: Literal["numbers"]

    def run(self, admin: Admin) -> object:
        return {"samples": admin.numbers()}


Command = Clear | Pause | Resume | Attach | Detach | Capacity | Policy | Status | Numbers
_COMMANDS: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="command")])


def answer(admin: Admin, line: bytes) -> dict[str, object]:
    """Run one command. Never raises: what is refused is told."""
    try:
        command = _COMMANDS.validate_json(line)
        result = command.run(admin)
    except ValidationError as error:
        return {"ok": False, "error": "; ".join(map(_sentence, error.errors(include_url=False)))}
    except (HiCacheError, ValueError) as error:
        return {"ok": False, "error": str(error)}
    except Exception as error:
        logger.exception("admin: a command failed")
        return {"ok": False, "error": f"failed inside ({type(error).__name__}); see the log"}
    return {"ok": True, "result": result if isinstance(result, dict) else asdict(result)}  # type: ignore[call-overload]  # a report


def _sentence(problem: Any) -> str:  # Any: pydantic's own record
    path = ".".join(str(part) for part in problem["loc"])
    return f"{path}: {problem['msg']}" if path else str(problem["msg"])


# ---- the socket ------------------------------------------------------------------------------
class AdminSocket(Closing):
    """Listens at ``path`` on threads of its own.

    Raises:
        ConfigError: the folder is not the user's alone, somebody listens there, or it cannot be listened on.
    """

    def __init__(self, admin: Admin, path: Path, *, idle_s: float = IDLE_S) -> None:
        self.path = path
        self._admin = admin
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._listener = _listen(path)
        self._inode = path.lstat().st_ino
        self._thread = threading.Thread(target=self._accept, name="hicache-admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and hang up. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            connections = list(self._connections)
        for each in (self._listener, *connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(JOIN_S)
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:  # not somebody else's by now
                self.path.unlink()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                is_welcome = not self._is_closed and len(self._connections) < MAX_CONNECTIONS
                if is_welcome:
                    self._connections.add(connection)
            if not is_welcome or not _is_owner(connection):
                self._hang_up(connection)
                continue
            threading.Thread(target=self._talk, args=(connection,), name="hicache-ctl", daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(self._idle_s)
            received = b""
            while chunk := connection.recv(1 << 16):
                *lines, received = (received + chunk).split(b"\n")
                for line in lines:
                    connection.sendall(_line(answer(self._admin, line)))
                if len(received) > MAX_LINE_BYTES:
                    refusal = f"a line is longer than {MAX_LINE_BYTES} bytes"
                    connection.sendall(_line({"ok": False, "error": refusal}))
                    return
        except OSError as error:  # it hung up, or said nothing for too long
            logger.debug("admin: %s", error)
        finally:
            self._hang_up(connection)

    def _hang_up(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()


def _line(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _is_owner(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, user, _ = _PEER.unpack(credentials)
    if user != os.geteuid():
        logger.warning("admin: user %s was turned away", user)
    return bool(user == os.geteuid())


def place_refusal(path: Path) -> str | None:
    """Why this is no place for a socket: a folder that is not the user's alone, or something else that is there.

    Raises:
        OSError: it cannot be looked at; ``FileNotFoundError`` where the folder is still to be made.
    """
    folder = path.parent
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        return f"admin.socket: the folder {folder} (mode {mode:o}) is not yours alone; chmod 700, or another"
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        return f"admin.socket: {path} is there and no socket; remove it, or name another path"
    return None


def _listen(path: Path) -> socket.socket:
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refusal = place_refusal(path)
        if refusal is not None:
            raise ConfigError([refusal])
        if path.exists():
            _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(MAX_CONNECTIONS)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            [f"admin.socket: {path} cannot be listened on: {error.strerror or error}"]
        ) from None
    return listener


def _remove_stale(path: Path) -> None:
    """A socket whose process is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError([f"admin.socket: another process listens at {path}; name another path"])
