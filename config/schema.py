"""The root of the schema: one file, nine sections."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from hicache.config.checks import contradictions
from hicache.config.fields import Problem, Section
from hicache.config.model import ModelConfig, RanksConfig
from hicache.config.operate import AdminConfig, EventsConfig, ExplainConfig, MetricsConfig, TracingConfig
from hicache.config.policy import PolicyConfig, SessionsConfig
from hicache.config.tiers import TiersConfig


class HiCacheConfig(Section):
    """A whole configuration. One that exists has no contradictions and fits its capacities.

    ``load_config`` is the way to make one: it names the line of every mistake, and checks what
    only this machine can tell, such as whether a folder can be written.
    """

    model: ModelConfig = Field(description="what is cached")
    ranks: RanksConfig = Field(default=RanksConfig(), description="this process's place among its ranks")
    tiers: TiersConfig = Field(description="where payload lives")
    policy: PolicyConfig = Field(default=PolicyConfig(), description="when payload moves")
    sessions: SessionsConfig = Field(
        default=SessionsConfig(), description="how long a silent session counts as alive"
    )
    metrics: MetricsConfig = Field(default=MetricsConfig(), description="numbers for Prometheus")
    explain: ExplainConfig = Field(default=ExplainConfig(), description="why requests missed")
    events: EventsConfig = Field(default=EventsConfig(), description="what is where, told to routers")
    admin: AdminConfig = Field(default=AdminConfig(), description="a local socket for hicache ctl")
    tracing: TracingConfig = Field(default=TracingConfig(), description="spans for OpenTelemetry")

    def problems(self) -> Iterator[Problem]:
        yield from contradictions(
            model=self.model,
            ranks=self.ranks,
            device=self.tiers.device,
            host=self.tiers.host,
            stores=dict(enumerate(self.tiers.stores)),
            policy=self.policy,
        )
