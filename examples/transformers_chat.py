"""A chat of three turns with a model of transformers (random weights, made here) through device, host and disk.

python examples/transformers_chat.py
"""

import tempfile

import torch

try:
    from transformers import Qwen3Config, Qwen3ForCausalLM
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; this example needs it: pip install 'hicache[engines]'") from None

from hicache.engines.transformers import TransformersEngine

torch.manual_seed(0)
model = Qwen3ForCausalLM(
    Qwen3Config(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
).eval()

with tempfile.TemporaryDirectory() as folder:
    settings = {
        "model": {"page_size": 16},
        "tiers": {
            "device": {"kind": "cpu", "capacity": "64MiB"},
            "host": {"capacity": "128MiB", "pinned": False},
            "stores": [{"kind": "disk", "path": folder, "capacity": "256MiB"}],
        },
        "policy": {"write": "write_through", "prefetch": {"min_tokens": 0}},
    }
    chat = list(range(1, 201))
    for restart in range(3):
        with TransformersEngine(model, settings) as engine:  # a new process would find the same
            answer = engine.generate(chat, max_new_tokens=20, session="chat-17")
            print(f"turn {restart + 1}: {answer.reused} of {len(chat)} tokens reused, {answer.source}")
            chat += [*answer.tokens, *range(300, 330)]
            engine.cache.flush()
