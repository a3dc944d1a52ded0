"""``hicache bench``: loads whose right answer is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from hicache.cli._settings import report_console, stop_on_interrupt, write_json
from hicache.cli.config import Settings, read_settings
from hicache.errors import ConfigError
from hicache.types import MAX_PAGE_SIZE

app = typer.Typer(help="Loads whose right answer is known.", no_args_is_help=True, add_completion=False)

EXIT_NOT_SOUND = 1
EXIT_INTERRUPTED = 130
_COMPONENTS: Mapping[str, Mapping[str, object]] = {
    "full": {"rule": "path", "layers": 2, "bytes_per_token": 16},
    "swa": {"rule": "window", "window": 1024, "layers": 2, "bytes_per_token": 16},
    "mamba": {"rule": "checkpoint", "layers": 2, "state_bytes": 16384},
}


@app.callback()
def _bench() -> None:
    """Loads whose right answer is known."""


@app.command("multi-turn")
def multi_turn(
    sessions: Annotated[int, typer.Option(help="Concurrent conversations.")] = 8,
    turns: Annotated[int, typer.Option(help="Turns of each.")] = 10,
    system: Annotated[int, typer.Option(help="Tokens of the system prompt that all share.")] = 2000,
    user: Annotated[int, typer.Option(help="Tokens the user adds each turn.")] = 300,
    output: Annotated[int, typer.Option(help="Tokens of each answer.")] = 200,
    components: Annotated[str, typer.Option(help="full, swa, mamba, joined by +.")] = "full",
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    config: Annotated[
        str | None,
        typer.Option(help="A YAML file or preset instead of pools that hold everything."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tokens.")] = 0,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the report as one JSON object; - for stdout.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Replay a synthetic multi-turn load and compare each round with its closed form.

    Without --config the pools are sized to hold everything; --set makes them smaller. Exit code 1 if
    a byte was wrong, the audit found something, or a missing token has no explanation.
    """
    from hicache.config import load_config
    from hicache.replay.multiturn import run_multi_turn
    from hicache.replay.tables import print_multi_turn
    from hicache.workload import MultiTurn

    try:
        load = MultiTurn(sessions=sessions, turns=turns, system=system, user=user, output=output)
    except ValueError as error:
        raise ConfigError([f"bench multi-turn: {error}"]) from error
    overrides = read_settings(settings or [])
    source = config if config is not None else roomy_config(load, components.split("+"), page_size)
    with stop_on_interrupt() as stop:
        result = run_multi_turn(load, load_config(source, overrides=overrides), seed=seed, stop=stop)
    print_multi_turn(report_console(json_file), result)
    write_json(json_file, result.as_json())
    if result.replay.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not result.is_sound:
        raise typer.Exit(EXIT_NOT_SOUND)


def roomy_config(load: object, names: list[str], page_size: int) -> dict[str, object]:
    """Settings under which the whole load fits the device pool, whatever the components."""
    from hicache.workload import MultiTurn

    assert isinstance(load, MultiTurn)
    unknown = sorted(set(names) - set(_COMPONENTS))
    if unknown or len(set(names)) != len(names):
        known = "+".join(_COMPONENTS)
        raise ConfigError([f"--components: {'+'.join(names)!r}; expected some of {known}, each once"])
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ConfigError([f"--page-size: found {page_size}; expected 1 to {MAX_PAGE_SIZE}"])
    longest = load.prompt_length(load.turns - 1) + load.output + 2 * page_size
    tokens = load.sessions * (longest + load.turns * 2 * page_size)
    needed: dict[str, int] = {}
    for name in names:
        settings = _COMPONENTS[name]
        if settings["rule"] == "checkpoint":
            states = load.sessions * load.turns * 4 + 16
            needed[name] = states * int(str(settings["state_bytes"]))
        else:
            window = int(str(settings.get("window", 0)))  # of a short load a window still needs its size
            kept = max(tokens, window + 2 * page_size)
            needed[name] = kept * int(str(settings["bytes_per_token"]))
    total = sum(needed.values())
    split = {name: size / total for name, size in needed.items()}
    return {
        "model": {
            "name": "bench",
            "page_size": page_size,
            "components": {name: dict(_COMPONENTS[name]) for name in names},
        },
        "tiers": {"device": {"kind": "cpu", "capacity": total + total // 50, "split": split}},
        "policy": {"watermarks": {"device": {"low": 0, "high": 0}, "host": {"low": 0, "high": 0}}},
    }
