"""What Prometheus is told: by its conventions, and the same as every other report says."""

from __future__ import annotations

import json
import random
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import hicache
from hicache.clock import ManualClock
from hicache.errors import ConfigError
from hicache.metrics import SLOT_STATES, CacheCollector, MetricsServer, registry_of
from hicache.tiers.breaker import BreakerSettings, BreakerStore
from hicache.tiers.memory import MemoryStore
from hicache.tiers.stacked import StackedStore, WriteMode
from hicache.tiers.store import BreakerState, StoreStats
from hicache.transfer.jobs import Direction
from hicache.types import Tier

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig

DASHBOARD = Path(hicache.__file__).resolve().parents[1] / "docs" / "grafana" / "hicache.json"
BASE_UNITS = ("bytes", "seconds", "tokens", "slots", "pages")
NOT_BASE_UNITS = (
    "milliseconds",
    "ms",
    "us",
    "minutes",
    "kilobytes",
    "megabytes",
    "mib",
    "kib",
    "gib",
    "percent",
)

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(rig: Rig) -> list[Metric]:
    registry = registry_of(CacheCollector(rig.cache.stats, rig.specs, version="1"))
    return list(text_string_to_metric_families(generate_latest(registry).decode()))


def series(rig: Rig) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in scrape(rig)
        for sample in family.samples
    }


def value(rig: Rig, name: str, **labels: str) -> float:
    return series(rig)[name, frozenset(labels.items())]


