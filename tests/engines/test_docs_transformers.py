"""What README.md and docs/engines/transformers.md show, run as it stands there with a tiny model and a tokenizer of words."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.testing.doc_blocks import ROOT, blocks_of, blocks_that_need, shrunk
from hicache.testing.tiny_models import VOCABULARY, make_tiny_model

pytestmark = pytest.mark.engines

GUIDE = ROOT / "docs" / "engines" / "transformers.md"
BLOCKS = blocks_that_need("transformers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's configuration, smaller and on the CPU, and a model with its tokenizer on the disk."""
    tokenizers = import_module("tokenizers")
    shown = next(block.text for block in blocks_of(GUIDE) if block.language == "yaml")
    here = shown.replace("kind: cuda", "kind: cpu").replace("pinned: true", "pinned: false")
    here = here.replace("/var/lib/hicache", str(tmp_path / "pages"))
    (tmp_path / "hicache.yaml").write_text(yaml.safe_dump(shrunk(yaml.safe_load(here))))
    vocabulary = {f"w{n}": n for n in range(VOCABULARY)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.save_pretrained(tmp_path / "model")
    make_tiny_model("Llama").save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_blocks_run_one_after_the_other(folder: Path) -> None:
    """The guide's first, which makes what README.md goes on from; then README's, a restart later, from the disk."""
    names: dict[str, Any] = {  # Any: whatever blocks define
        "NAME": str(folder / "model"),
        "prompt": " ".join(f"w{n}" for n in range(1, 401)),
    }
    for block in sorted(BLOCKS, key=lambda block: block.page != GUIDE):
        code = block.text.replace('.to("cuda")', '.to("cpu")')
        exec(compile("\n" * block.line + code, str(block.page), "exec"), names)
    assert len(BLOCKS) == 3
    answer = names["answer"]
    assert (answer.reused, answer.source.store) == (384, 384), "whole pages of 16, not the last token"
    assert len(answer.tokens) == 256
