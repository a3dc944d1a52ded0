"""Where payload lives: device and host pools, and the stores behind them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from hicache.config.fields import Bytes, Fraction, Name, Problem, Seconds, Section, Text, one_of
from hicache.config.redis_url import RedisUrl, parse_redis_url
from hicache.config.units import format_bytes, format_duration

AUTO_PATH = "auto"
SPLIT_TOLERANCE = 0.001
SHARED_SPLIT = "shared"
FIXED_SPLIT = "fixed"
BY_HAND = "by hand"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class PoolConfig(Section):
    """What a device pool and a host pool share."""

    capacity: Bytes | None = Field(
        default=None, description="size of the pool, a total over components and ranks, like 40GiB"
    )
    capacity_per_rank: Bytes | None = Field(
        default=None, description="the same for one rank, instead of capacity"
    )

    @property
    def shares(self) -> Mapping[str, float] | None:
        """The share of each component where they are fixed by hand."""
        return None

    @property
    def is_shared(self) -> bool:
        """Whether several components take their room from one budget."""
        return False

    def problems(self) -> Iterator[Problem]:
        if self.capacity is None and self.capacity_per_rank is None:
            yield Problem(("capacity",), "missing; expected the pool's total size, like 40GiB")
        if self.capacity is not None and self.capacity_per_rank is not None:
            yield Problem(
                ("capacity_per_rank",),
                "given together with capacity; capacity is the total over all ranks,"
                " capacity_per_rank the size of one: keep one of them",
            )
        if self.shares is not None:
            total = sum(self.shares.values())
            if abs(total - 1) > SPLIT_TOLERANCE:
                yield Problem(("split",), f"the shares sum to {total:.4g}; expected 1 (100%)")

    def total_bytes(self, num_ranks: int) -> int:
        """Bytes of the pool over all ranks."""
        return self.rank_bytes(num_ranks) * num_ranks if self.capacity is None else self.capacity

    def rank_bytes(self, num_ranks: int) -> int:
        """Bytes of the pool of one rank."""
        if self.capacity is not None:
            return self.capacity // num_ranks
        assert self.capacity_per_rank is not None
        return self.capacity_per_rank


def _kind_of_split(value: object) -> str | None:
    if isinstance(value, Mapping):
        return BY_HAND
    return value if value in (SHARED_SPLIT, FIXED_SPLIT) else None


class DeviceConfig(PoolConfig):
    """L1: the memory attention kernels read."""

    kind: Annotated[
        Literal["cpu", "cuda"], BeforeValidator(one_of("the kind of a device", ("cpu", "cuda")))
    ] = Field(description="cpu or cuda")
    index: int = Field(default=0, ge=0, description="which cuda device, from 0")
    split: (
        Annotated[
            Annotated[Literal["shared"], Tag(SHARED_SPLIT)]
            | Annotated[Literal["fixed"], Tag(FIXED_SPLIT)]
            | Annotated[dict[str, Fraction], Tag(BY_HAND)],
            Discriminator(_kind_of_split),
        ]
        | None
    ) = Field(
        default=None,
        description="shared: one budget for all components (the default of kind cpu); fixed: shares by what"
        " conversations cost (the default of kind cuda); or the share of each, all named, summing to 1",
    )

    @property
    def shares(self) -> Mapping[str, float] | None:
        return self.split if isinstance(self.split, dict) else None

    @property
    def is_shared(self) -> bool:
        return self.split == SHARED_SPLIT or (self.split is None and self.kind == "cpu")

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.kind == "cpu" and self.index:
            yield Problem(("index",), f"found {self.index}, but kind cpu has no devices to count; remove it")
        if self.kind != "cpu" and self.is_shared:
            yield Problem(
                ("split",),
                f"found shared, but memory of kind {self.kind} cannot go from one component to another while it is"
                " in use; expected fixed, or the share of each component",
            )


class HostConfig(PoolConfig):
    """L2: host memory, page-first."""

    pinned: bool = Field(default=True, description="page-lock the pool, for fast copies to a cuda device")
    limit: Bytes | None = Field(
        default=None, description="hard total over all ranks; what multiplies to more is refused"
    )
    split: (
        Annotated[
            Annotated[Literal["shared"], Tag(SHARED_SPLIT)] | Annotated[dict[str, Fraction], Tag(BY_HAND)],
            Discriminator(_kind_of_split),
        ]
        | None
    ) = Field(
        default=None,
        description="shared: one budget for all components (the default where there are several);"
        " or the fixed share of each, all named, summing to 1",
    )

    @property
    def shares(self) -> Mapping[str, float] | None:
        return self.split if isinstance(self.split, dict) else None

    @property
    def is_shared(self) -> bool:
        return self.shares is None


class BreakerConfig(Section):
    """When a store is left alone, and for how long."""

    enabled: bool = Field(default=True, description="leave a store alone that fails or crawls")
    failures: int = Field(default=5, ge=1, description="failed calls in a row that open the breaker")
    slow: Seconds = Field(default=2.0, description="a call that takes longer is slow")
    slow_fraction: Fraction = Field(
        default=0.5, description="share of slow calls among the last window above which it opens"
    )
    window: int = Field(default=20, ge=1, description="how many calls are looked at for slowness")
    backoff: Seconds = Field(default=1.0, description="wait before the store is tried again, at first")
    backoff_max: Seconds = Field(default=60.0, description="each failed try doubles the wait, up to this")
    jitter: Fraction = Field(default=0.5, description="random share by which a wait is longer")

    def problems(self) -> Iterator[Problem]:
        if self.backoff > self.backoff_max:
            yield Problem(
                ("backoff",),
                f"{format_duration(self.backoff)} is over backoff_max,"
                f" {format_duration(self.backoff_max)}; expected at most that",
            )


def _variable(value: str) -> str:
    # Never echoes the value: people put the secret itself here.
    if _VARIABLE.fullmatch(value) is None:
        raise ValueError("expected the name of an environment variable, not the secret itself")
    return value


COMPRESSIONS = ("none", "lz4", "zstd")
ENCRYPTIONS = ("none", "aes-gcm")


class CodecConfig(Section):
    """How payload is written down; what is read is told by each page, so this may change at any time."""

    compression: Annotated[
        Literal["none", "lz4", "zstd"], BeforeValidator(one_of("a compression", COMPRESSIONS))
    ] = Field(default="none", description="none, lz4 (fast) or zstd (small)")
    level: int = Field(default=3, ge=1, le=19, description="of zstd: 1 is fast, 19 is small")
    shuffle: bool = Field(
        default=True, description="sort the bytes of model.dtype's numbers before compression"
    )
    encryption: Annotated[
        Literal["none", "aes-gcm"], BeforeValidator(one_of("an encryption", ENCRYPTIONS))
    ] = Field(default="none", description="none, or aes-gcm with a key of 32 bytes")
    key_env: Annotated[str, AfterValidator(_variable)] | None = Field(
        default=None, description="environment variable that holds the key, in hexadecimal or base64"
    )
    key_file: Text | None = Field(default=None, description="file that holds the key")

    def problems(self) -> Iterator[Problem]:
        if self.key_env is not None and self.key_file is not None:
            yield Problem(("key_file",), "given together with key_env; keep one of them")
        if self.encryption != "none" and self.key_env is None and self.key_file is None:
            yield Problem(("encryption",), "needs a key: add key_env or key_file")


class StoreSection(Section):
    """What all stores share."""

    name: Name | None = Field(default=None, description="name in reports; default: the kind, made unique")
    breaker: BreakerConfig = Field(
        default=BreakerConfig(), description="circuit breaker: a mapping {failures, slow, backoff ...}"
    )
    codec: CodecConfig = Field(
        default=CodecConfig(), description="a mapping {compression, level, shuffle, encryption, key_file ...}"
    )


def _disk_path(value: str) -> str:
    try:
        Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"found {value!r}, whose home folder is unknown; write the whole path") from None
    return value


class DiskStoreConfig(StoreSection):
    """L3 in segment files in one folder."""

    kind: Literal["disk"] = Field(description="disk: segment files in one folder")
    path: Annotated[Text, AfterValidator(_disk_path)] = Field(
        description="a folder, ~ allowed; auto is a fresh temporary one, removed on close"
    )
    capacity: Bytes = Field(
        description="most bytes in the folder, over all components, ranks and engines that share it"
    )
    direct: bool = Field(
        default=False, description="large pages bypass the page cache, which leaves memory to the host pool"
    )
    durable: bool = Field(
        default=False,
        description="sync before a page counts as written: survives a power cut, not just a kill",
    )
    threads: int = Field(default=4, ge=1, le=64, description="threads for reading and writing")
    min_free: Bytes | None = Field(
        default=None, description="least bytes to leave free on the file system; default: no such rule"
    )

    @property
    def directory(self) -> Path | None:
        """The folder as an absolute path; None when a temporary one is wanted (``auto``)."""
        return None if self.path == AUTO_PATH else Path(self.path).expanduser().absolute()


class MemoryStoreConfig(StoreSection):
    """L3 in this process's memory: for tests."""

    kind: Literal["memory"] = Field(description="memory: this process's memory, for tests")
    capacity: Bytes | None = Field(default=None, description="most bytes kept; default: no bound")