def by_label(rig: Rig, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Samples of a family by the values of these labels."""
    return {
        tuple(dict(found)[label] for label in labels): number
        for (sample, found), number in series(rig).items()
        if sample == name
    }


@pytest.fixture
def busy(make_rig: MakeRig) -> Rig:
    """Three components in three tiers that have all had work, with evictions."""
    rig = make_rig("full+swa+mamba", store="scripted", device=16, host=24, policy__write="write_through")
    for start in (1, 100, 200, 300, 1):
        rig.serve(range(start, start + 33), [7, 8, 9, 10, 11], session=f"s{start}")
        rig.cache.drain()
    return rig


# ---- conventions -------------------------------------------------------------------------------
def test_every_family_has_help_and_type_and_a_prefix(busy: Rig) -> None:
    families = scrape(busy)
    assert len({family.name for family in families}) == len(families)
    assert [f.name for f in families if not f.documentation or f.type == "unknown"] == []
    assert [f.name for f in families if not re.fullmatch(r"hicache(_[a-z]+)+", f.name)] == []


def test_counters_and_nothing_else_end_in_total(busy: Rig) -> None:
    for family in scrape(busy):
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name


def test_units_are_base_units_and_stand_last(busy: Rig) -> None:
    for family in scrape(busy):
        words = family.name.removesuffix("_total").split("_")
        assert not set(words) & set(NOT_BASE_UNITS), family.name
        assert not set(words[:-1]) & {"bytes", "seconds"}, family.name
        if family.type == "histogram":
            assert words[-1] in BASE_UNITS


def test_labels_are_words_without_reserved_names(busy: Rig) -> None:
    labels = {
        label
        for family in scrape(busy)
        for sample in family.samples
        for label in sample.labels
        if not (family.type == "histogram" and label == "le")
    }
    assert labels
    assert {label for label in labels if not re.fullmatch(r"[a-z]+", label)} == set()
    assert not labels & {"le", "quantile", "instance", "job"}


def test_a_histogram_is_cumulative_and_ends_with_its_count(busy: Rig) -> None:
    (family,) = (f for f in scrape(busy) if f.type == "histogram")
    directions = {s.labels["direction"] for s in family.samples}
    assert directions >= {"to_host", "store"}
    for direction in directions:
        mine = [s for s in family.samples if s.labels["direction"] == direction]
        buckets = [s.value for s in mine if s.name.endswith("_bucket")]
        (count,) = (s.value for s in mine if s.name.endswith("_count"))
        assert buckets == sorted(buckets)
        assert buckets[-1] == count > 0


# ---- the numbers -------------------------------------------------------------------------------
def test_tokens_by_source_are_the_prompts(busy: Rig) -> None:
    stats = busy.cache.stats()
    found = {
        labels: number
        for (name, labels), number in series(busy).items()
        if name == "hicache_prompt_tokens_total"
    }
    assert sum(found.values()) == stats.tokens.prompt == 5 * 33
    assert value(busy, "hicache_prompt_tokens_total", source="computed") == stats.tokens.computed
    assert stats.tokens.hit > 0


def test_hits_and_misses_of_a_component_are_the_prompts_in_the_last_tier(busy: Rig) -> None:
    for component in ("full", "mamba"):
        hits = sum(
            value(busy, "hicache_hit_tokens_total", component=component, tier=tier)
            for tier in ("device", "host", "store")
        )
        missed = value(busy, "hicache_miss_tokens_total", component=component, tier="store")
        assert hits + missed == 5 * 33


def test_slots_by_state_sum_to_the_capacity(busy: Rig) -> None:
    for (component, tier), count in busy.cache.stats().pools.items():
        total = sum(
            value(busy, "hicache_slots", component=component, tier=tier, state=state) for state in SLOT_STATES
        )
        assert total == count.capacity


def test_removals_by_component_are_those_of_the_tier(busy: Rig) -> None:
    tree = busy.cache.stats().tree
    expected = {
        (tier, cause): count
        for name, count in tree.items()
        if name.startswith("removed_")
        for _, tier, cause in [name.split("_")]
    }
    assert expected
    found: dict[tuple[str, str], float] = {}
    for (name, labels), number in series(busy).items():
        where = dict(labels)
        if name == "hicache_removed_slots_total" and where["tier"] != "store":
            key = where["tier"], where["cause"]
            found[key] = found.get(key, 0) + number
    assert found == expected


def test_a_scrape_counts_nothing_twice(busy: Rig) -> None:
    first = series(busy)
    assert series(busy) == first


def test_counters_never_fall(busy: Rig) -> None:
    before = series(busy)
    busy.serve(range(400, 433), [1, 2])
    after = series(busy)
    assert [k for k in before if k[0].endswith("_total") and after.get(k, 0) < before[k]] == []
    requests = ("hicache_requests_total", frozenset[tuple[str, str]]())
    assert after[requests] == before[requests] + 1


def test_audits_and_what_they_found_are_counted(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    rig.cache.audit()
    assert value(rig, "hicache_audits_total") == 1
    assert value(rig, "hicache_audit_findings_total") == 0
    rig.cache._runtime.requests.tokens.computed += 1
    assert len(rig.cache.audit()) == 1
    rig.cache._runtime.requests.tokens.computed -= 1
    assert value(rig, "hicache_audit_findings_total") == 1


def test_bytes_in_use_are_those_of_the_slots_that_are_not_free(busy: Rig) -> None:
    for spec in busy.specs:
        for tier in ("device", "host"):
            count = busy.cache.stats().pools[spec.name, tier]
            used = value(busy, "hicache_pool_used_bytes", component=spec.name, tier=tier)
            assert used == (count.capacity - count.free) * spec.slot_bytes(busy.page)


def test_dead_weight_is_told_in_bytes_for_each_component_and_tier(make_rig: MakeRig) -> None:
    rig = make_rig("full+mamba", device=16, host=0)
    page_bytes = {spec.name: spec.slot_bytes(rig.cache.page_size) for spec in rig.specs}
    with rig.cache.match(range(9)) as lease:
        lease.load()
        lease.reserve(9)
        lease.release(range(9), written=8)
    before = value(rig, "hicache_dead_weight_bytes", component="full", tier="device")
    assert before == 0
    rig.cache._runtime.core.make_room("mamba", Tier.DEVICE, 16)
    found = {
        (component, tier): value(rig, "hicache_dead_weight_bytes", component=component, tier=tier)
        for component in ("full", "mamba")
        for tier in ("device", "host", "store")
    }
    expected = dict.fromkeys(found, 0) | {("full", "device"): 2 * page_bytes["full"]}
    assert found == expected


def test_hints_are_told_by_kind_and_whether_there_was_somebody_to_take_them(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.serve(range(1, 18), session="chat", stop="tool_call")
    rig.cache.match(range(1, 18), priority=80).abandon()
    sessions = rig.cache.sessions
    sessions.expects_return("chat", 5.0)
    sessions.one_shot("chat")
    sessions.abandon_branch("chat")
    for _ in range(2):
        sessions.close("chat")
    sessions.reopen("chat")
    sessions.close("nobody")
    rig.cache.keep(range(1, 18), for_s=60)
    rig.cache.keep(range(1, 9), for_s=60)
    rig.cache.unkeep(range(1, 9))
    rig.cache.unkeep(range(1, 9))
    assert by_label(rig, "hicache_hints_total", "kind", "outcome") == {
        ("abandon_branch", "taken"): 1,
        ("close", "taken"): 2,
        ("close", "unknown"): 1,
        ("expects_return", "taken"): 1,
        ("keep", "taken"): 2,
        ("one_shot", "taken"): 1,
        ("priority", "taken"): 1,
        ("reopen", "taken"): 1,
        ("stop", "taken"): 1,
        ("unkeep", "taken"): 1,
        ("unkeep", "unknown"): 1,
    }
    assert value(rig, "hicache_kept_prefixes") == 1
    assert value(rig, "hicache_kept_tokens") == 16


def test_a_hint_that_is_refused_is_no_hint(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.serve(range(1, 18), session="chat")
    with pytest.raises(ValueError, match="in_s is -1"):
        rig.cache.sessions.expects_return("chat", -1)
    with pytest.raises(ValueError, match="at least a page"):
        rig.cache.keep(range(1, 2), for_s=60)
    assert by_label(rig, "hicache_hints_total", "kind", "outcome") == {}


def test_the_policy_is_told_also_after_a_change(make_rig: MakeRig) -> None:
    rig = make_rig(policy__eviction="lru")
    assert by_label(rig, "hicache_policy_info", "eviction", "followed") == {("lru", "lru"): 1}
    rig.cache.admin.set_policy({"eviction": "adaptive"})
    ((eviction, followed),) = by_label(rig, "hicache_policy_info", "eviction", "followed")
    assert eviction == "adaptive"
    assert followed == rig.cache.sessions.followed


def test_what_was_found_and_computed_all_the_same_is_told(make_rig: MakeRig) -> None:
    sooner = {"min_tokens": 0, "recompute_per_1024_tokens": "1ms"}
    rig = make_rig(device=16, host=64, policy__prefetch=sooner)
    rig.serve(range(1, 41))
    rig.serve(range(1001, 1033))  # fills L1: of the first prompt 4 pages are left there
    copies = rig.cache._runtime.transfers._counters
    copies.measured(Direction.TO_DEVICE, "full", 2 << 20, 1e6)  # L2 takes for ever
    rig.serve(range(1, 42))
    assert value(rig, "hicache_recomputed_tokens_total") == 8


def test_what_l3_is_asked_for_is_told_with_the_time_that_matches_waited(make_rig: MakeRig) -> None:
    rig = make_rig(store="scripted", device=16, host=16, policy__write="write_through")
    rig.serve(range(1, 18))
    rig.cache.drain()
    rig.cache.reset()
    rig.serve(range(1, 18))
    answers = by_label(rig, "hicache_probed_pages_total", "outcome")
    assert answers["present",] == 4
    times = by_label(rig, "hicache_transfer_call_duration_seconds_count", "direction")
    assert times["probe",] >= 1


def test_a_rank_alone_agrees_with_nobody(busy: Rig) -> None:
    assert value(busy, "hicache_ranks") == 1
    found = {name: number for (name, _), number in series(busy).items() if name.startswith("hicache_rank_")}
    assert set(found.values()) == {0}
    assert len(found) == 7


def test_the_breaker_of_each_store_of_a_stack_is_told(make_rig: MakeRig) -> None:
    clock = ManualClock()
    settings = BreakerSettings()
    near, far = (
        BreakerStore(MemoryStore(2**20), settings, clock=clock, randomness=random.Random(1), name=name)
        for name in ("near", "far")
    )
    rig = make_rig(store=StackedStore([near, far], write=WriteMode.ALL), host=32)
    rig.serve(range(1, 18))
    rig.cache.drain()
    for store in ("near", "far"):
        states = {
            s: value(rig, "hicache_store_breaker_state", store=store, state=s.value) for s in BreakerState
        }
        assert states == {BreakerState.CLOSED: 1, BreakerState.OPEN: 0, BreakerState.PROBING: 0}
        assert value(rig, "hicache_store_pages_total", store=store, outcome="written") == 4


def test_two_stores_of_one_kind_have_series_of_their_own() -> None:
    from hicache.metrics import _named

    top = StoreStats("stacked", stores=(StoreStats("memory"), StoreStats("memory")))
    assert list(_named(top)) == ["memory", "memory_1"]


# ---- the port ----------------------------------------------------------------------------------
def test_a_configured_port_serves_on_loopback_only_and_ends_with_the_cache(make_rig: MakeRig) -> None:
    rig = make_rig(metrics__port=0)
    server = rig.cache.metrics
    assert server is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    assert "hicache_requests_total 0.0" in text
    assert server._server.server_address[0] == "127.0.0.1"
    rig.cache.close()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=20):
        pass


def test_without_a_port_nothing_listens(make_rig: MakeRig) -> None:
    assert make_rig().cache.metrics is None


def test_a_taken_port_is_refused_with_the_setting(make_rig: MakeRig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"metrics\.port: 127\.0\.0\.1:{port} cannot be listened on"):
            make_rig(metrics__port=port)


def test_two_caches_have_registries_of_their_own(make_rig: MakeRig) -> None:
    one, two = make_rig(metrics__port=0), make_rig(metrics__port=0)
    assert isinstance(one.cache.metrics, MetricsServer)
    assert isinstance(two.cache.metrics, MetricsServer)
    assert one.cache.metrics.port != two.cache.metrics.port


# ---- the dashboard -----------------------------------------------------------------------------
def expressions() -> Iterator[str]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def known_names(rig: Rig) -> dict[str, set[str]]:
    """Series by name with the labels they may have, also of families that have no sample yet."""
    known: dict[str, set[str]] = {}
    for family in CacheCollector(rig.cache.stats, rig.specs).collect():
        labels = set(getattr(family, "_labelnames", ()))
        if family.type == "info":  # its labels are what it says
            labels = {label for sample in family.samples for label in sample.labels}
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
        for suffix in suffixes.get(family.type, ("",)):
            known[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return known


def test_every_expression_of_the_dashboard_names_a_metric_and_its_labels(busy: Rig) -> None:
    known = known_names(busy)
    used = set()
    for expression in expressions():
        names = re.findall(r"\bhicache_\w+", expression)
        assert names, expression
        assert set(names) <= set(known), expression
        used |= set(names)
        for name, matchers in re.findall(r"\b(hicache_\w+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)=", matchers)) - {"instance"}
            assert labels <= known[name], expression
        for grouping in re.findall(r"by \(([^)]*)\)", expression):
            assert all({g.strip() for g in grouping.split(",")} <= known[name] for name in names), expression
    # "breaker" families appear only with a breaker, so this rig may lack samples, never names
    assert {name for name in known if not name.endswith(("_count", "_info"))} - used == set()


def families(rig: Rig) -> set[str]:
    """Names as the guide has them."""
    names = {name.removeprefix("hicache_") for name in known_names(rig)}
    return {re.sub("_(bucket|sum|count)$", "", name) for name in names}


def test_the_guide_has_every_family_in_its_table_and_no_other(busy: Rig) -> None:
    guide = (DASHBOARD.parents[1] / "operations.md").read_text(encoding="utf-8")
    table = guide.split("| metric (`hicache_…`)", 1)[1].split("\n\n", 1)[0]
    first_cells = " ".join(row.split("|")[1] for row in table.splitlines()[2:])
    assert set(re.findall(r"`([a-z_]+)`", first_cells)) == families(busy)


@pytest.mark.parametrize("place", ["docs/**/*.md", "hicache/cli/_*.py"])
def test_every_metric_that_is_named_elsewhere_is_one(busy: Rig, place: str) -> None:
    """Those of the SGLang adapter are its own."""
    root = Path(hicache.__file__).resolve().parents[1]
    texts = [path.read_text(encoding="utf-8") for path in sorted(root.glob(place))]
    named = set(re.findall(r"\bhicache_([a-z_]+(?:_total|_bytes|_seconds|_state|_pages))\b", " ".join(texts)))
    assert named
    assert {name for name in named if not name.startswith("sglang_")} <= families(busy)


def test_the_dashboard_is_one_that_grafana_can_place() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "instance"}
