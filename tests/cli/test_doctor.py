"""``hicache doctor``: each thing that stands in a device's way is shown with the remedy; a stand-in is the machine."""

from __future__ import annotations

import resource
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from hicache.cache import HiCache
from hicache.cli._machine import machine_findings
from hicache.cli._start import config_findings, disk_warnings, usable_memory
from hicache.cli.config import app as config_app
from hicache.cli.doctor import app
from hicache.config import load_config
from hicache.errors import ConfigError

GIB = 1 << 30


class Machine:
    """``torch`` on a machine with so many devices."""

    def __init__(self, devices: int = 2, *, built_for: str | None = "13.2", complaint: str = "") -> None:
        self.version = SimpleNamespace(cuda=built_for)
        self._devices = devices
        self._complaint = complaint
        self.cuda: Any = self
        self.capability: tuple[int, int] = (9, 0)

    def is_available(self) -> bool:
        if self._complaint:
            warnings.warn(self._complaint, stacklevel=2)
        return self._devices > 0

    def device_count(self) -> int:
        return self._devices

    def get_device_name(self, index: int = 0) -> str:
        return f"Card {index}"

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self.capability

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 70 * GIB, 80 * GIB


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    driver, huge_pages = tmp_path / "version", tmp_path / "enabled"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65  Sun Jul 27\nGCC version: 13\n")
    huge_pages.write_text("always [madvise] never\n")
    return {"driver": driver, "huge_pages": huge_pages}


def found(machine: Machine, files: dict[str, Any], **settings: Any) -> dict[str, str]:
    defaults: dict[str, Any] = {"packages": ["cupy-cuda13x"], "lockable": resource.RLIM_INFINITY}
    return dict(machine_findings(machine, **files, **(defaults | settings)))


def test_a_machine_in_order_needs_no_remedy(files: dict[str, Any]) -> None:
    assert found(Machine(1), files) == {
        "cuda": "13.2, 1 x Card 0",
        "driver": "NVIDIA UNIX x86_64 Kernel Module  580.65  Sun Jul 27",
        "device": "0: Card 0, 70GiB of 80GiB free",
        "cupy": "cupy-cuda13x",
        "lockable": "unlimited",
        "huge pages": "madvise",
    }


def test_every_device_is_listed_and_an_old_one_told(files: dict[str, Any]) -> None:
    machine = Machine(3)
    assert [name for name, _ in machine_findings(machine, **files, packages=[], lockable=-1)].count(
        "device"
    ) == 3
    machine.capability = (7, 5)
    assert "older than 8.0" in found(machine, files)["device"]


def test_no_driver_is_told(files: dict[str, Any]) -> None:
    files["driver"].unlink()
    lines = found(Machine(0), files)
    assert "--gpus all" in lines["driver"]
    assert "tiers.device.kind: cpu" in lines["cuda"]
    assert "device" not in lines


def test_a_driver_that_is_too_old_is_told_in_torch_s_words(files: dict[str, Any]) -> None:
    line = found(Machine(0, complaint="The NVIDIA driver on your system is too old (found 11040)."), files)[
        "cuda"
    ]
    assert "too old (found 11040)" in line
    assert "a driver for CUDA 13.2 or newer" in line


def test_a_torch_for_the_cpu_is_told(files: dict[str, Any]) -> None:
    assert "install a torch built for CUDA" in found(Machine(0, built_for=None), files)["cuda"]


@pytest.mark.parametrize(
    ("packages", "remedy"),
    [
        ([], "pip install 'hicache[cuda]'"),
        (["cupy-cuda12x"], "pip uninstall cupy-cuda12x, pip install cupy-cuda13x"),
        (["cupy-cuda12x", "cupy-cuda13x"], "only one may be installed"),
    ],
    ids=["none", "another CUDA", "two"],
)
def test_cupy_that_does_not_fit_is_told(files: dict[str, Any], packages: list[str], remedy: str) -> None:
    assert remedy in found(Machine(), files, packages=packages)["cupy"]


def test_a_limit_on_locked_memory_is_told_with_the_ways_to_raise_it(files: dict[str, Any]) -> None:
    line = found(Machine(), files, lockable=8 << 20)["lockable"]
    for said in ("8MiB", "ulimit -l unlimited", "LimitMEMLOCK=infinity", "--ulimit memlock=-1"):
        assert said in line


def test_huge_pages_that_are_off_are_told(files: dict[str, Any]) -> None:
    files["huge_pages"].write_text("always madvise [never]\n")
    assert "echo madvise" in found(Machine(), files)["huge pages"]


# ---- a configuration -------------------------------------------------------------------------------------------------
def config(host: str = "60GiB", **device: Any) -> Any:
    component = {"rule": "path", "layers": 2, "bytes_per_token": "1KiB"}
    tree = {
        "model": {"name": "m", "page_size": 16, "components": {"full": component}},
        "tiers": {"device": {"kind": "cuda", "capacity": "40GiB"} | device, "host": {"capacity": host}},
    }
    return load_config(tree, environ={})


