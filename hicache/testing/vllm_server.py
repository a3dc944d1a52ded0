"""A vLLM server over HTTP, in its default layout of processes, for a tiny model on the CPU.

It runs in an environment of its own (``make test-engines`` makes it), with this checkout on its path.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import yaml

from hicache.closing import Closing
from hicache.testing.redis_server import free_port, wait_until
from hicache.testing.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
BLOCK = 32
START_S = 420.0
"""The first start compiles nothing, but reads gigabytes from a disk that may be cold."""
_STOP_S = 60.0
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_LINEAR = [*["linear_attention"] * 3, "full_attention"]
_GATED_DELTA_NET = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A tiny model with head sizes that vLLM's CPU kernels know.

    Args:
        name: of ``hicache.testing.tiny_models``.
        settings: of its config, on top of the tiny ones.
        block: tokens of a block, as vLLM chooses it.
        dtype: the only one that its kernels take.
    """

    name: str
    settings: Mapping[str, Any]
    block: int = BLOCK
    dtype: torch.dtype = torch.float32

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the server; by itself it would serve float32 as bfloat16."""
        return "--dtype", str(self.dtype).removeprefix("torch.")

    def save(self, folder: Path) -> Path:
        """Write a checkpoint, the same each time; its path."""
        path = folder / self.name
        make_tiny_model(self.name, dtype=self.dtype, **self.settings).save_pretrained(path)
        return path


SERVED_MODELS: Mapping[str, ServedModel] = {
    "full": ServedModel("Llama", {"head_dim": 32, "num_hidden_layers": 2}),
    "full+swa": ServedModel(
        "Gemma3",
        {"head_dim": 32, "num_hidden_layers": 6, "sliding_window": 64, "layer_types": _SLIDING},
    ),
    # Attention's block grows until it is as large as a state.
    "full+mamba": ServedModel(
        "Qwen3Next",
        {"head_dim": 32, "hidden_size": 128, "layer_types": _LINEAR, **_GATED_DELTA_NET},
        block=544,
        dtype=torch.bfloat16,
    ),
}


def why_not() -> str | None:
    """Why no server can run here; None if one can."""
    if not PYTHON.exists():
        return f"needs {PYTHON.parent.parent.name}: make test-engines makes it"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    return None if " avx2 " in flags else "this machine has no AVX2, which vllm-cpu needs"


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request got: the new tokens, and how many of the prompt were not computed."""

    tokens: tuple[int, ...]
    cached: int


class VllmServer(Closing):
    """``vllm.entrypoints.openai.api_server``, started at once; ``wait`` returns when it answers.

    Args:
        model: folder of a checkpoint.
        folder: where its log goes.
        hicache: configuration of the connector; None serves without HiCache.
        printed: a guide's ``vllm serve MODEL …``, which starts it instead, with what a tiny model needs behind it;
            the configuration lies in ``hicache.yaml`` in its folder. It names the connector without its module,
            as users do who have installed the package.
        arguments: more of vLLM's.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        hicache: Mapping[str, object] | None = None,
        printed: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self.log = folder / f"vllm-{self.port}.log"
        own = folder / f"vllm-{self.port}"
        own.mkdir()
        options = [
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny"),
            *("--skip-tokenizer-init", "--enforce-eager", "--block-size", str(BLOCK)),
            *("--max-model-len", "4096", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--shutdown-timeout", "30"),
            *arguments,
        ]
        if printed:
            vllm, serve, _, *shown = printed
            script = PYTHON.with_name(vllm)  # by our Python: the environment may have been moved since
            command = [str(PYTHON), str(script), serve, str(model), *shown, *options]
            (own / "hicache.yaml").write_text(yaml.safe_dump(hicache), encoding="utf-8")
        else:
            module = "vllm.entrypoints.openai.api_server"
            command = [str(PYTHON), "-m", module, "--model", str(model), *options]
        if hicache is not None and not printed:
            transfer = {
                "kv_connector": "HiCacheConnector",
                "kv_connector_module_path": "hicache.engines.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": hicache,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        environment = {**os.environ, **_SETTINGS}
        environment["PYTHONPATH"] += os.pathsep + str(_write_metadata(folder))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=own, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> Self:
        """Return when it answers. Raises ``RuntimeError`` with the end of its log if it ended first."""
        deadline = time.monotonic() + START_S
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                end = self.log.read_text(encoding="utf-8", errors="replace")[-4000:]
                self.close()
                raise RuntimeError(f"vLLM did not start, see {self.log}:\n{end}")
            time.sleep(0.25)
        return self

    def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 32,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> Completion:
        """Answer a prompt of token ids. Raises ``RuntimeError`` with the server's words if it refuses."""
        asked = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            **body,
        }
        answer = json.loads(self._ask("/v1/completions", asked, headers))
        details = answer["usage"]["prompt_tokens_details"] or {}
        return Completion(tuple(answer["choices"][0]["token_ids"]), int(details.get("cached_tokens") or 0))

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that every hit is the connector's; waits for saves to end."""
        wait_until(lambda: self._reset("/reset_prefix_cache"), "vLLM's prefix cache is empty")

    def reset_everything(self) -> None:
        """Empty vLLM's prefix cache and the connector's, as after an update of weights."""
        wait_until(lambda: self._reset("/reset_prefix_cache?reset_external=true"), "all caches are empty")

    def metrics(self) -> dict[str, float]:
        """Sum of each of vLLM's metrics over its labels."""
        text = self._ask("/metrics", None)
        sums: dict[str, float] = {}
        for name, value in re.findall(r"^([a-zA-Z_:]+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.MULTILINE):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def close(self) -> None:
        """End it and the processes that it has started. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):  # the session that it was started in is ours alone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_healthy(self) -> bool:
        try:
            self._ask("/health", None)
        except OSError:
            return False
        return True

    def _reset(self, path: str) -> bool:
        """Refused while blocks are held, by saves among others."""
        return bool(json.loads(self._ask(path, {}))["success"])

    def _ask(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # http to loopback
            f"http://127.0.0.1:{self.port}{path}",
            data,
            {"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode()}") from error


def _write_metadata(folder: Path) -> Path:
    """What installed packages leave beside their modules: names, versions, entry points. The folder to look in.

    Ours, which runs from a checkout; and vLLM's, whose build for the CPU has another name than its command asks for.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    ours = _write_package(folder / "installed", "hicache", "0")
    (ours / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for built in PYTHON.parents[1].glob("lib/python*/site-packages/vllm_cpu-*.dist-info"):
        version = built.name.removesuffix(".dist-info").partition("-")[2]
        _write_package(folder / "installed", "vllm", f"{version}+cpu")  # by which vLLM knows where it runs
    return ours.parent


def _write_package(folder: Path, name: str, version: str) -> Path:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    return info
