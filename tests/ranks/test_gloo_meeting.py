"""A group that does not come about: one error with the remedy, within its time, and no frames of C++ on stderr."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hicache.errors import RankGroupError
from hicache.ranks import gloo
from hicache.ranks.gloo import GlooGroup
from hicache.testing.redis_server import free_port


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of something that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def refusal(capfd: pytest.CaptureFixture[str], address: str, *, rank: int = 1, timeout_s: float = 0.3) -> str:
    with pytest.raises(RankGroupError) as caught:
        GlooGroup.connect(address, rank=rank, size=2, timeout_s=timeout_s)
    assert capfd.readouterr().err == ""
    told = str(caught.value)
    assert told.startswith(f"rank {rank} of 2 found no group at {address} within {timeout_s:g} s: ")
    assert told.endswith(
        "start all ranks, and give all the same ranks.address, with a port that is free on the first"
    )
    return told


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_is_not_known_is_told(capfd: pytest.CaptureFixture[str], rank: int) -> None:
    assert "Name or service not known" in refusal(capfd, "no.such.host.invalid:29600", rank=rank)


def test_a_first_rank_that_is_not_there_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert "Connection refused" in refusal(capfd, f"127.0.0.1:{free_port()}")


def test_a_port_that_is_taken_is_told_at_once(capfd: pytest.CaptureFixture[str], silent: int) -> None:
    assert "Address already in use" in refusal(capfd, f"127.0.0.1:{silent}", rank=0, timeout_s=3600)


def test_something_else_that_never_answers_is_not_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    """torch alone waits for its answer for ever."""
    monkeypatch.setattr(gloo, "GRACE_S", 0.1)
    assert "something else listens there" in refusal(capfd, f"127.0.0.1:{silent}")
