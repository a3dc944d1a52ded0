"""What a restored prefix saves a transformers model, and what keeping it costs.

    python benchmarks/engine_transformers.py [--prompt 2048] [--repeat 5]

A Llama of 8 layers with random weights, float32, on the CPU. Time to the first token: cold without a cache, cold with one (the
prompt is kept), and restored from each tier; then time per answered token with and without a cache. Medians, and the range.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from hicache.engines.transformers import TransformersEngine
from hicache.engines.transformers_library import forward
from hicache.testing.model_oracle import squeeze
from hicache.types import Tier


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--prompt", type=int, default=2048)
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--new", type=int, default=64)
    given = options.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=16384,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    kv_mib = given.prompt * 8 * 2 * 4 * 64 * 4 / 2**20
    weights = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{weights:.1f} M parameters, prompt of {given.prompt} tokens = {kv_mib:.0f} MiB of KV, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "model": {"page_size": 16},
            "tiers": {
                "device": {"kind": "cpu", "capacity": "1GiB"},
                "host": {"capacity": "1GiB", "pinned": False},
                "stores": [{"kind": "disk", "path": str(Path(folder) / "store"), "capacity": "4GiB"}],
            },
            "policy": {"write": "write_through", "prefetch": {"min_tokens": 0}},
        }
        with TransformersEngine(model, settings) as engine:
            measure(engine, given.prompt, given.new, given.repeat)


def measure(engine: TransformersEngine, length: int, new_tokens: int, repeat: int) -> None:
    source = torch.Generator().manual_seed(1)
    cache = engine.cache

    def prompt() -> list[int]:
        return torch.randint(1, 4096, (length,), generator=source).tolist()

    def first_token(tokens: list[int]) -> float:
        return timed(lambda: engine.generate(tokens, max_new_tokens=1, stop_tokens=()))

    warm = prompt()
    first_token(warm)
    rows: dict[str, list[float]] = {}
    for _ in range(repeat):
        rows.setdefault("cold, no cache", []).append(timed(lambda: plain(engine, prompt(), 1)))
        rows.setdefault("cold, kept", []).append(first_token(prompt()))
        first_token(warm)
        rows.setdefault("from L1", []).append(first_token(warm))
        squeeze(cache, Tier.DEVICE)
        rows.setdefault("from L2", []).append(first_token(warm))
        assert cache.flush()
        cache.reset()
        rows.setdefault("from L3 (disk)", []).append(first_token(warm))
    for name, seconds in rows.items():
        show(name, [1e3 * s for s in seconds], "ms to the first token")
    for name, run in (
        ("no cache", lambda: plain(engine, warm[:64], new_tokens)),
        ("kept", lambda: engine.generate(warm[:64], max_new_tokens=new_tokens, stop_tokens=())),
    ):
        show(f"decode, {name}", [1e3 * timed(run) / new_tokens for _ in range(repeat)], "ms a token")


def plain(engine: TransformersEngine, tokens: list[int], new_tokens: int) -> None:
    """The same loop on a plain ``DynamicCache``, in the same chunks."""
    cache = transformers.DynamicCache(config=engine.model.config)
    with torch.inference_mode():
        for begin in range(0, len(tokens), engine.chunk_tokens):
            chunk = torch.tensor([tokens[begin : begin + engine.chunk_tokens]])
            token = int(forward(engine.model, chunk, cache).argmax())
        for _ in range(new_tokens - 1):
            token = int(forward(engine.model, torch.tensor([[token]]), cache).argmax())


def timed(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def show(name: str, values: list[float], unit: str) -> None:
    print(f"{name:<18} {statistics.median(values):9.2f} {unit}  ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
