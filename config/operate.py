"""What a running cache tells of itself: metrics, explanations, events."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hicache.config.fields import MAX_PORT, Problem, Section, Text, is_port, one_of
from hicache.config.units import describe

ANY_PORT = 0
_HOST = re.compile(r"\w[\w.-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")
"""A name, an address, or one of IPv6 (without brackets), maybe of one interface."""
FREE_PORTS = ("*", "0")
"""How ZeroMQ is told to take a free one."""
EVENT_FORMATS = ("map", "array")
EVENT_HASHES = ("bytes", "int")


class MetricsConfig(Section):
    """A port that Prometheus scrapes. Without one nothing listens; ``hicache.metrics`` still works."""

    port: int | None = Field(
        default=None, ge=ANY_PORT, le=MAX_PORT, description="where to serve /metrics; 0 takes a free one"
    )
    host: Text = Field(
        default="127.0.0.1", description="address to listen on; the default is this machine only"
    )

    def problems(self) -> Iterator[Problem]:
        if _HOST.fullmatch(self.host) is None:
            yield Problem(
                ("host",),
                f"found {describe(self.host)}; expected the name or address of this machine, like 0.0.0.0",
            )


class ExplainConfig(Section):
    """Keep what is needed to say why a request was not reused in full."""

    enabled: bool = Field(default=False, description="answer lease.explain(); costs time on every request")
    ledger_pages: int = Field(
        default=1_000_000, ge=1, description="remember so many pages that left, about 300 bytes each"
    )


class EventsConfig(Section):
    """Residency events over ZeroMQ, in the shape that routers of vLLM, SGLang and Dynamo read."""

    endpoint: Text | None = Field(
        default=None, description="where to publish, like tcp://127.0.0.1:5557; default: nowhere"
    )
    replay_endpoint: Text | None = Field(
        default=None, description="where subscribers ask for what they missed, like tcp://127.0.0.1:5558"
    )
    topic: str = Field(default="", description="first frame of every message")
    format: Annotated[
        Literal["map", "array"], BeforeValidator(one_of("a format of events", EVENT_FORMATS))
    ] = Field(default="map", description="map (vLLM now) or array (SGLang, and vLLM before)")
    hashes: Annotated[Literal["bytes", "int"], BeforeValidator(one_of("a kind of hashes", EVENT_HASHES))] = (
        Field(
            default="bytes", description="bytes: whole page keys; int: 64 bits of them, for SGLang's readers"
        )
    )
    buffer_batches: int = Field(default=10_000, ge=1, description="keep so many batches for replay")
    queue_batches: int = Field(default=10_000, ge=1, description="batches waiting to be sent, at most")

    def problems(self) -> Iterator[Problem]:
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is None:
                continue
            if not value.startswith(("tcp://", "ipc://")):
                yield Problem((name,), f"found {value}; expected tcp://HOST:PORT or ipc://PATH")
            elif value.startswith("tcp://") and not _has_port(value):
                yield Problem(
                    (name,),
                    f"found {value}; expected tcp://HOST:PORT with a port of 1 to {MAX_PORT}, or * for a free one",
                )
        if self.replay_endpoint is None:
            return
        if self.endpoint is None:
            yield Problem(("replay_endpoint",), "is given without endpoint; give both, or neither")
        elif self.replay_endpoint == self.endpoint and _is_one(self.endpoint):
            yield Problem(
                ("replay_endpoint",), f"found {self.endpoint}, which is endpoint too; expected another one"
            )


def _is_one(endpoint: str) -> bool:
    """Not so where a free port is asked for: two of these are two."""
    return endpoint.startswith("ipc://") or endpoint.rpartition(":")[2] not in FREE_PORTS


def _has_port(endpoint: str) -> bool:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return bool(host) and (port in FREE_PORTS or is_port(port))


class TracingConfig(Section):
    """Spans for OpenTelemetry, to the tracer provider that the application has set up."""

    enabled: bool = Field(default=False, description="make spans; needs hicache[otel]")


MAX_SOCKET_PATH = 100
"""Bytes; the kernel takes 107."""


class AdminConfig(Section):
    """A socket for ``hicache ctl``. Without one nothing listens; ``cache.admin`` still works."""

    socket: Text | None = Field(
        default=None,
        description="path of a Unix socket, like ~/.hicache/admin.sock, in a folder that is yours alone (0700)",
    )

    def problems(self) -> Iterator[Problem]:
        if self.socket is None:
            return
        try:
            path = Path(self.socket).expanduser()
        except RuntimeError:
            yield Problem(
                ("socket",), f"found {self.socket}, whose home folder is unknown; write the whole path"
            )
            return
        if not path.is_absolute():
            yield Problem(("socket",), f"found {self.socket}; expected a path from / or ~ on")
        elif len(os.fsencode(path)) > MAX_SOCKET_PATH:
            yield Problem(("socket",), f"is longer than {MAX_SOCKET_PATH} bytes; choose a shorter path")

    @property
    def path(self) -> Path | None:
        """Where the socket stands."""
        return None if self.socket is None else Path(self.socket).expanduser()
