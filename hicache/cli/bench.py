"""``hicache bench``: loads whose right answer is known, and stated settings that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hicache.cli._settings import (
    check_json_target,
    interrupted,
    report_console,
    stop_on_interrupt,
    write_json,
)
from hicache.cli.config import Settings, read_settings
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from hicache.replay.compare import Comparison
    from hicache.replay.cost import CostModel
    from hicache.replay.result import ReplayResult
    from hicache.workload import MultiTurn

app = typer.Typer(
    help="Loads whose right answer is known, and stated settings.", no_args_is_help=True, add_completion=False
)

EXIT_NOT_SOUND = 1
_DISK = {"kind": "disk", "path": "auto", "capacity": "64GiB"}

Json = Annotated[
    str | None, typer.Option("--json", help="Write the report as one JSON object; - for stdout.")
]
Seed = Annotated[int, typer.Option(help="Seed of the tokens, and of the order of the sessions.")]
PageSize = Annotated[int, typer.Option(help="Tokens a page.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


@app.callback()
def _bench() -> None:
    """Loads whose right answer is known, and stated settings."""


@app.command("multi-turn")
def multi_turn(
    sessions: Annotated[int, typer.Option(help="Concurrent conversations.")] = 8,
    turns: Annotated[int, typer.Option(help="Turns of each.")] = 10,
    system: Annotated[int, typer.Option(help="Tokens of the system prompt that all share.")] = 2000,
    user: Annotated[int, typer.Option(help="Tokens the user adds each turn.")] = 300,
    output: Annotated[int, typer.Option(help="Tokens of each answer.")] = 200,
    shuffled: Annotated[
        bool, typer.Option("--shuffled", help="Sessions come in a new random order each turn.")
    ] = False,
    components: Annotated[str, typer.Option(help="full, swa, mamba, joined by +.")] = "full",
    page_size: PageSize = 64,
    config: Annotated[
        str | None,
        typer.Option(help="A YAML file or preset instead of pools that hold everything."),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(help="Compare these with each other and with the bound, like lru,session."),
    ] = None,
    capacities: Annotated[
        str | None,
        typer.Option(help="With --policies: device tier in shares of the footprint. [10%,25%,50%,75%,100%]"),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="With --policies: draw hit rate over capacity, as .svg or .png.")
    ] = None,
    seed: Seed = 0,
    json_file: Json = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> None:
    """Replay a synthetic multi-turn load and compare each turn with its closed form.

    Without --config the pools are sized to hold everything; --set makes them smaller. Exit code 1 if
    a byte was wrong, the audit found something, a missing token has no explanation, or nothing was compared.
    """
    from hicache.cli._progress import replay_progress
    from hicache.config import load_config
    from hicache.replay.bench_tables import print_multi_turn
    from hicache.replay.footprint import component_names, roomy_config
    from hicache.replay.multiturn import run_multi_turn

    load = _load(
        "multi-turn",
        sessions=sessions, turns=turns, system=system, user=user, output=output, shuffled=shuffled,
    )  # fmt: skip
    check_json_target(json_file)
    overrides = read_settings(settings or [])
    if policies is not None:
        if config is not None:
            raise ConfigError(["--policies: sizes the pools itself; leave out --config"])
        _compare(
            load, components, page_size, policies, capacities, plot, overrides, seed, json_file, quiet=quiet
        )
        return
    for option, value in (("--capacities", capacities), ("--plot", plot)):
        if value is not None:
            raise ConfigError([f"{option}: compares policies; add --policies, like --policies lru,session"])
    names = component_names(components, page_size)
    source = config if config is not None else roomy_config(load, names, page_size)
    chosen = load_config(source, overrides=overrides)
    progress = replay_progress(_error_console(), load.num_requests, quiet=quiet)
    with stop_on_interrupt() as stop, progress as advance:
        result = run_multi_turn(load, chosen, seed=seed, on_request=_told(advance), stop=stop)
    print_multi_turn(report_console(json_file), result)
    write_json(json_file, result.as_json())
    if result.replay.interrupted:
        raise interrupted(result.replay.requests, load.num_requests)
    _leave([result.replay], sound=result.is_sound)


@app.command("late-turns")
def late_turns(
    components: Annotated[
        str, typer.Option(help="Models, each of full, swa, mamba joined by +.")
    ] = "full,full+swa,full+mamba,full+swa+mamba",
    sessions: Annotated[int, typer.Option(help="Concurrent conversations.")] = 24,
    turns: Annotated[int, typer.Option(help="Turns of each.")] = 200,
    first_turn: Annotated[int, typer.Option(help="The first turn that counts.")] = 176,
    user: Annotated[int, typer.Option(help="Tokens the user adds each turn.")] = 40,
    output: Annotated[int, typer.Option(help="Tokens of each answer.")] = 24,
    stride: Annotated[
        int,
        typer.Option(help="Until shortly before the first turn, one request for so many turns; 1: for each."),
    ] = 8,
    device: Annotated[str, typer.Option(help="L1, as a share of the footprint.")] = "5%",
    host: Annotated[str, typer.Option(help="L2, as a share of the footprint.")] = "50%",
    store: Annotated[str, typer.Option(help="L3: disk (a temporary folder) or memory.")] = "disk",
    page_size: PageSize = 32,
    seed: Seed = 0,
    json_file: Json = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> None:
    """Late turns of long chats, with an L1 that is far too small and large L2 and L3.

    Every reused byte is compared. Exit code 1 if a model hits less than 99.5 % of what a cache with room for
    everything would, or anything is not sound.
    """
    from hicache.cli._progress import replay_progress
    from hicache.replay.bench_tables import print_late_turns
    from hicache.replay.footprint import component_names
    from hicache.replay.late_turns import LateTurns
    from hicache.workload import check_reuse

    load = _load(
        "late-turns",
        sessions=sessions, turns=turns, user=user, output=output, shuffled=True,
        stride=stride, every_turn_from=max(1, first_turn - stride),
    )  # fmt: skip
    if not 1 < first_turn <= turns:
        raise ConfigError([f"--first-turn: found {first_turn}; expected 2 to {turns}, the last turn"])
    try:
        check_reuse(load, page_size, first_turn)
    except ValueError as error:
        raise ConfigError([f"bench late-turns: {error}"]) from error
    models = components.split(",")
    for model in models:
        component_names(model, page_size)
    check_json_target(json_file)
    bench = LateTurns(
        load, page_size, first_turn, _share("--device", device), _share("--host", host), _store(store)
    )
    overrides = read_settings(settings or [])
    results = []
    with stop_on_interrupt() as stop:
        for model in models:
            with replay_progress(_error_console(), load.num_requests, quiet=quiet) as advance:
                result = bench.run(
                    model,
                    overrides=overrides,
                    seed=seed,
                    on_request=_told(advance),
                    stop=stop,
                )
            results.append(result)
            if result.result.replay.interrupted:
                break
    last = results[-1].result.replay
    complete = results[:-1] if last.interrupted else results
    if complete:
        print_late_turns(report_console(json_file), complete)
    write_json(
        json_file,
        {"settings": {**bench.as_json(), "set": overrides}, "results": [each.as_json() for each in results]},
    )
    if last.interrupted:
        done = sum(result.result.replay.requests for result in results)
        raise interrupted(done, load.num_requests * len(models))
    _leave(
        [result.result.replay for result in results],
        sound=all(result.is_reached and result.result.is_sound for result in results),
    )


@app.command("agent")
def agent(
    traces: Annotated[list[str], typer.Argument(help="Trace files, each replayed on its own.")],
    policies: Annotated[
        str, typer.Option(help="Replay with each: lru knows no sessions, session does.")
    ] = "lru,session",
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sessions at the same time, instead of as recorded; pauses within them stay."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="L1, as a share of the trace's distinct blocks.")] = "10%",
    host: Annotated[str, typer.Option(help="L2, the same way.")] = "40%",
    store: Annotated[str, typer.Option(help="L3: disk (a temporary folder), memory or none.")] = "disk",
    page_size: PageSize = 512,
    prefill_us: Annotated[float, typer.Option(help="Cost model: prefill, microseconds a token.")] = 100.0,
    host_us: Annotated[float, typer.Option(help="Cost model: load from L2, microseconds a token.")] = 4.0,
    store_us: Annotated[float, typer.Option(help="Cost model: fetch from L3, microseconds a token.")] = 33.0,
    json_file: Json = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> None:
    """Agents as recorded, session-aware and not: hits by tier, and the time to the first token.

    That time is the stated cost model's, not measured; the hits are, and every reused byte is compared.
    """
    from hicache.cli._progress import replay_progress
    from hicache.replay.agent import AgentBench, with_workers
    from hicache.replay.bench_tables import print_agent
    from hicache.workload import read_trace

    bench = AgentBench(
        page_size,
        _share("--device", device),
        _share("--host", host, least=0),
        None if store == "none" else _store(store),
        _cost(prefill_us, host_us, store_us),
    )
    names = _policies(policies)
    check_json_target(json_file)
    overrides = read_settings(settings or [])
    loaded = [read_trace(trace, limit=requests) for trace in traces]
    if workers is not None:
        loaded = [with_workers(trace, workers) for trace in loaded]
    console = report_console(json_file)
    reports: list[object] = []
    runs: list[ReplayResult] = []
    sound, done, ends = True, 0, False
    with stop_on_interrupt() as stop:
        for trace in loaded:
            results = []
            for policy in names:
                with replay_progress(_error_console(), trace.num_requests, quiet=quiet) as advance:
                    result = bench.run(
                        trace,
                        policy,
                        overrides=overrides,
                        on_request=_told(advance),
                        stop=stop,
                    )
                results.append(result)
                done += result.result.requests
                ends = result.result.interrupted
                if ends:
                    break
            if not ends:
                print_agent(console, trace.path, results)
            reports.append({"trace": trace.path, "policies": [result.as_json() for result in results]})
            runs += [result.result for result in results]
            sound = sound and all(result.is_sound for result in results)
            if ends:
                break
    write_json(
        json_file, {"settings": {**bench.as_json(), "workers": workers, "set": overrides}, "results": reports}
    )
    if ends:
        raise interrupted(done, len(names) * sum(trace.num_requests for trace in loaded))
    _leave(runs, sound=sound)


def _compare(
    load: MultiTurn,
    components: str,
    page_size: int,
    policies: str,
    capacities: str | None,
    plot: str | None,
    overrides: dict[str, object],
    seed: int,
    json_file: str | None,
    *,
    quiet: bool,
) -> None:
    from hicache.cli._progress import replay_progress
    from hicache.replay.bench_tables import print_comparison
    from hicache.replay.compare import compare_policies, parse_shares
    from hicache.replay.footprint import component_names
    from hicache.report import check_picture

    if plot is not None:
        check_picture(plot)
    names, shares = _policies(policies), parse_shares(capacities or "10%,25%,50%,75%,100%")
    total = load.num_requests * len(names) * len(set(shares))
    progress = replay_progress(_error_console(), total, quiet=quiet)
    with stop_on_interrupt() as stop, progress as advance:
        comparison = compare_policies(
            load,
            component_names(components, page_size),
            page_size,
            policies=names,
            shares=shares,
            overrides=overrides,
            seed=seed,
            on_request=_told(advance),
            stop=stop,
        )
    print_comparison(report_console(json_file), comparison)
    write_json(json_file, comparison.as_json())
    if plot is not None and comparison.rows:
        _draw(plot, comparison)
    if comparison.is_interrupted:
        raise interrupted(comparison.requests, total)
    runs = [result.replay for row in comparison.rows for result in row.by_policy.values()]
    _leave(runs, sound=comparison.is_sound)


def _draw(target: str, comparison: Comparison) -> None:
    from hicache.report import HitRateCurves, draw_hit_rates

    rows, load = comparison.rows, comparison.load
    bounds = [row.bound_hit_rate for row in rows if row.bound_hit_rate is not None]
    order = "a new order each turn" if load.shuffled else "one order"
    draw_hit_rates(
        target,
        HitRateCurves(
            title=f"Multi-turn load, {'+'.join(comparison.components)}: hit rate over capacity",
            subtitle=f"{load.sessions} sessions in {order}, {load.turns} turns of {load.user} + {load.output} tokens,"
            f" system prompt of {load.system}",
            capacity_label="device tier (share of the load's footprint)",
            capacities=[row.share for row in rows],
            by_policy={
                policy: [row.by_policy[policy].replay.token_hit_rate for row in rows]
                for policy in rows[0].by_policy
            },
            bound=bounds if len(bounds) == len(rows) else None,
            ceiling=comparison.closed_form_hit_rate,
        ),
    )


def _load(command: str, **sizes: Any) -> MultiTurn:  # Any: whole numbers and a flag
    from hicache.workload import MultiTurn

    try:
        return MultiTurn(**sizes)
    except ValueError as error:
        raise ConfigError([f"bench {command}: {error}"]) from error


def _policies(text: str) -> list[str]:
    from hicache.config import EVICTION_POLICIES

    names = text.split(",")
    unknown = [name for name in names if name not in EVICTION_POLICIES and "." not in name]
    if unknown or len(set(names)) != len(names):
        known = ", ".join(EVICTION_POLICIES)
        raise ConfigError(
            [f"--policies: {text!r}; expected some of {known}, or classes by their paths, each once"]
        )
    return names


def _share(option: str, text: str, *, least: float = 1e-6) -> float:
    """A share of the footprint, like ``5%`` or ``0.05``."""
    word = text.strip()
    try:
        share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not least <= share <= 10:
        raise ConfigError([f"{option}: {text!r}; expected a share of at most 1000%, like 5%"])
    return share


def _store(kind: str) -> dict[str, object]:
    stores: dict[str, dict[str, object]] = {"disk": dict(_DISK), "memory": {"kind": "memory"}}
    if kind not in stores:
        raise ConfigError([f"--store: found {kind!r}; expected {' or '.join(stores)}"])
    return stores[kind]


def _cost(prefill_us: float, host_us: float, store_us: float) -> CostModel:
    from hicache.replay.cost import CostModel

    for name, value in (("--prefill-us", prefill_us), ("--host-us", host_us), ("--store-us", store_us)):
        if not 0 <= value < float("inf"):
            raise ConfigError([f"{name}: found {value}; expected a number of at least 0"])
    return CostModel(prefill_us, host_us, store_us)


def _told(advance: Callable[[float], None]) -> Callable[[ReplayResult], None]:
    return lambda so_far: advance(so_far.token_hit_rate)


def _leave(runs: Sequence[ReplayResult], *, sound: bool) -> None:
    """Exit code 1 for what is not sound, and where no run compared anything: nothing could have been found wrong."""
    if sound and any(run.pages_checked for run in runs):
        return
    if sound:
        typer.echo(f"hicache: {runs[0].verdict}", err=True)
    raise typer.Exit(EXIT_NOT_SOUND)


def _error_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)
