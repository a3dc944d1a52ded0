"""Logins to Redis: passwords, rights, TLS, and nothing secret said."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from hicache.errors import ConfigError, TierError, TierTimeoutError, TierUnavailableError
from hicache.testing.redis_caches import read
from hicache.testing.redis_caches import run_on_redis as run
from hicache.testing.redis_server import Certificates, RedisServer, free_port
from hicache.testing.store_pages import make_page
from hicache.tiers.redis import RedisStore

pytestmark = pytest.mark.redis


def test_a_wrong_password_is_refused_at_once_with_the_remedy(
    tls_server: RedisServer, certificates: Certificates
) -> None:
    with pytest.raises(ConfigError, match="check username and the password") as refusal:
        run(
            tls_server.url,
            _nothing,
            username="cache",
            password=lambda: "hunter2",
            ca_file=str(certificates.ca_file),
        )
    assert "hunter2" not in str(refusal.value)


def test_a_user_without_rights_is_refused_with_the_rights_it_needs(
    tls_server: RedisServer, certificates: Certificates
) -> None:
    with pytest.raises(ConfigError, match=r"allow this user \+get \+getex"):
        run(
            tls_server.url,
            _nothing,
            username="cache",
            password=lambda: "correct-horse",
            ca_file=str(certificates.ca_file),
            prefix="theirs",
        )


def test_a_server_whose_certificate_nobody_trusts_is_refused(tls_server: RedisServer) -> None:
    with pytest.raises(ConfigError, match="check ca_file"):
        run(tls_server.url, _nothing)


def test_a_server_without_tls_is_not_spoken_to_over_tls(
    server: RedisServer, certificates: Certificates
) -> None:
    with pytest.raises(TierError):  # it waits for a command, and we for its side of a handshake
        run(
            f"rediss://127.0.0.1:{server.port}",
            _nothing,
            ca_file=str(certificates.ca_file),
            timeout_s=0.2,
        )


def test_a_client_certificate_is_shown_where_the_server_asks_for_one(
    tmp_path: Path, certificates: Certificates
) -> None:
    settings = ["tls-auth-clients yes"]
    with RedisServer(tmp_path, certificates=certificates, settings=settings) as server:
        files = {
            "ca_file": str(certificates.ca_file),
            "cert_file": str(certificates.cert_file),
            "key_file": str(certificates.key_file),
        }

        async def test(store: RedisStore) -> None:
            assert await store.put([make_page("a")]) == [True]

        run(server.url, test, **files)
        with pytest.raises(TierUnavailableError):
            run(server.url, test, ca_file=str(certificates.ca_file))


def test_a_password_that_was_changed_is_read_for_the_next_connection(tmp_path: Path) -> None:
    password = "first"
    with RedisServer(tmp_path, password=password) as server:
        secret = [password]

        async def test(store: RedisStore) -> None:
            await store.put([make_page("a")])
            secret[0] = "second"
            server.change_password("second")
            with pytest.raises(TierUnavailableError):
                await read(store, make_page("a"))
            assert await read(store, make_page("a"))

        run(server.url, test, password=lambda: secret[0])


def test_nothing_secret_is_logged_or_said(
    tls_server: RedisServer, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = RedisStore(
        tls_server.url,
        username="cache",
        password=lambda: "correct-horse",
        ca_file=str(certificates.ca_file),
        timeout_s=1.0,
    )

    async def test() -> None:
        await store.open()
        await store.put([make_page("a")])
        tls_server.pause()
        try:
            with pytest.raises(TierTimeoutError) as late:
                await read(store, make_page("a"))
        finally:
            tls_server.resume()
        await store.close()
        assert "correct-horse" not in str(late.value)

    asyncio.run(test())
    assert "correct-horse" not in caplog.text + repr(store) + repr(vars(store))


def test_a_password_that_is_nowhere_is_refused_though_nobody_is_there() -> None:
    def nowhere() -> str:
        raise ConfigError(["the variable CACHE_PASSWORD is not set"])

    async def test() -> None:
        store = RedisStore(f"redis://127.0.0.1:{free_port()}", password=nowhere, timeout_s=1.0)
        with pytest.raises(ConfigError, match="CACHE_PASSWORD is not set"):
            await store.open()
        await store.close()

    asyncio.run(test())


def test_nobody_there_is_said_with_the_address() -> None:
    with pytest.raises(TierUnavailableError, match=r"redis 127\.0\.0\.1:1: .*"):
        run("redis://127.0.0.1:1", _nothing)


async def _nothing(store: RedisStore) -> None:
    pytest.fail("the store opened")
