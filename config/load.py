"""Files, presets, environment and arguments to one validated configuration.

Precedence: defaults < file < environment (``HICACHE__TIERS__HOST__CAPACITY``) < arguments. Every
value knows its origin, and everything that is wrong is told at once, one line each::

    tiers.host.capacity (hicache.yaml:12): found '20XB', whose unit 'XB' is unknown; expected ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath

import yaml

from hicache.config.document import read_document
from hicache.config.fields import Path, Problem, dotted
from hicache.config.layers import DEFAULT, Layers
from hicache.config.refusal import validate
from hicache.config.schema import HiCacheConfig
from hicache.config.tiers import FIXED_SPLIT, SHARED_SPLIT
from hicache.errors import ConfigError

Source = str | FilePath | Mapping[str, object]


def load_config(
    source: Source,
    *,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> HiCacheConfig:
    """Read, merge and check a configuration.

    Args:
        source: a file, a preset's name (``cpu``, ``cuda``, ``redis``, ``hybrid``), or the tree itself.
        overrides: dotted path to value, ``{"tiers.host.capacity": "20GiB"}``; a value is what the YAML
            would hold, ``None`` takes back what file and environment say.
        environ: where ``HICACHE__`` variables are looked up; default: this process's environment.

    Raises:
        ConfigError: with every problem found, one line each.
    """
    return _load(source, overrides, environ)[0]


def explain_config(
    source: Source,
    *,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[tuple[str, str, str]]:
    """Every leaf of the effective configuration: (dotted path, value as YAML, origin).

    An origin reads ``default``, ``file cpu.yaml:12``, ``mapping``, ``environment HICACHE__...`` or
    ``argument``. A split that nobody wrote is shown as what it comes to, with ``default for kind cpu`` where the kind
    decides. Takes and raises what ``load_config`` does.
    """
    config, layers = _load(source, overrides, environ)
    splits = dict(_unwritten_splits(config))
    rows = []
    for path, value in _leaves(config.model_dump(mode="json"), ()):
        shown, why = splits.get(path, (value, str(DEFAULT)))
        rows.append((dotted(path), _write_scalar(shown), str(layers.origins.get(path, why))))
    return rows


def _unwritten_splits(config: HiCacheConfig) -> Iterator[tuple[Path, tuple[str, str]]]:
    """The keyword that each split without a value stands for, and why."""
    device, host = config.tiers.device, config.tiers.host
    if device.split is None:
        keyword = SHARED_SPLIT if device.is_shared else FIXED_SPLIT
        yield ("tiers", "device", "split"), (keyword, f"default for kind {device.kind}")
    if host is not None and host.split is None:
        yield ("tiers", "host", "split"), (SHARED_SPLIT, str(DEFAULT))


def dump_config(config: HiCacheConfig) -> str:
    """The effective configuration as YAML; loading it again gives an equal configuration."""
    tree = config.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=1000)


def _load(
    source: Source, overrides: Mapping[str, object] | None, environ: Mapping[str, str] | None
) -> tuple[HiCacheConfig, Layers]:
    layers = Layers()
    try:
        if isinstance(source, Mapping):
            layers.lay_mapping(source)
        else:
            layers.lay_document(read_document(source))
        layers.lay_environment(os.environ if environ is None else environ)
        layers.lay_arguments({} if overrides is None else overrides)
    except RecursionError:
        raise ConfigError(["a value is nested too deeply, or holds itself; expected plain data"]) from None
    config, problems = validate(layers.data)
    lines = [*layers.problems, *(_line(problem, layers) for problem in problems)]
    if config is None or lines:
        raise ConfigError(lines)
    return config, layers


def _line(problem: Problem, layers: Layers) -> str:
    origin = layers.origin(problem.path)
    if origin is DEFAULT:
        return f"{dotted(problem.path)}: {problem.text}"
    return f"{dotted(problem.path)} ({origin.place if origin.kind == 'file' else origin}): {problem.text}"


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    elif isinstance(value, list) and value:
        for i, child in enumerate(value):
            yield from _leaves(child, (*path, i))
    else:
        yield path, value


def _write_scalar(value: object) -> str:
    """One value as it would stand in the YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=100_000)
    return text.removesuffix("\n").removesuffix("\n...")
