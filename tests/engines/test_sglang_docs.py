"""The commands that README.md and docs/engines/sglang.md show: SGLang's own parser takes them, and what they name works.

The server itself needs a GPU. Its flags are read by its parser, and the extra config attaches a backend by its factory,
with the YAML of the guide, on a folder and a Redis that are here.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.testing.doc_blocks import ROOT, Block, blocks_of, blocks_that_need, shrunk
from hicache.testing.redis_server import RedisServer
from hicache.testing.sglang_pools import fill, mha_pool, page_of
from hicache.testing.sglang_released import import_server_arguments, import_sglang
from hicache.testing.sglang_rig import SglangRig, storage_config

pytestmark = [pytest.mark.engines, pytest.mark.redis]

GUIDE = ROOT / "docs" / "engines" / "sglang.md"
BLOCKS = blocks_that_need("sglang")


@pytest.fixture
def guide_yaml(tmp_path: Path) -> dict[str, Any]:  # Any: what a YAML may hold
    """The guide's configuration with places that are here."""
    shown = next(block.text for block in blocks_of(GUIDE) if block.language == "yaml")
    tree = shrunk(yaml.safe_load(shown.replace("/var/lib/hicache", str(tmp_path / "pages"))))
    tree["metrics"]["port"] = 0
    assert isinstance(tree, dict)
    return tree


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_command_starts_a_server_with_a_backend_that_keeps_pages(
    block: Block, guide_yaml: dict[str, Any], tmp_path: Path
) -> None:
    ((python, module_flag, module, *flags),) = block.commands()
    assert (python, module_flag, module) == ("python", "-m", "sglang.launch_server")
    parser = ArgumentParser()
    import_server_arguments().add_cli_args(parser)
    given = parser.parse_args(flags)
    assert (given.enable_hierarchical_cache, given.hicache_storage_backend) == (True, "dynamic")
    controller = import_sglang().controller.HybridCacheController
    extra, *_, passes_prefix_keys = controller.parse_storage_backend_extra_config(
        given.hicache_storage_backend_extra_config
    )
    assert passes_prefix_keys == ("pass_prefix_keys" in given.hicache_storage_backend_extra_config)
    assert extra["config_file"] == "/etc/hicache/sglang.yaml"
    with RedisServer(tmp_path / "redis") as server:
        far = guide_yaml["tiers"]["stores"][1]
        assert (far.pop("url"), far.pop("password_env")) == ("rediss://cache.internal:6379", "CACHE_PASSWORD")
        far["url"] = server.url
        (tmp_path / "sglang.yaml").write_text(yaml.safe_dump(guide_yaml))
        extra["config_file"] = str(tmp_path / "sglang.yaml")
        is_page_first = given.hicache_mem_layout == "page_first"
        config = storage_config(
            extra_config=extra, model_name=given.model_path, is_page_first_layout=is_page_first
        )
        pool = mha_pool(given.hicache_mem_layout)
        fill(pool, 1)
        with SglangRig(config, pool) as rig:
            assert rig.put(["a", "b"], [0, 1]) == [True, True]
            assert rig.get(["a", "b"], [2, 3]) == [True, True]
            assert [page_of(pool, 2), page_of(pool, 3)] == [page_of(pool, 0), page_of(pool, 1)]
        assert len(server.names()) == 2
    assert len(list((tmp_path / "pages").iterdir())) > 0


def test_there_are_commands_to_check() -> None:
    assert {block.page.name for block in BLOCKS} == {"README.md", "sglang.md"}
