"""``hicache explain``: why one request of a trace was not reused in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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
    from hicache.explain import Explanation
    from hicache.replay.divergence import Divergence
    from hicache.replay.simulated import Served

app = typer.Typer(add_completion=False)


@app.command()
def explain(
    trace: Annotated[str, typer.Argument(help="Trace file (JSON lines, plain, .gz or .zst).")],
    request: Annotated[int, typer.Option(min=1, help="Which request, in order of arrival, from 1.")],
    config: Annotated[str, typer.Option(help="A YAML file, or a preset: cpu, cuda, hybrid, redis.")] = "cpu",
    capacity: Annotated[
        str | None, typer.Option(help="Device tier: bytes (64MiB), 512-token blocks (8192), or percent (5%).")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip bad lines and count them.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the answer as one JSON object; - for stdout.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Replay a trace up to a request and say, range by range, why its tokens were not reused."""
    from hicache.cli.replay import with_capacity
    from hicache.replay.divergence import divergence
    from hicache.replay.run import replay as run
    from hicache.workload import read_trace

    check_json_target(json_file)
    loaded = read_trace(trace, skip_bad=skip_bad)
    if request > loaded.num_requests:
        raise ConfigError([f"--request: found {request}; the trace has requests 1 to {loaded.num_requests}"])
    wanted = read_trace(trace, skip_bad=skip_bad, limit=request)
    overrides = {**read_settings(settings or []), "explain.enabled": True}
    found: list[Served] = []
    with stop_on_interrupt() as stop:
        run(
            wanted,
            with_capacity(config, overrides, capacity, loaded),
            trace=wanted.path,
            config_name=config,
            on_served=lambda _, served: found.append(served),
            stop=stop,
        )
    if len(found) < request:
        raise interrupted(len(found), request)
    answer = found[-1].explanation
    assert answer is not None
    place = divergence(wanted)
    console = report_console(json_file)
    console.print(f"request {request} of {wanted.path}: {answer}", highlight=False, markup=False)
    if place is not None:
        console.print(f"  {place}", highlight=False, markup=False)
    write_json(json_file, _as_json(request, answer, place))


def _as_json(request: int, answer: Explanation, place: Divergence | None) -> dict[str, object]:
    return {
        "request": request,
        "prompt_tokens": answer.prompt_len,
        "found_tokens": answer.found,
        "reused_tokens": answer.reused,
        "reusable_tokens": answer.limit,
        "diverged_at": None if place is None else place.token,
        "most_alike_request": None if place is None else place.request,
        "lost_tokens": {cause.value: count for cause, count in answer.lost_tokens.items()},
        "lost": [
            {
                "begin": lost.begin,
                "end": lost.end,
                "cause": lost.cause.value,
                "component": lost.component,
                "tier": None if lost.departure is None else lost.departure.tier.name.lower(),
                "left_at_s": None if lost.departure is None else lost.departure.at_s,
                "left_because": None if lost.departure is None else lost.departure.cause.value,
                "detail": lost.detail,
            }
            for lost in answer.lost
        ],
    }
