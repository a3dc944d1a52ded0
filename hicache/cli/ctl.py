"""``hicache ctl``: change a cache that is running, through its admin socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Annotated

import typer

from hicache.errors import ConfigError, HiCacheError
from hicache.types import MAX_SESSION_NAME

app = typer.Typer(help="Change a cache that is running.", no_args_is_help=True, add_completion=False)

CONNECT_S = 5.0
ANSWER_S = 900.0
"""Clearing may wait for leases, and emptying a store takes a while."""
MAX_ANSWER_BYTES = 1 << 20

Socket = Annotated[
    str,
    typer.Option("--socket", envvar="HICACHE_ADMIN_SOCKET", help="The cache's admin.socket."),
]


@app.command()
def status(socket_path: Socket) -> None:
    """Show what can be changed, as it is now."""
    _send(socket_path, {"command": "status"})


@app.command()
def clear(
    socket_path: Socket,
    everything: Annotated[bool, typer.Option("--all", help="Everything, in all stores too.")] = False,
    session: Annotated[str | None, typer.Option(help="What only this session leads to.")] = None,
    salt: Annotated[str | None, typer.Option(help="The namespace's salt.")] = None,
    lora: Annotated[str | None, typer.Option(help="The namespace's LoRA.")] = None,
    extra: Annotated[str | None, typer.Option(help="The namespace's extra key.")] = None,
    default_namespace: Annotated[
        bool, typer.Option("--default-namespace", help="The namespace without parts.")
    ] = False,
    tokens: Annotated[
        str | None, typer.Option(help="A JSON file: the list of token ids that all which goes begins with.")
    ] = None,
    wait: Annotated[float, typer.Option(min=0, max=600, help="Seconds to wait for open leases.")] = 0.0,
) -> None:
    """Throw payload away in every tier, and say how much (one of --all, --session, a namespace, --tokens)."""
    parts = {
        name: part for name, part in (("salt", salt), ("lora", lora), ("extra", extra)) if part is not None
    }
    in_namespace = bool(parts) or default_namespace or tokens is not None
    if everything + (session is not None) + in_namespace != 1:
        raise ConfigError(
            [
                "clear: expected one of --all, --session, or --tokens, --salt, --lora, --extra, --default-namespace"
            ]
        )
    command: dict[str, object] = {"command": "clear", "everything": everything, "wait_s": wait}
    if parts or default_namespace:
        command["namespace"] = parts
    if session is not None:
        if not 0 < len(session) <= MAX_SESSION_NAME:
            raise ConfigError(
                [f"--session: found {len(session)} letters; expected a name of 1 to {MAX_SESSION_NAME}"]
            )
        command["session"] = session
    if tokens is not None:
        command["tokens"] = _read_tokens(tokens)
    _send(socket_path, command)


@app.command()
def pause(socket_path: Socket) -> None:
    """Pause write-through."""
    _send(socket_path, {"command": "pause"})


@app.command()
def resume(socket_path: Socket) -> None:
    """Resume write-through."""
    _send(socket_path, {"command": "resume"})


@app.command()
def attach(
    socket_path: Socket,
    settings: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="As under tiers.stores: kind=disk path=/x ...")
    ],
) -> None:
    """Attach a store, after those that there are."""
    _send(socket_path, {"command": "attach", "store": _settings("attach", settings)})


@app.command()
def detach(socket_path: Socket, name: Annotated[str, typer.Argument(help="The store's name.")]) -> None:
    """Detach a store; its pages stay in it."""
    _send(socket_path, {"command": "detach", "name": name})


@app.command()
def capacity(
    socket_path: Socket,
    capacity: Annotated[str, typer.Argument(help="A size, like 20GiB.")],
    store: Annotated[str | None, typer.Option(help="Of this store; default: of L2.")] = None,
) -> None:
    """Change the capacity of L2 or of a store."""
    _send(socket_path, {"command": "capacity", "capacity": capacity, "store": store})


@app.command()
def policy(
    socket_path: Socket,
    settings: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="As under policy: eviction=slru ...")
    ],
) -> None:
    """Change policies."""
    _send(socket_path, {"command": "policy", "changes": _settings("policy", settings)})


_EXAMPLES = {"attach": "kind=memory", "policy": "eviction=slru"}


def _settings(command: str, settings: list[str]) -> dict[str, object]:
    """``a.b=VALUE`` arguments of a command as a tree; values as the YAML would hold them."""
    from hicache.cli.config import read_settings

    example = _EXAMPLES[command]
    empty = [setting for setting in settings if setting.partition("=")[1:] == ("=", "")]
    if empty:
        raise ConfigError(
            [f"{command} {each}: no value; expected KEY=VALUE, like {example}" for each in empty]
        )
    tree: dict[str, object] = {}
    for path, value in read_settings(settings, option=f"{command} ", example=example).items():
        *parents, key = path.split(".")
        place = tree
        for parent in parents:
            inner = place.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError([f"{path}: {parent} was given a value already"])
            place = inner
        place[key] = value
    return tree


def _read_tokens(path: str) -> list[int]:
    """The file of ``--tokens``."""
    try:
        tokens = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"--tokens: {path} cannot be read: {error.strerror}"]) from None
    except ValueError as error:
        raise ConfigError([f"--tokens: {path} is not JSON: {error}"]) from None
    except RecursionError:
        raise ConfigError(
            [f"--tokens: {path} is nested too deeply; expected token ids, like [1, 2, 3]"]
        ) from None
    if not isinstance(tokens, list):
        raise ConfigError([f"--tokens: {path} holds no list; expected token ids, like [1, 2, 3]"])
    for position, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < 2**31:
            raise ConfigError(
                [f"--tokens: {path} has {token!r:.80} at {position}; expected 0 to {2**31 - 1}"]
            )
    return tokens


def _send(path: str, command: dict[str, object]) -> None:
    """Print the result; what the cache refuses ends the command with its words."""
    reply = ask(path, command)
    if not reply.get("ok"):
        raise HiCacheError(str(reply.get("error", "the answer says nothing")))
    typer.echo(json.dumps(reply["result"], indent=2))


def ask(path: str, command: dict[str, object]) -> dict[str, object]:
    """The answer of the cache that listens at ``path``; raises ``HiCacheError`` if there is none, or no ``path``."""
    if not path.strip():
        raise ConfigError(["--socket: found an empty text; expected the cache's admin.socket"])
    received = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(CONNECT_S)
            connection.connect(str(Path(path).expanduser()))
            connection.sendall(json.dumps(command).encode() + b"\n")
            connection.settimeout(ANSWER_S)
            while not received.endswith(b"\n") and len(received) < MAX_ANSWER_BYTES:
                chunk = connection.recv(1 << 16)
                if not chunk:
                    break
                received += chunk
    except TimeoutError:
        raise HiCacheError(f"{path} did not answer in time; the command may have run") from None
    except OSError as error:
        raise HiCacheError(
            f"{path}: {error.strerror or error}; is the cache running, with admin.socket set to this?"
        ) from None
    try:
        reply = json.loads(received)
    except ValueError:
        raise HiCacheError(f"{path} hung up without an answer; it takes few connections at a time") from None
    except RecursionError:
        raise HiCacheError(f"{path} answered something else than a cache: it is nested too deeply") from None
    if not isinstance(reply, dict):
        raise HiCacheError(f"{path} answered something else than an object")
    return reply
