"""A running cache's numbers, read from its admin socket or its metrics port."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hicache.errors import ConfigError, HiCacheError

CONNECT_S = 5.0
MAX_ANSWER_BYTES = 16 << 20

Labels = frozenset[tuple[str, str]]
Sample = tuple[str, Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Samples by name and labels, with when they were read (seconds of a monotonic clock)."""

    values: Mapping[tuple[str, Labels], float]
    read_s: float

    def value(self, name: str, **labels: str) -> float:
        """One sample; 0 where there is none."""
        return self.values.get((name, frozenset(labels.items())), 0.0)

    def labels(self, name: str) -> list[dict[str, str]]:
        """The label sets of a name, in order."""
        return sorted(
            (dict(labels) for key, labels in self.values if key == name),
            key=lambda each: str(sorted(each.items())),
        )

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels, and maybe others."""
        wanted = labels.items()
        return sum(
            value
            for (key, found), value in self.values.items()
            if key == name and wanted <= dict(found).items()
        )


def numbers_of(samples: Iterable[Sample], read_s: float) -> Numbers:
    return Numbers({(name, frozenset(labels.items())): value for name, labels, value in samples}, read_s)


def reader(socket_path: str | None, port: str | None) -> Callable[[], Numbers]:
    """How to read the numbers, by the options given: the port, if there are both.

    Raises:
        ConfigError: neither, or an address that is none.
        HiCacheError: from what it returns: nobody answers there, or with something else.
    """
    if port is not None:
        host, number = _address(port)
        return lambda: _from_port(host, number)
    if socket_path is not None:
        path = socket_path
        return lambda: _from_socket(path)
    raise ConfigError(
        ["top: name the cache with --socket (its admin.socket) or --metrics HOST:PORT (its metrics.port)"]
    )


def _address(text: str) -> tuple[str, int]:
    host, _, number = text.rpartition(":")
    if not number.isdecimal() or not 0 < int(number) < 1 << 16:
        raise ConfigError([f"--metrics: {text!r:.80} is no PORT or HOST:PORT, like 127.0.0.1:9400"])
    return host.strip("[]") or "127.0.0.1", int(number)


def _from_socket(path: str) -> Numbers:
    from hicache.cli.ctl import ask

    reply = ask(path, {"command": "numbers"})
    result = reply.get("result")
    if not reply.get("ok") or not isinstance(result, dict):
        error = str(reply.get("error", "the answer says nothing"))
        raise HiCacheError(
            f"top: {error.removeprefix('numbers: ')}"
        )  # the socket's name of it, not the user's
    return numbers_of(result["samples"], time.monotonic())


def _from_port(host: str, port: int) -> Numbers:
    where = f"{host}:{port}"
    connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read(MAX_ANSWER_BYTES)
    except TimeoutError:
        raise HiCacheError(f"{where} did not answer within {CONNECT_S:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        what = getattr(error, "strerror", None) or error
        raise HiCacheError(f"{where}: {what}; is the cache running, with metrics.port set to this?") from None
    finally:
        connection.close()
    numbers = numbers_of(_samples(where, text), time.monotonic())
    if answer.status != http.client.OK or not any(name.startswith("hicache_") for name, _ in numbers.values):
        raise HiCacheError(f"{where} answers, but not with the numbers of a cache")
    return numbers


def _samples(where: str, text: bytes) -> list[Sample]:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise ConfigError(
            [
                "--metrics: needs the package prometheus-client; pip install 'hicache[metrics]', or use --socket"
            ]
        ) from None
    try:
        families = list(text_string_to_metric_families(text.decode()))
    except ValueError:
        raise HiCacheError(f"{where} answers, but not with the numbers of a cache") from None
    return [(s.name, s.labels, float(s.value)) for family in families for s in family.samples]
