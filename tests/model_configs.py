"""Small config.json files with the known public shapes of models, written for the tests; no file is anybody's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "torch_dtype": "bfloat16",
    },
    "mistral-7b": {
        "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": None, "num_hidden_layers": 32, "sliding_window": 4096, "torch_dtype": "bfloat16",
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "num_hidden_layers": 42, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "torch_dtype": "bfloat16",
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
        "num_hidden_layers": 28, "sliding_window": 131072, "max_window_layers": 28, "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    },
    "gpt2": {"model_type": "gpt2", "n_head": 12, "n_embd": 768, "n_layer": 12},
    "gemma-3-4b": {
        "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024,
        },
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
}  # fmt: skip


def written(directory: Path, name: str, **changed: Any) -> str:
    """The path of a config.json of this model, with some fields changed (None: null)."""
    path = directory / f"{name}.json"
    path.write_text(json.dumps({**CONFIGS[name], **changed}))
    return str(path)
