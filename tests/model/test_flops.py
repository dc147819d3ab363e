"""FLOPs compared with figures of KempnerForge and Megatron, and with the compiled model."""

import jax
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.model import flops
from jaxforge.model.transformer import Model
from jaxforge.parallel import hardware

SEVEN_B = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_hidden_dim": 14336,
    "vocab_size": 128256,
}  # fmt: skip
THIRTEEN_B = SEVEN_B | {"ffn_hidden_dim": 17920, "dim": 5120, "n_layers": 40, "n_heads": 40}
DEBUG = {"dim": 256, "n_layers": 4, "n_heads": 4, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("model", "seq_len", "expected"),
    [(SEVEN_B, 4096, "5.1470e+10"), (THIRTEEN_B, 4096, "9.5166e+10"), (DEBUG, 512, "7.5891e+07")],
)
def test_flops_match_kempnerforge(model, seq_len, expected):
    assert f"{flops.flops_per_token(ModelConfig(**model), seq_len):.4e}" == expected


def test_flops_of_llama_3_8b_in_both_conventions():
    model = ModelConfig(**SEVEN_B)  # torchtitan has 57.9, Megatron-Bridge 51.5
    assert round(flops.flops_per_token(model, 8192) / 1e9, 1) == 57.9
    assert round(flops.causal_flops_per_token(model, 8192) / 1e9, 1) == 51.5


def test_windows_count_visible_tokens():
    full = ModelConfig(**DEBUG)
    local = ModelConfig(**DEBUG, sliding_window=100, attention_pattern=["full", "sliding"])
    a_key = 12 * full.n_heads * full.head_size  # two products per query, three times
    saved = flops.flops_per_token(full, 512) - flops.flops_per_token(local, 512)
    assert saved == 2 * a_key * (512 - 100)
    pairs = [sum(min(q + 0.5, window) for q in range(512)) / 512 for window in (512, 100)]
    saved = flops.causal_flops_per_token(full, 512) - flops.causal_flops_per_token(local, 512)
    assert saved == pytest.approx(2 * a_key * (pairs[0] - pairs[1]), rel=1e-4)


def test_chunks_count_visible_tokens():
    full = ModelConfig(**DEBUG)
    local = ModelConfig(**DEBUG, attention_chunk_size=100, attention_pattern=["full", "chunked"])
    a_key = 12 * full.n_heads * full.head_size
    saved = flops.flops_per_token(full, 512) - flops.flops_per_token(local, 512)
    assert saved == 2 * a_key * (512 - 100)
    pairs = [sum(q % chunk + 0.5 for q in range(512)) / 512 for chunk in (512, 100)]
    saved = flops.causal_flops_per_token(full, 512) - flops.causal_flops_per_token(local, 512)
    assert saved == pytest.approx(2 * a_key * (pairs[0] - pairs[1]), rel=1e-4)


@pytest.mark.parametrize(
    "mlp", [{}, {"activation": "relu"}, {"activation": "relu", "gated_mlp": True}], ids=str
)
@pytest.mark.parametrize("heads", [{}, {"head_dim": 24, "attention_output_gate": True}], ids=str)
def test_flops_match_products_of_model(mlp, heads):
    config = ModelConfig(
        dim=64, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=96, ffn_hidden_dim=80,
        max_seq_len=32, sdpa_backend="math", **heads, **mlp,
    )  # fmt: skip
    model, seq_len = Model(config), 32

    def logits(params, tokens):
        return model.hidden(params, tokens) @ model.head(params).T

    tokens = jax.ShapeDtypeStruct((1, seq_len), np.int32)
    forward = matmul_flops(jax.make_jaxpr(logits)(model.abstract, tokens).jaxpr) / seq_len
    width = config.n_heads * config.head_size
    looking_ahead = 6 * config.n_layers * width * seq_len  # this kernel computes masked pairs too
    assert 3 * forward == flops.causal_flops_per_token(config, seq_len) + looking_ahead
    if config.is_gated:
        assert 3 * forward == flops.flops_per_token(config, seq_len)


def matmul_flops(jaxpr) -> int:
    """Return 2 m n k of every product in a program, times the number of its executions."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * int(np.prod([shape[i] for i in contracted]))
        inner = sum(matmul_flops(sub) for sub in map(as_jaxpr, eqn.params.values()) if sub)
        total += inner * eqn.params.get("length", 1)
    return total


def as_jaxpr(param):
    return getattr(param, "jaxpr", param if hasattr(param, "eqns") else None)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989), ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500), ("NVIDIA GB300", 2500),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GeForce RTX 4090", 330), ("TPU v4", 275),
        ("TPU v5 lite", 197), ("TPU v5", 459), ("TPU v5p", 459), ("TPU v6 lite", 918),
        ("TPU7x", 1153.5), ("cpu", None), ("NVIDIA GeForce GTX 1080", None),
    ],
)  # fmt: skip
def test_longest_matching_device_name_gives_peak(kind, peak):
    chip = hardware.chip_by_kind(kind)
    assert (chip and chip.peak_flops / 1e12) == peak
