"""How servers of Redis are reached: credentials, TLS, limits; and whether they let us in."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.credentials import CredentialProvider
from redis.exceptions import AskError, RedisError

from hicache.clock import Clock
from hicache.config.redis_url import RedisUrl
from hicache.errors import ConfigError, TierError, TierUnavailableError
from hicache.tiers.breaker import Breaker, BreakerSettings
from hicache.tiers.redis_node import Address, RedisNode, describe, is_lasting
from hicache.tiers.redis_wire import Command, Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAccess:
    """Makes the client of each server. Arguments: see ``RedisStore``."""

    url: RedisUrl
    username: str | None
    password: Callable[[], str] | None = field(repr=False)
    login_at_sentinels: bool
    ca_file: str | None
    cert_file: str | None
    key_file: str | None
    check_hostname: bool
    timeout_s: float
    max_connections: int
    node_breaker: BreakerSettings | None
    clock: Clock
    randomness: random.Random

    def make_node(self, address: Address) -> RedisNode:
        """The client of a server that holds keys."""
        breaker = None
        if self.url.mode == "cluster" and self.node_breaker is not None:
            host, port = address
            label = f"redis {host}:{port}"
            breaker = Breaker(self.node_breaker, clock=self.clock, randomness=self.randomness, label=label)
        return self._make(address, {"db": self.url.database, **self._login()}, breaker)

    def make_sentinel(self, address: Address) -> RedisNode:
        """The client of a sentinel."""
        return self._make(address, self._login() if self.login_at_sentinels else {}, None)

    def _login(self) -> dict[str, Any]:  # Any: keyword arguments of redis-py, here and below
        if self.password is None:
            return {}
        return {"credential_provider": _Credentials(self.username, self.password)}

    def _make(self, address: Address, settings: dict[str, Any], breaker: Breaker | None) -> RedisNode:
        settings = {
            "protocol": 2,
            "socket_timeout": None,  # a pipeline has one limit as a whole
            "socket_connect_timeout": self.timeout_s,
            "socket_keepalive": True,
            **settings,
        }
        if self.url.tls:
            settings |= {
                "ssl_ca_certs": self.ca_file,
                "ssl_certfile": self.cert_file,
                "ssl_keyfile": self.key_file,
                "ssl_check_hostname": self.check_hostname,
            }
        return RedisNode(
            address,
            settings,
            tls=self.url.tls,
            max_connections=self.max_connections,
            timeout_s=self.timeout_s,
            breaker=breaker,
        )


class _Credentials(CredentialProvider):
    """Asked by redis-py whenever it connects."""

    def __init__(self, username: str | None, password: Callable[[], str]) -> None:
        self._username = username
        self._password = password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._password()
        return (password,) if self._username is None else (self._username, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


async def check_access(nodes: Sequence[RedisNode], question: Command) -> None:
    """Connect to every server, log in, and see that we may ask a question about our keys.

    Raises:
        ConfigError: one of them does not let us in, and waiting will not help.
        TierUnavailableError, TierTimeoutError: none of them can be used now.
    """
    refusals: list[TierError] = []
    for node in nodes:
        (reply,) = await node.run([question])
        refusal = _refusal(node, reply)
        if refusal is None:
            continue
        if is_lasting(refusal):
            raise ConfigError([f"stores.redis: {refusal}"]) from refusal
        refusals.append(refusal)
    if len(refusals) == len(nodes):
        raise refusals[0] if refusals else TierUnavailableError("redis: there is no server")


def _refusal(node: RedisNode, reply: Reply) -> TierError | None:
    if isinstance(reply, AskError):
        return None  # the key is at another node; that we may ask is known now
    if isinstance(reply, RedisError):
        refusal = TierUnavailableError(f"redis {node}: {describe(reply)}")
        refusal.__cause__ = reply
        return refusal
    return reply if isinstance(reply, TierError) else None
