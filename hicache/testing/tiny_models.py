"""Models of transformers with random weights, small enough to make anew in each test run; nothing is downloaded.

Their weights are drawn with a standard deviation of 0.08, which makes logits of a scale of about 3: a wrong state or
window then moves them by more than one, a right one by about 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

VOCABULARY = 512
WINDOW = 32
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_DELTA_NET = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
_KDA = {"linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
_MLA = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_SLIDING = ["sliding_attention", "full_attention"] * 2
_LINEAR = ["linear_attention", "full_attention"] * 2


@dataclass(frozen=True, slots=True)
class TinyModel:
    """How one is made.

    Args:
        components: what the adapter must find in it.
        settings: on top of the common sizes; None leaves one of them out.
        config: name of the config class, where it is not the model's.
    """

    components: frozenset[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None


_FULL, _SWA, _MAMBA = "full", "swa", "mamba"
TINY_MODELS: Mapping[str, TinyModel] = {
    "Llama": TinyModel(frozenset({_FULL})),
    "Qwen3": TinyModel(frozenset({_FULL})),
    "Mistral": TinyModel(frozenset({_SWA}), {"sliding_window": WINDOW}),
    "Gemma3": TinyModel(
        frozenset({_FULL, _SWA}), {"sliding_window": WINDOW, "layer_types": _SLIDING}, "Gemma3TextConfig"
    ),
    "Llama4": TinyModel(
        frozenset({_FULL, _SWA}),
        {
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
        "Llama4TextConfig",
    ),
    "GptOss": TinyModel(
        frozenset({_FULL, _SWA}),
        {
            "sliding_window": WINDOW,
            "layer_types": _SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "Qwen3Next": TinyModel(frozenset({_FULL, _MAMBA}), {**_EXPERTS, **_DELTA_NET, "layer_types": _LINEAR}),
    "KimiLinear": TinyModel(
        frozenset({_FULL, _MAMBA}),
        {
            **_KDA,
            **_MLA,
            "head_dim": None,
            "max_position_embeddings": None,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "layer_types": _LINEAR,
        },
    ),
    "LaraMini": TinyModel(
        frozenset({_FULL, _SWA, _MAMBA}),
        {
            **_EXPERTS,
            **_DELTA_NET,
            "intermediate_size": None,
            "sliding_window": WINDOW,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        },
    ),
    "Inkling": TinyModel(
        frozenset({_FULL, _SWA, _MAMBA}),
        {
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 16,
            "sliding_window_size": WINDOW,
            "d_rel": 4,
            "rel_extent": 64,
            "layer_types": ["hybrid", "hybrid_sliding"] * 2,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "logits_mup_width_multiplier": 1.0,
        },
        "InklingTextConfig",
    ),
    "Zaya": TinyModel(
        frozenset({_FULL, _SWA, _MAMBA}),
        {
            "intermediate_size": None,
            "sliding_window": WINDOW,
            "layer_types": ["hybrid", "hybrid_sliding"] * 2,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "router_hidden_size": 16,
        },
    ),
}


def make_tiny_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A model in eval mode on the CPU; the same name, seed and settings give the same weights.

    Args:
        name: of ``TINY_MODELS``, or any other ``<name>ForCausalLM`` of transformers.
        settings: of its config, on top of the tiny ones.
    """
    library = import_module(
        "transformers"
    )  # of any release: vLLM's environment holds an older one than the adapter takes
    library.logging.set_verbosity_error()  # a released config's special tokens do not fit 512 words
    known = TINY_MODELS.get(name, TinyModel(frozenset()))
    values = {**_SIZES, **known.settings, **settings}
    required = {"pad_token_id", "bos_token_id", "eos_token_id"}
    given = {key: value for key, value in values.items() if value is not None or key in required}
    config = getattr(library, known.config or f"{name}Config")(**given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # what is no matrix stays as the library draws it
        model = getattr(library, f"{name}ForCausalLM")(config).eval()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.copy_(torch.empty_like(weight).normal_(0, 0.08, generator=source))
    return model.to(dtype)
