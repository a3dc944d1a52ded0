"""What a process tells the others in its owner file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.tiers.disk_folder import DiskFolder, OwnerState


@pytest.fixture
def folders(root: Path) -> tuple[DiskFolder, DiskFolder]:
    made = DiskFolder(str(root)), DiskFolder(str(root))
    for folder in made:
        folder.make()
        folder.enter()
    return made


def test_what_one_tells_last_the_others_read(folders: tuple[DiskFolder, DiskFolder]) -> None:
    teller, reader = folders
    for state in (OwnerState(1, 2, 3, {4: 5, 6: 7}), OwnerState(8, 9, 10, {11: 12}), OwnerState()):
        teller.tell(state)
        assert reader.other_owners() == {teller.owner: state}
    teller.leave()
    assert reader.other_owners() == {}
    reader.leave()


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 23, 24, 30])
def test_a_shorter_file_tells_less(
    folders: tuple[DiskFolder, DiskFolder], root: Path, num_bytes: int
) -> None:
    """Of an older version, which told how much it was writing and no more, or cut by a full disk."""
    teller, reader = folders
    teller.tell(OwnerState(1, 2, 3, {4: 5}))
    with (root / f"owner-{teller.owner:015x}").open("r+b") as file:
        file.truncate(num_bytes)
    expected = OwnerState(int(num_bytes > 0), 2 * (num_bytes > 8), 3 * (num_bytes > 16), {})
    assert reader.other_owners() == {teller.owner: expected}
    for folder in folders:
        folder.leave()