def _redis_url(value: str) -> str:
    parse_redis_url(value)
    return value


def _redis_prefix(value: str) -> str:
    if "{" in value or "}" in value:
        raise ValueError(f"found {value!r}; braces choose the slot in a cluster, leave them out")
    return value


class RedisStoreConfig(StoreSection):
    """L3 in Redis or Valkey. Its size is the server's own affair (``maxmemory``), so no capacity."""

    kind: Literal["redis"] = Field(description="redis: a Redis or Valkey server")
    url: Annotated[Text, AfterValidator(_redis_url)] = Field(
        description="redis://, rediss:// (TLS), redis+sentinel:// or redis+cluster://; no password in it"
    )
    ttl: Seconds | None = Field(
        default=None, description="how long an entry is kept unused; default: for ever"
    )
    ttl_refresh: bool = Field(default=True, description="whether reading an entry is a use of it")
    prefix: Annotated[Text, AfterValidator(_redis_prefix)] = Field(
        default="hicache", description="what every key starts with"
    )
    value_size: Annotated[Bytes, Field(ge=1)] = Field(
        default=8 * 2**20, description="a payload that needs more is cut into values of this size"
    )
    timeout: Seconds | None = Field(
        default=None, description="bound of one pipeline; default: two fifths of policy.store_timeout"
    )
    connections: int = Field(default=8, ge=1, description="most connections to one server")
    username: Text | None = Field(default=None, description="ACL user")
    password_env: Annotated[str, AfterValidator(_variable)] | None = Field(
        default=None, description="environment variable that holds the password"
    )
    password_file: Text | None = Field(default=None, description="file that holds the password")
    sentinel_login: bool = Field(default=False, description="log in at the sentinels with the same password")
    ca_file: Text | None = Field(default=None, description="CA certificate to trust, with TLS only")
    cert_file: Text | None = Field(default=None, description="certificate to show the server, with TLS only")
    key_file: Text | None = Field(default=None, description="private key of cert_file")
    check_hostname: bool = Field(default=True, description="whether the server's certificate must name it")

    def problems(self) -> Iterator[Problem]:
        if self.password_env is not None and self.password_file is not None:
            yield Problem(("password_file",), "given together with password_env; keep one of them")
        if self.username is not None and self.password_env is None and self.password_file is None:
            yield Problem(("username",), "needs a password: add password_env or password_file")
        for key in ("ca_file", "cert_file", "key_file"):
            if getattr(self, key) is not None and not self.address.tls:
                yield Problem((key,), f"contradicts a url without TLS; write rediss:// or remove {key}")
        if (self.cert_file is None) != (self.key_file is None):
            missing, given = (
                ("cert_file", "key_file") if self.cert_file is None else ("key_file", "cert_file")
            )
            yield Problem((missing,), f"missing, but {given} is given; a certificate and its key go together")
        if self.sentinel_login and self.address.mode != "sentinel":
            yield Problem(
                ("sentinel_login",), "needs a url with sentinels; write redis+sentinel:// or remove it"
            )
        if self.sentinel_login and self.password_env is None and self.password_file is None:
            yield Problem(("sentinel_login",), "needs a password: add password_env or password_file")

    @property
    def address(self) -> RedisUrl:
        """The parts of ``url``."""
        return parse_redis_url(self.url)


