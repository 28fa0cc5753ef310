"""The small policy that ships with the package: where it is, and a fresh one of its architecture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

POLICY_DIR = Path(__file__).parent / "policy"
"""A folder that ``from_pretrained`` reads: Qwen2 architecture, 1.2 M parameters, fp32, with its tokenizer."""


def new_policy(
    tokenizer: PreTrainedTokenizerFast, *, hidden: int = 128, layers: int = 4, heads: int = 4, intermediate: int = 384
) -> Qwen2ForCausalLM:
    """An untrained policy, its first two layers set up for copying (see :func:`_prepare_copying`)."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        initializer_range=0.04,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    policy = Qwen2ForCausalLM(config)
    _prepare_copying(policy)
    return policy


def _prepare_copying(policy: Qwen2ForCausalLM) -> None:
    """Start with an induction circuit instead of waiting for one to form [ours].

    Head 0 of layer 0 attends to the previous token (rotary phases written into its biases) and writes that token's
    value into a subspace; two heads of layer 1 look for positions whose previous token is the current one and copy
    what stands there. Names never seen before can then be copied early in training.
    """
    import torch

    config = policy.config
    size = config.hidden_size // config.num_attention_heads
    half = size // 2
    basis = torch.linalg.qr(torch.randn(config.hidden_size, config.hidden_size))[0]
    value, written = basis[:size], basis[size : 2 * size]
    first, second = (policy.model.layers[i].self_attn for i in range(2))
    with torch.no_grad():
        for projection in (first.q_proj, first.k_proj):
            projection.weight[:size] *= 0.1
            projection.bias[:size] = 0
        sharpness, copy_gain, match_gain, write_gain = 6.4, 0.5, 1.7, 0.15
        for i in range(5):  # the fastest rotary pairs peak at distance 1
            angle = config.rope_parameters["rope_theta"] ** (-i / half)
            first.k_proj.bias[i] = sharpness
            first.q_proj.bias[i] = sharpness * math.cos(angle)
            first.q_proj.bias[i + half] = -sharpness * math.sin(angle)
        first.v_proj.weight[:size] = value
        first.o_proj.weight[:, :size] = write_gain * written.T
        for head in range(2):
            rows = slice(head * size, (head + 1) * size)
            copied = basis[(2 + head) * size : (3 + head) * size]
            second.q_proj.weight[rows] = match_gain * value
            second.k_proj.weight[rows] = match_gain * written
            second.v_proj.weight[rows] = copied
            second.o_proj.weight[:, rows] = copy_gain * copied.T
