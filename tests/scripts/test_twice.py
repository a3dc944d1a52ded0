"""``.ci/twice``: what asks an index is tried again once, and says so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import hicache

TWICE = Path(hicache.__file__).resolve().parents[1] / ".ci" / "twice"


@pytest.mark.parametrize(("failures", "code", "tries"), [(0, 0, 1), (1, 0, 2), (2, 7, 2)])
def test_a_command_has_a_second_chance_and_no_third(
    tmp_path: Path, failures: int, code: int, tries: int
) -> None:
    command = tmp_path / "a command"
    command.write_text(f'echo "$1" >> tried\n[ "$(wc -l < tried)" -gt {failures} ] || exit 7\n')
    done = subprocess.run(
        [str(TWICE), "sh", str(command), "one word"],
        cwd=tmp_path,
        env={**os.environ, "HICACHE_RETRY_AFTER_S": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert (tmp_path / "tried").read_text().splitlines() == ["one word"] * tries
    assert ("once more in 0 s" in done.stderr, "failed twice" in done.stderr) == (failures > 0, code != 0)