StoreConfig = Annotated[DiskStoreConfig | MemoryStoreConfig | RedisStoreConfig, Field(discriminator="kind")]
STORE_KINDS = ("disk", "memory", "redis")


STACK_WRITES = ("first", "all", "later")


class StackConfig(Section):
    """How several stores work together."""

    write: Annotated[
        Literal["first", "all", "later"], BeforeValidator(one_of("a way to write", STACK_WRITES))
    ] = Field(default="later", description="into the first store, all at once, or the others behind it")
    promote: bool = Field(default=True, description="copy into the first store what a later one had")
    backlog: Bytes = Field(default=64 * 2**20, description="bytes that may wait for each store")


class TiersConfig(Section):
    """The hierarchy, fastest first."""

    device: DeviceConfig = Field(description="L1: a mapping like {kind: cuda, capacity: 40GiB}")
    host: HostConfig | None = Field(
        default=None, description="L2: a mapping like {capacity: 200GiB}; without it there is no L2"
    )
    stores: list[StoreConfig] = Field(
        default=[], description="L3: a list like [{kind: disk, path: ..., capacity: 2TiB}], asked in order"
    )
    stack: StackConfig = Field(
        default=StackConfig(), description="several stores together: a mapping {write, promote, backlog}"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_stores(cls, data: object) -> object:
        """Give unnamed stores their kind as a name, numbered from the second on."""
        if not isinstance(data, Mapping) or not isinstance(data.get("stores"), list):
            return data
        stores = [dict(s) if isinstance(s, Mapping) else s for s in data["stores"]]
        names = [s.get("name") for s in stores if isinstance(s, dict)]
        taken = {name for name in names if isinstance(name, str)}
        for store in stores:
            if isinstance(store, dict) and store.get("name") is None and store.get("kind") in STORE_KINDS:
                kind, count = store["kind"], 1
                while (name := kind if count == 1 else f"{kind}-{count}") in taken:
                    count += 1
                taken.add(name)
                store["name"] = name
        return {**data, "stores": stores}

    def problems(self) -> Iterator[Problem]:
        if self.stores and self.host is None:
            yield Problem(
                ("host",),
                "missing, but there are stores: pages travel from store to host to device;"
                " add a host tier or remove the stores",
            )
        names: dict[str | None, int] = {}
        directories: dict[str, int] = {}
        for i, store in enumerate(self.stores):
            first = names.setdefault(store.name, i)
            if first != i:
                yield Problem(("stores", i, "name"), f"{store.name!r} is also the name of stores.{first}")
            if isinstance(store, DiskStoreConfig) and store.directory is not None:
                first = directories.setdefault(os.path.realpath(store.directory), i)
                if first != i:
                    yield Problem(
                        ("stores", i, "path"),
                        f"{store.path!r} is also the path of stores.{first}; give each its own folder",
                    )


def write_bytes(num_bytes: int) -> str:
    """A size for messages: as it would be written, and in bytes where that differs."""
    text = format_bytes(num_bytes)
    return text if text == f"{num_bytes}B" else f"{text} ({num_bytes} bytes)"