@pytest.mark.parametrize(
    ("device", "devices", "lockable", "says"),
    [
        ({}, 2, -1, "fits this machine"),
        ({"kind": "cpu"}, 0, 8 << 20, "fits this machine"),
        ({}, 0, -1, "no CUDA device can be used here; set it to cpu"),
        ({"index": 2}, 2, -1, "tiers.device.index: 2 is not there; this machine has 2 devices, from 0"),
        (
            {"capacity": "75GiB", "host": "90GiB"},
            2,
            -1,
            "75GiB a rank, but 70GiB of 80GiB are free on device 0; lower it",
        ),
        ({}, 2, 1 << 20, "60GiB are to be pinned, 1MiB may be locked"),
    ],
    ids=["fits", "cpu", "no device", "index", "card too small", "lock limit"],
)
def test_what_does_not_fit_the_machine_is_told(
    device: dict[str, Any], devices: int, lockable: int, says: str
) -> None:
    lines = list(
        config_findings(Machine(devices), config(**device), lockable=lockable, memory_bytes=200 * GIB)
    )
    assert len(lines) == 1
    assert says in lines[0][1]


def test_the_command_shows_them_on_any_machine() -> None:
    result = CliRunner().invoke(app, ["--config", "cpu"])
    assert result.exit_code == 0, result.output
    for name in ("core", "torch", "cuda", "driver", "cupy", "lockable", "huge pages", "config"):
        assert f"\n{name} " in result.output


# ---- whether it would start ------------------------------------------------------------------------------------------
HYBRID = """
model:
  name: m
  page_size: 16
  components:
    full: {rule: path, layers: 2, bytes_per_token: 64}
    mamba: {rule: checkpoint, layers: 2, state_bytes: 4KiB}
tiers:
  device: {kind: cpu, capacity: 1MiB}
"""


def doctor(tmp_path: Path, text: str) -> tuple[int, list[str]]:
    """Exit code, and what is said of the configuration."""
    (tmp_path / "hicache.yaml").write_text(HYBRID + text)
    result = CliRunner().invoke(app, ["--config", str(tmp_path / "hicache.yaml")])
    said = [line for line in result.output.splitlines() if line.startswith(("config ", "fails "))]
    return result.exit_code, said


def check(tmp_path: Path) -> Any:
    return CliRunner().invoke(config_app, ["check", str(tmp_path / "hicache.yaml")])


def test_what_fits_ends_well(tmp_path: Path) -> None:
    assert doctor(tmp_path, "") == (0, ["config     fits this machine"])
    assert "warning" not in check(tmp_path).output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("  host: {capacity: 8PiB}\n", "tiers.host.capacity: a rank is to keep 8PiB in memory"),
        (
            "  host: {capacity: 2MiB}\n  stores: [{kind: disk, path: /proc/x, capacity: 50MiB}]\n",
            "tiers.stores.0.path: /proc/x cannot be made or written to",
        ),
        (
            (
                "  host: {capacity: 2MiB}\n"
                "  stores: [{kind: memory, capacity: 50MiB, codec: {encryption: aes-gcm, key_env: HICACHE_NO_KEY}}]\n"
            ),
            "tiers.stores.0.codec.key_env: the variable HICACHE_NO_KEY is not set; set it",
        ),
    ],
    ids=["memory", "folder", "key"],
)
def test_what_would_not_start_here_fails_and_is_a_warning_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    # To root, and to the owner, a folder of /proc looks as if it took files.
    monkeypatch.setattr("os.access", lambda *_: True)
    monkeypatch.setattr("os.geteuid", lambda: Path("/proc").stat().st_uid)
    code, said = doctor(tmp_path, text)
    assert code == 1
    assert [line for line in said if line.startswith("fails ") and says in line] != []
    result = check(tmp_path)
    assert result.exit_code == 0
    assert ": valid; would not start here" in result.output.splitlines()[0]
    assert f"warning: {says}" in result.output


@pytest.mark.parametrize("place", ["open", "file", "missing", "private"])
def test_a_place_for_the_admin_socket_is_told_as_at_start(
    tmp_path: Path, short_folder: Path, place: str
) -> None:
    folder = short_folder / f"doctor-{place}"
    path = folder / "a.sock"
    if place != "missing":
        folder.mkdir(mode=0o700)
    if place == "open":
        folder.chmod(0o755)
    if place == "file":
        path.write_text("")
    config = {"admin.socket": str(path)}
    code, said = doctor(tmp_path, f"admin: {{socket: '{path}'}}\n")
    told = check(tmp_path).output
    if place in ("missing", "private"):
        assert (code, said) == (0, ["config     fits this machine"])
        assert "admin.socket" not in told
        assert folder.exists() is (place == "private")
        return
    with pytest.raises(ConfigError) as caught, HiCache(load_config("cpu", environ={}, overrides=config)):
        pass
    (refusal,) = caught.value.problems
    assert code == 1
    assert said == [f"fails      {refusal}"]
    assert f"warning: {refusal}" in told


