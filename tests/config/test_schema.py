"""The schema and its documentation agree (case O-59), and reading it needs nothing heavy."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from typing import Any

import pytest
import yaml

import hicache.config
from hicache.config import EVICTION_POLICIES, explain_config, load_config, preset_names
from hicache.config.walk import is_text, schema_keys, section_at
from hicache.radix.ordering import ORDERINGS


def preset_text(name: str) -> str:
    return files("hicache.config").joinpath("presets", f"{name}.yaml").read_text(encoding="utf-8")


def documented_names(text: str) -> set[str]:
    """Every ``key:`` in a preset's text, commented out or not."""
    names = set()
    for line in text.splitlines():
        bare = line.lstrip(" #-")
        for part in bare.replace("{", ",").split(","):
            key, colon, _ = part.strip().partition(":")
            if colon and key.replace("_", "").isalnum():
                names.add(key)
    return names


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_is_valid_and_named_for_what_it_needs(preset: str) -> None:
    config = load_config(preset, environ={})
    assert config.tiers.device.kind == ("cuda" if preset == "cuda" else "cpu")
    assert config.tiers.host is not None
    assert [store.kind for store in config.tiers.stores] == ["redis" if preset == "redis" else "disk"]


@pytest.mark.parametrize("preset", preset_names())
def test_every_key_of_a_preset_is_explained_on_its_line(preset: str) -> None:
    lines = preset_text(preset).splitlines()
    assert [line for line in lines if line.strip() and "#" not in line] == []


def test_every_key_of_the_schema_stands_in_a_preset() -> None:
    documented = set().union(*(documented_names(preset_text(name)) for name in preset_names()))
    assert {key.rpartition(".")[2] for key, _ in schema_keys()} - documented == set()


def test_a_default_that_the_cpu_preset_shows_is_the_default() -> None:
    """With the keys that it shows behind ``# `` switched on, the configuration stays the same."""
    lines = preset_text("cpu").splitlines()
    start = lines.index(next(line for line in lines if line.startswith("model:")))
    exclusive = ("window", "state_bytes", "capacity_per_rank")
    shown = "\n".join(
        line if any(f"# {key}:" in line for key in exclusive) else re.sub(r"^( *)# ", r"\1", line, count=1)
        for line in lines[start:]
    )
    tree = yaml.safe_load(shown)
    explained = {path: value for path, value, _ in explain_config("cpu", environ={})}
    for tier in ("device", "host"):  # a keyword that says what nothing says, too
        assert tree["tiers"][tier].pop("split") == explained[f"tiers.{tier}.split"]
    assert load_config(tree, environ={}) == load_config("cpu", environ={})


def test_every_key_of_the_schema_is_described() -> None:
    assert [key for key, description in schema_keys() if not description] == []


def test_a_path_leads_to_the_section_that_stands_there() -> None:
    data: dict[str, Any] = {"tiers": {"stores": [{"kind": "redis"}]}}
    section = section_at(("tiers", "stores", 0), data)
    assert section is not None
    assert "url" in section.model_fields
    assert section_at(("tiers", "nothing")) is None
    assert is_text(("model", "weights"))
    assert not is_text(("model", "page_size"))


def test_policies_are_those_the_tree_has() -> None:
    assert set(EVICTION_POLICIES) == set(ORDERINGS)


def test_public_names_are_sorted_and_exist() -> None:
    names = hicache.config.__all__
    constants = [name for name in names if name.isupper()]
    classes = [name for name in names if name[0].isupper() and not name.isupper()]
    functions = [name for name in names if name[0].islower()]
    assert names == sorted(constants) + sorted(classes) + sorted(functions)
    assert all(hasattr(hicache.config, name) for name in names)


def test_reading_a_configuration_imports_nothing_heavy() -> None:
    code = (
        "import sys, hicache.cli.config\n"
        "heavy = {'torch', 'numpy', 'redis', 'aiofiles', 'cupy', 'hicache.radix', 'rich.table'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
