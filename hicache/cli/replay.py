"""``hicache replay``: a real request trace through the real cache, every reused byte checked."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from hicache.cli._settings import (
    check_json_target,
    interrupted,
    is_given,
    report_console,
    stop_on_interrupt,
    write_json,
)
from hicache.cli.config import Settings, read_settings
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from hicache.config import HiCacheConfig
    from hicache.replay.components import HybridComponents
    from hicache.replay.cost import CostModel
    from hicache.replay.result import ReplayResult
    from hicache.replay.timeline import Timeline
    from hicache.workload import Trace

app = typer.Typer(add_completion=False)

EXIT_NOT_SOUND = 1
MAX_RANKS = 64
"""Of one process; a model is cut into no more on one machine, and each takes threads, a loop and pools."""
REFERENCE_CAPACITIES = "1%,2%,5%,10%,20%,50%"


@app.command()
def replay(
    context: typer.Context,
    trace: Annotated[str, typer.Argument(help="Trace file (JSON lines, plain, .gz or .zst).")],
    config: Annotated[str, typer.Option(help="A YAML file, or a preset: cpu, cuda, hybrid, redis.")] = "cpu",
    policy: Annotated[str | None, typer.Option(help="Eviction policy instead of the config's.")] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Device tier: bytes (64MiB), 512-token blocks (8192), or percent of the trace's distinct"
            " blocks (5%). With --reference a list, like 1%,5%."
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
    speedup: Annotated[
        float | None, typer.Option(help="Keep the trace's pauses, this many times faster.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip bad lines and count them.")] = False,
    reference: Annotated[
        bool,
        typer.Option("--reference", help="The published reference's model: metadata only, one tier."),
    ] = False,
    bound: Annotated[
        bool, typer.Option("--bound", help="With --reference: what a clairvoyant policy would hit, too.")
    ] = False,
    components: Annotated[
        str | None,
        typer.Option(
            help="With --reference: a hybrid model, costs in blocks, a window after the x, like full+mamba=2"
            " or full+swa=0.5x2."
        ),
    ] = None,
    marks: Annotated[
        str | None,
        typer.Option(help="With --components: where boundaries are kept: chosen, ends or everywhere."),
    ] = None,
    granularity: Annotated[
        str | None,
        typer.Option(
            help="page or leaf, instead of the config's. With --reference leaf is the published lru-leaf."
        ),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the report as one JSON object; - for stdout.")
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(help="Write one page of HTML with pictures; compares policies, which takes some time."),
    ] = None,
    settings: Settings = None,
    prefill_us: Annotated[float, typer.Option(help="Cost model: prefill, microseconds a token.")] = 100.0,
    host_us: Annotated[float, typer.Option(help="Cost model: load from L2, microseconds a token.")] = 4.0,
    store_us: Annotated[float, typer.Option(help="Cost model: fetch from L3, microseconds a token.")] = 33.0,
    ranks: Annotated[
        int,
        typer.Option(help="Tensor ranks that agree, each with a thread; capacities are totals of all."),
    ] = 1,
    explain: Annotated[
        bool, typer.Option("--explain/--no-explain", help="Say by cause what was lost; costs some time.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Replay a trace and report hit rates per turn, tier and component.

    Exit code 1 if a byte was wrong, the audit found something or nothing was compared, 2 for refused input, 130
    after Ctrl-C.
    """
    from hicache.replay.cost import CostModel
    from hicache.replay.report import check_report_target
    from hicache.replay.timeline import Timeline
    from hicache.workload import read_trace

    _check_order(policy, granularity, reference=reference, bound=bound)
    hybrid = _hybrid(components, marks, policy, granularity, reference=reference)
    if reference:
        _check_reference(context)
    _check_numbers(speedup, prefill_us, host_us, store_us, ranks)
    check_json_target(json_file)
    check_report_target(report)
    console = report_console(json_file)
    loaded = read_trace(trace, skip_bad=skip_bad, limit=requests)
    for skipped in loaded.skipped[:20]:
        console.print(
            f"skipped line {skipped.line}: {skipped.reason}", highlight=False, markup=False, soft_wrap=True
        )
    if reference:
        whole_leaves = granularity == "leaf"
        _reference(
            loaded,
            console,
            capacity,
            policy,
            json_file,
            hybrid,
            with_bound=bound,
            whole_leaves=whole_leaves,
            quiet=quiet,
        )
        return
    overrides = read_settings(settings or [])
    if policy is not None:
        overrides["policy.eviction"] = policy
    if granularity is not None:
        overrides["policy.granularity"] = granularity
    overrides.setdefault("explain.enabled", explain)
    chosen = with_capacity(config, overrides, capacity, loaded)
    cost = CostModel(prefill_us, host_us, store_us)
    timeline = None if report is None else Timeline(loaded.num_requests, cost)
    result = _verified(loaded, chosen, config, speedup, cost, timeline=timeline, ranks=ranks, quiet=quiet)
    from hicache.replay.tables import print_replay

    print_replay(console, result)
    write_json(json_file, result.as_json())
    if report is not None and timeline is not None:
        _report(report, result, timeline, loaded, cost, quiet=quiet)
    if result.interrupted:
        raise interrupted(result.requests, loaded.num_requests)
    if not result.is_proof:
        typer.echo(f"hicache: {result.verdict}", err=True)
        raise typer.Exit(EXIT_NOT_SOUND)


