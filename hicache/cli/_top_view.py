"""What ``hicache top`` shows, from two readings of a cache's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hicache.cli._numbers import Numbers

NARROW = 72
"""Terminals with fewer columns see only what matters most."""
TIERS = ("device", "host", "store")
SOURCES = (*TIERS, "computed")
NONE = "–"
MOST_FAULTS = 5
KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


@dataclass(frozen=True, slots=True)
class View:
    """Two readings of one cache, the earlier one None at first; and the columns there are."""

    now: Numbers
    before: Numbers | None
    width: int

    @property
    def is_narrow(self) -> bool:
        return self.width < NARROW

    @property
    def seconds(self) -> float | None:
        """Between the readings; None without an earlier one, or if the cache began anew since."""
        if self.before is None or self.now.read_s <= self.before.read_s:
            return None
        requests = "hicache_requests_total"
        if self.now.total(requests) < self.before.total(requests):
            return None
        return self.now.read_s - self.before.read_s

    def since(self, name: str, **labels: str) -> float:
        """How much a counter rose since the earlier reading; since its start without one."""
        before = 0.0 if self.before is None or self.seconds is None else self.before.total(name, **labels)
        return self.now.total(name, **labels) - before

    def rate(self, name: str, **labels: str) -> float | None:
        """The same a second; None without an earlier reading."""
        return None if self.seconds is None else self.since(name, **labels) / self.seconds


def render(view: View) -> RenderableType:
    return Group(*_parts(view))


def _parts(view: View) -> Iterator[RenderableType]:
    info = next(iter(view.now.labels("hicache_info")), {})
    yield Text(
        f"HiCache {info.get('version', '')}, {info.get('core', '?')} core", style="bold", overflow="fold"
    )
    yield _hits(view)
    yield _pools(view)
    yield _transfers(view)
    if view.now.labels("hicache_store_used_bytes"):
        yield _stores(view)
    yield _line(view, "sessions", "hicache_sessions", "state", as_rate=False)
    yield _line(view, "faults", "hicache_faults_total", "cause", as_rate=True)
    findings = int(view.now.total("hicache_audit_findings_total"))
    if findings:
        yield Text(f"audits found {findings:,} broken invariants: see the log", style="bold red")


def _hits(view: View) -> RenderableType:
    name = "hicache_prompt_tokens_total"
    table = _table(view, "hits", "hit rate", *(() if view.is_narrow else (*SOURCES, "requests/s")))
    rows: list[tuple[str, Callable[[str], float], float | None]] = []
    if view.seconds is not None:
        rows.append(
            (
                f"last {view.seconds:.3g} s",
                lambda source: view.since(name, source=source),
                view.rate("hicache_requests_total"),
            )
        )
    rows.append(("since start", lambda source: view.now.total(name, source=source), None))
    for title, count, requests in rows:
        counts = [count(source) for source in SOURCES]
        whole = sum(counts)
        rate = f"{1 - counts[-1] / whole:.4f}" if whole else NONE
        extra = (
            () if view.is_narrow else (*map(_count, counts), NONE if requests is None else f"{requests:.1f}")
        )
        table.add_row(title, rate, *extra)
    if not view.is_narrow:
        return table
    return Group(table, _line(view, "prompt tokens", name, "source", as_rate=True))


def _pools(view: View) -> RenderableType:
    wide = () if view.is_narrow else ("locked", "in flight", "dead", "left/s")
    table = _table(view, "tier", "component", "slots", "used", *wide)
    for tier in TIERS[:2]:
        for component in _values(view, "hicache_slots", "component"):
            at = {"component": component, "tier": tier}
            slots = view.now.total("hicache_slots", **at)
            if not slots:
                continue
            used = slots - view.now.total("hicache_slots", **at, state="free")
            extra: tuple[str, ...] = ()
            if not view.is_narrow:
                locked = view.now.total("hicache_slots", **at, state="protected")
                locked += view.now.total("hicache_slots", **at, state="lease_owned")
                extra = (
                    _count(locked),
                    _count(view.now.total("hicache_slots", **at, state="in_flight")),
                    size(view.now.total("hicache_dead_weight_bytes", **at)),
                    _per_second(view.rate("hicache_removed_slots_total", **at), _count),
                )
            table.add_row(tier, component, _count(slots), f"{used / slots:.0%}", *extra)
    return table


def _transfers(view: View) -> RenderableType:
    table = _table(view, "queue", "jobs", "bytes", "limit", "dropped")
    for queue in _values(view, "hicache_queue_jobs", "queue"):
        table.add_row(
            queue,
            _count(view.now.total("hicache_queue_jobs", queue=queue)),
            size(view.now.total("hicache_queue_bytes", queue=queue)),
            size(view.now.total("hicache_queue_limit_bytes", queue=queue)),
            _count(view.now.total("hicache_queue_drops_total", direction=queue)),
        )
    moved = _line(view, "moving", "hicache_moved_bytes_total", "direction", as_rate=True, form=size)
    return Group(table, moved)


def _stores(view: View) -> RenderableType:
    wide = () if view.is_narrow else ("capacity", "read/s", "written/s", "corrupt", "errors")
    table = _table(view, "store", "breaker", "holds", *wide)
    for store in _values(view, "hicache_store_used_bytes", "store"):
        state = next(
            (s for s in _values(view, "hicache_store_breaker_state", "state")
             if view.now.value("hicache_store_breaker_state", store=store, state=s)), NONE)  # fmt: skip
        capacity = view.now.total("hicache_store_capacity_bytes", store=store)
        extra: tuple[str, ...] = ()
        if not view.is_narrow:
            extra = (
                size(capacity) if capacity else NONE,
                _per_second(view.rate("hicache_store_read_bytes_total", store=store), size),
                _per_second(view.rate("hicache_store_written_bytes_total", store=store), size),
                _count(view.now.total("hicache_store_pages_total", store=store, outcome="corrupt")),
                _count(view.now.total("hicache_store_errors_total", store=store)),
            )
        style = "" if state in {"closed", NONE} else "bold red"
        table.add_row(
            store,
            Text(state, style=style),
            size(view.now.total("hicache_store_used_bytes", store=store)),
            *extra,
        )
    return table


def _line(
    view: View,
    title: str,
    name: str,
    label: str,
    *,
    as_rate: bool,
    form: Callable[[float], str] | None = None,
) -> Text:
    """``title: what count, what count``: the most first, without what is 0."""
    form = form or _count
    per_second = as_rate and view.seconds is not None
    found = {}
    for value in _values(view, name, label):
        found[value] = (
            (view.rate(name, **{label: value}) or 0.0)
            if per_second
            else view.now.total(name, **{label: value})
        )
    most = sorted(((count, value) for value, count in found.items() if count), reverse=True)[:MOST_FAULTS]
    words = ", ".join(f"{value.replace('_', ' ')} {form(count)}" for count, value in most) or "none"
    unit = "/s" if per_second else " since start" if as_rate else ""
    return Text(f"{title}{unit}: {words}", overflow="fold")


def _values(view: View, name: str, label: str) -> list[str]:
    """The values of a label, in the order of their names."""
    return list(dict.fromkeys(labels[label] for labels in view.now.labels(name)))


def _table(view: View, first: str, *columns: str) -> Table:
    table = Table(box=None if view.is_narrow else box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(
            name, justify="left" if name in {"component", "breaker"} else "right", overflow="fold"
        )
    return table


def _per_second(rate: float | None, form: Callable[[float], str]) -> str:
    return NONE if rate is None else form(rate)


def _count(number: float) -> str:
    """Four digits at most, then with a letter: 1234, 12.3k, 4.56M."""
    return _short(number, 1000, ("", "k", "M", "G", "T"), whole=10_000)


def size(num_bytes: float) -> str:
    return _short(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"), whole=1024)


def _short(number: float, step: int, units: Sequence[str], *, whole: int) -> str:
    if abs(number) < whole:
        return f"{number:.0f}{units[0]}" if number == int(number) else f"{number:.1f}{units[0]}"
    place = 0
    while abs(number) >= step and place < len(units) - 1:
        number /= step
        place += 1
    return f"{number:.3g}{units[place]}" if number < 1000 else f"{number:.0f}{units[place]}"
