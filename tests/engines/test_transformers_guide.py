"""What README.md and docs/engines/transformers.md print, run as it stands; only sizes, device and folders are a test's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.testing.tiny_models import VOCABULARY, make_tiny_model

pytestmark = pytest.mark.engines

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/engines/transformers.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

Words = Callable[[int], list[int]]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A model and its tokenizer, whose words are the numbers of tokens."""
    folder = tmp_path / "model"
    make_tiny_model("LaraMini").save_pretrained(folder)
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCABULARY)}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=split).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the guide's YAML for a machine without a GPU."""
    (yaml,) = blocks(GUIDE, "yaml")
    for printed, small in (
        ("kind: cuda", "kind: cpu"),
        ("20GiB", "1MiB"),
        ("100GiB", "4MiB"),
        ("pinned: true", "pinned: false"),
        ("1TiB", "64MiB"),
        ("/var/lib/hicache", str(tmp_path / "disk")),
        ("min_tokens: 256", "min_tokens: 0"),
    ):
        assert printed in yaml
        yaml = yaml.replace(printed, small)
    (tmp_path / "hicache.yaml").write_text(yaml)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_guide_runs_as_printed_and_shows_a_hit(
    checkpoint: str, here: Path, words: Words, capsys: pytest.CaptureFixture[str]
) -> None:
    start, see = blocks(GUIDE, "python")
    assert '.to("cuda")' in start
    start = start.replace('.to("cuda")', '.to("cpu")')
    known: dict[str, Any] = {"NAME": checkpoint, "prompt": " ".join(map(str, words(60)))}
    for expected in (0, 48):  # the second run is a restart: the hit comes from the disk
        exec(compile(start, "transformers.md", "exec"), known)  # our own page
        assert known["answer"].reused == expected
        assert capsys.readouterr().out.split()
    assert known["answer"].source.store == 48
    shown = [eval(line, known) for line in see.splitlines()]  # our own page
    assert shown[0] == 48
    assert set(shown[2]) == {"full", "swa", "mamba"}
    assert shown[3] >= 48


def test_the_example_of_the_readme_runs_as_printed(
    checkpoint: str, here: Path, words: Words, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import PreTrainedTokenizerFast

    (example,) = (block for block in blocks(README, "python") if "TransformersEngine" in block)
    lines = [line for line in example.splitlines() if line]
    assert len(lines) <= 5
    known: dict[str, Any] = {
        "model": make_tiny_model("Llama"),
        "tokenizer": PreTrainedTokenizerFast.from_pretrained(checkpoint),
        "prompt": " ".join(map(str, words(60))),
    }
    for expected in (0, 48):
        exec(compile(example, "README.md", "exec"), known)  # our own page
        assert known["answer"].reused == expected
        assert f" {expected} TierTokens(" in capsys.readouterr().out
