"""Real servers, started once for a run and emptied before each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.testing.redis_server import (
    Certificates,
    RedisCluster,
    RedisServer,
    make_certificates,
)


@pytest.fixture(scope="session")
def single_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("single")) as server:
        yield server


@pytest.fixture(scope="session")
def cluster_of_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def server(single_server: RedisServer) -> RedisServer:
    """One server, empty."""
    with single_server.client as client:
        client.flushall()
    return single_server


@pytest.fixture
def cluster(cluster_of_three: RedisCluster) -> RedisCluster:
    """Three masters, empty."""
    for node in cluster_of_three.nodes:
        with node.client as client:
            client.flushall()
    return cluster_of_three


@pytest.fixture(scope="session")
def guarded_server(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[RedisServer]:
    user = (
        "cache on >correct-horse ~hicache:* resetchannels -@all"
        " +get +getex +getrange +set +exists +unlink +strlen +scan"
    )
    with RedisServer(
        tmp_path_factory.mktemp("tls"), certificates=certificates, users=[user], password="admin-only"
    ) as server:
        yield server


@pytest.fixture
def tls_server(guarded_server: RedisServer) -> RedisServer:
    """One server, empty: TLS only, and a user ``cache`` with no more rights than a store needs."""
    with guarded_server.client as client:
        client.flushall()
    return guarded_server