def test_the_doctor_takes_settings_of_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    well = CliRunner().invoke(app, ["--config", "cpu"])
    assert (well.exit_code, "fails " in well.output) == (0, False)
    ill = CliRunner().invoke(app, ["--config", "cpu", "--set", "tiers.device.kind=cuda"])
    assert ill.exit_code == 1
    assert "fails      tiers.device.kind: is cuda" in ill.output
    alone = CliRunner().invoke(app, ["--set", "tiers.device.kind=cuda"])
    assert isinstance(alone.exception, ConfigError)
    assert "add --config" in str(alone.exception)


@pytest.mark.parametrize("has_cuda", [False, True])
def test_a_gpu_that_is_not_here_is_a_warning_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    """Configurations are checked on other machines than they run on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    (tmp_path / "hicache.yaml").write_text(HYBRID.replace("kind: cpu", "kind: cuda"))
    result = check(tmp_path)
    assert result.exit_code == 0
    warning = "warning: tiers.device.kind: is cuda, but no CUDA device can be used here"
    assert (warning in result.output) is not has_cuda
    assert result.output.splitlines()[0].endswith(": OK") is has_cuda


@pytest.mark.parametrize(
    ("section", "modules", "remedy"),
    [
        ("tracing: {enabled: true}\n", ["opentelemetry"], "tracing.enabled: needs opentelemetry"),
        ("metrics: {port: 0}\n", ["prometheus_client"], "pip install 'hicache[metrics]'"),
        ("events: {endpoint: 'tcp://127.0.0.1:5557'}\n", ["zmq", "msgspec"], "needs msgspec and zmq"),
    ],
    ids=["tracing", "metrics", "events"],
)
def test_what_is_configured_without_its_package_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, modules: list[str], remedy: str
) -> None:
    assert doctor(tmp_path, section)[0] == 0
    monkeypatch.setattr(
        "hicache.cli._start.find_spec", lambda name: None if name in modules else find_spec(name)
    )
    code, said = doctor(tmp_path, section)
    assert code == 1
    assert any(remedy in line for line in said)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("policy: {eviction: nowhere.Mine}\n", "policy.eviction: cannot load 'nowhere.Mine'"),
        ("policy: {eviction: pathlib.Path}\n", "policy.eviction: 'pathlib.Path' is not a subclass"),
    ],
    ids=["missing", "another class"],
)
def test_a_policy_that_cannot_be_loaded_is_refused(tmp_path: Path, text: str, says: str) -> None:
    code, said = doctor(tmp_path, text)
    assert code == 1
    assert any(line.startswith("fails ") and says in line for line in said)
    result = check(tmp_path)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)


def test_a_store_that_its_file_system_cannot_hold_starts_and_is_told(tmp_path: Path) -> None:
    store = tmp_path / "store"
    text = f"  host: {{capacity: 2MiB}}\n  stores: [{{kind: disk, path: {store}, capacity: 8PiB}}]\n"
    code, said = doctor(tmp_path, text)
    assert code == 0
    assert any("tiers.stores.0.capacity: 8PiB, but the file system" in line for line in said)
    assert "warning: tiers.stores.0.capacity: 8PiB" in check(tmp_path).output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hicache.yaml"]


def test_what_a_folder_holds_already_is_of_its_capacity(tmp_path: Path) -> None:
    """Else a store that has filled its disk, as it was told to, would be warned of."""
    free = shutil.disk_usage(tmp_path).free
    (tmp_path / "pages").write_bytes(bytes(1 << 20))
    store = {"kind": "disk", "path": str(tmp_path), "capacity": 1 << 19}
    loaded = load_config(
        yaml.safe_load(HYBRID)
        | {
            "tiers": {
                "device": {"kind": "cpu", "capacity": "1MiB"},
                "host": {"capacity": "2MiB"},
                "stores": [store],
            }
        },
        environ={},
    )
    full = SimpleNamespace(free=0, total=free)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hicache.cli._start.shutil.disk_usage", lambda _: full)
        assert list(disk_warnings(loaded)) == []
        (tmp_path / "pages").unlink()
        assert len(list(disk_warnings(loaded))) == 1


def test_a_control_group_limits_memory(tmp_path: Path) -> None:
    limit, none = tmp_path / "limit", tmp_path / "none"
    limit.write_text("1048576\n")
    none.write_text("max\n")
    assert usable_memory((limit,)) == 1 << 20
    assert usable_memory((none, tmp_path / "missing")) > 1 << 20