_VERIFIED_ONLY = {
    "config": "--config",
    "settings": "--set",
    "speedup": "--speedup",
    "report": "--report",
    "ranks": "--ranks",
    "prefill_us": "--prefill-us",
    "host_us": "--host-us",
    "store_us": "--store-us",
    "explain": "--explain/--no-explain",
}


def _check_reference(context: typer.Context) -> None:
    problems = [
        f"{option}: belongs to a verified replay; leave it out, or leave out --reference"
        for name, option in _VERIFIED_ONLY.items()
        if is_given(context, name)
    ]
    if problems:
        raise ConfigError(problems)


def _check_numbers(
    speedup: float | None, prefill_us: float, host_us: float, store_us: float, ranks: int
) -> None:
    for name, value in (("--speedup", speedup), ("--prefill-us", prefill_us)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError([f"{name}: found {value}; expected a number above 0"])
    for name, value in (("--host-us", host_us), ("--store-us", store_us)):
        if not 0 <= value < float("inf"):
            raise ConfigError([f"{name}: found {value}; expected a number of at least 0"])
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(
            [
                f"--ranks: found {ranks}; expected 1 to {MAX_RANKS}: each is a cache with threads of its own, here"
            ]
        )


def _check_order(policy: str | None, granularity: str | None, *, reference: bool, bound: bool) -> None:
    from hicache.config import EVICTION_POLICIES, GRANULARITIES

    if policy is not None and policy not in EVICTION_POLICIES and "." not in policy:
        known = ", ".join(EVICTION_POLICIES)
        raise ConfigError(
            [f"--policy: {policy!r} is not a policy; known are {known}, or a class by its path"]
        )
    if granularity is not None and granularity not in GRANULARITIES:
        raise ConfigError([f"--granularity: found {granularity!r}; expected {' or '.join(GRANULARITIES)}"])
    if reference and granularity == "leaf" and policy not in (None, "lru"):
        raise ConfigError(
            [f"--granularity: leaf is published for lru only, not {policy!r}; leave out --reference"]
        )
    if bound and not reference:
        raise ConfigError(["--bound: the clairvoyant bound is known for --reference only; add that"])


def _hybrid(
    components: str | None, marks: str | None, policy: str | None, granularity: str | None, *, reference: bool
) -> HybridComponents | None:
    """The hybrid model that the reference's replay is to run; None for the path component alone."""
    from hicache.replay.components import parse_components

    if components is None:
        if marks is not None:
            raise ConfigError(["--marks: path payload alone needs no marks; add --components"])
        return None
    if not reference:
        raise ConfigError(
            ["--components: a configuration names its own components; add --reference or leave this out"]
        )
    if policy not in (None, "lru") or granularity is not None:
        raise ConfigError(
            [
                "--components: a hybrid model is replayed by lru, page by page; leave out --policy and --granularity"
            ]
        )
    return parse_components(components, marks)


def with_capacity(
    source: str, overrides: dict[str, object], capacity: str | None, trace: Trace
) -> HiCacheConfig:
    """The configuration, its device tier as large as ``--capacity`` says."""
    from hicache.config import load_config
    from hicache.replay.capacity import parse_capacity

    config = load_config(source, overrides=overrides)
    if capacity is None:
        return config
    wanted = parse_capacity(capacity).override(config, trace)
    return load_config(source, overrides={**overrides, **wanted})


def _verified(
    trace: Trace,
    config: HiCacheConfig,
    config_name: str,
    speedup: float | None,
    cost: CostModel,
    *,
    timeline: Timeline | None,
    ranks: int,
    quiet: bool,
) -> ReplayResult:
    from hicache.cli._progress import replay_progress
    from hicache.replay.ranks import replay_ranks
    from hicache.replay.run import replay as run_alone

    run = run_alone if ranks == 1 else partial(replay_ranks, num_ranks=ranks)

    progress = replay_progress(_error_console(), trace.num_requests, quiet=quiet)
    with stop_on_interrupt() as stop, progress as advance:
        result = run(
            trace,
            config,
            trace=trace.path,
            config_name=config_name,
            speedup=speedup,
            cost=cost,
            timeline=timeline,
            on_request=lambda so_far: advance(so_far.token_hit_rate),
            stop=stop,
        )
    result.skipped_lines = len(trace.skipped)
    if not result.interrupted:
        result.infinite_hit_tokens = trace.infinite_hit_tokens(
            config.model.page_size, last_token_written=False
        )
    return result


def _report(
    target: str, result: ReplayResult, timeline: Timeline, trace: Trace, cost: CostModel, *, quiet: bool
) -> None:
    """Compare the policies that sessions and traces are about, and write the page."""
    from rich.progress import Progress

    from hicache.config import EVICTION_POLICIES
    from hicache.replay.report import write_report
    from hicache.replay.versus import POLICIES, compare

    comparison = None
    if not result.interrupted:
        own = [result.policy] if result.policy in EVICTION_POLICIES else []
        with (
            stop_on_interrupt() as stop,
            Progress(console=_error_console(), transient=True, disable=quiet) as progress,
        ):
            task = progress.add_task("comparing policies", total=None)
            comparison = compare(
                trace,
                policies=[*own, *POLICIES],
                on_step=lambda done, total: progress.update(task, completed=done, total=total),
                stop=stop,
            )
    write_report(target, result, timeline, comparison, cost)


def _error_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _reference(
    trace: Trace,
    console: Console,
    capacity: str | None,
    policy: str | None,
    json_file: str | None,
    hybrid: HybridComponents | None,
    *,
    with_bound: bool,
    whole_leaves: bool,
    quiet: bool,
) -> None:
    from rich.progress import track

    from hicache.replay.bound import ClairvoyantBound
    from hicache.replay.capacity import parse_capacity
    from hicache.replay.hybrid import hybrid_replay
    from hicache.replay.reference import block_sequences, reference_replay, whole_leaf_replay
    from hicache.replay.tables import print_reference
    from hicache.replay.trace_tree import TraceTree

    wanted = [parse_capacity(word) for word in (capacity or REFERENCE_CAPACITIES).split(",")]
    blocks = [each.in_blocks(trace) for each in wanted]
    sequences = block_sequences(trace)
    bound = ClairvoyantBound(sequences) if with_bound else None
    tree = TraceTree(sequences) if whole_leaves else None

    results = []
    bar = track(blocks, "reference", console=_error_console(), disable=quiet, transient=True)
    with stop_on_interrupt() as stop:
        for count in bar:
            if stop.is_set():
                break
            if tree is not None:
                results.append(whole_leaf_replay(trace, count, tree, bound=bound))
                continue
            if hybrid is not None:
                results.append(hybrid_replay(trace, count, hybrid, sequences, bound=bound, stop=stop))
                continue
            results.append(
                reference_replay(
                    trace, count, policy=policy or "lru", sequences=sequences, bound=bound, stop=stop
                )
            )
    done, total = sum(result.requests for result in results), trace.num_requests * len(blocks)
    results = [result for result in results if result.requests == trace.num_requests]
    if not results:
        raise interrupted(done, total)
    print_reference(console, results)
    reports = [result.as_json() for result in results]
    write_json(
        json_file,
        {
            **reports[-1],
            "skipped_lines": len(trace.skipped),
            "interrupted": done < total,
            "by_capacity": reports,
        },
    )
    if done < total:
        raise interrupted(done, total)
    if any(result.audit_errors for result in results):
        raise typer.Exit(EXIT_NOT_SOUND)
