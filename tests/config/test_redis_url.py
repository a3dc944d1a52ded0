"""Redis addresses."""

from __future__ import annotations

import pytest

from hicache.config.redis_url import RedisUrl, parse_redis_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://127.0.0.1:6379", RedisUrl("single", False, (("127.0.0.1", 6379),))),
        ("rediss://cache.internal/2", RedisUrl("single", True, (("cache.internal", 6379),), database=2)),
        ("redis://[::1]:7000", RedisUrl("single", False, (("::1", 7000),))),
        (
            "redis+sentinel://a,b:26380/mymaster/1",
            RedisUrl("sentinel", False, (("a", 26379), ("b", 26380)), "mymaster", 1),
        ),
        ("redis+cluster://a:7000,b:7001", RedisUrl("cluster", False, (("a", 7000), ("b", 7001)))),
        ("rediss+cluster://a", RedisUrl("cluster", True, (("a", 6379),))),
        ("valkey://a/1", RedisUrl("single", False, (("a", 6379),), database=1)),
        ("valkeys+cluster://a", RedisUrl("cluster", True, (("a", 6379),))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_address_is_taken_apart(text: str, expected: RedisUrl) -> None:
    assert parse_redis_url(text) == expected


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("http://host", "expected redis://"),
        ("cache.internal:6379", "expected redis://"),
        ("keyvalkey://host", "expected redis://"),
        ("redis://", "found the host ''"),
        ("redis://host:0", "the port 0"),
        ("redis://host:99999", "the port 99999"),
        ("redis://a,b", "several need redis"),
        ("redis://host/db", "the number of a database"),
        ("redis+sentinel://a,b", "the master's name"),
        ("redis+cluster://a/1", "one database only"),
        ("redis://host?socket_timeout=1", "keys of the store"),
    ],
    ids=str,
)
def test_what_is_no_address_is_refused_with_the_reason(text: str, remark: str) -> None:
    with pytest.raises(ValueError, match=remark):
        parse_redis_url(text)


@pytest.mark.parametrize(
    "text",
    ["redis://:hunter2@host", "redis://user:hunter2@host", "redis://host?password=hunter2", "hunter2@host"],
    ids=str,
)
def test_a_password_in_the_url_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"password_env|keys of the store") as caught:
        parse_redis_url(text)
    assert "hunter2" not in str(caught.value)
