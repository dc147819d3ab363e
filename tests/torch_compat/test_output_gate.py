"""Output-gated attention matches transformers' module, with queries and gates in one matrix."""

import jax
import numpy as np
import pytest

from jaxforge.config.model import LAYERS, ModelConfig
from jaxforge.model.layer import LayerSettings
from jaxforge.model.transformer import Model
from tests.helpers import initial_params
from tests.model.attention_reference import allowed_keys
from torch_compat.families.family import HF_NAME, NAME, fused, name_map, queries_with_gates
from torch_compat.formats.lazy import from_array
from torch_compat.names.table import Rule

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHAPE = {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "vocab_size": 64,
         "ffn_hidden_dim": 32, "norm_unit_offset": True, "qk_norm": True}  # fmt: skip
LENGTH = 12
NAMES = name_map(
    "test", "test",
    *fused(
        tuple(f"{NAME}attention.{m}_proj.weight" for m in ("q", "gate")),
        f"{HF_NAME}self_attn.q_proj.weight", queries_with_gates,
    ),
    *(Rule(f"{NAME}attention.{m}.weight", f"{HF_NAME}self_attn.{m}.weight")
      for m in ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
)  # fmt: skip


def their_attention():
    """Return a Qwen3-Next attention module with random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen3_next", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        partial_rotary_factor=1.0, rms_norm_eps=1e-5, num_hidden_layers=1,
        layer_types=["full_attention"], attn_implementation="eager",
    )  # fmt: skip
    module = transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextAttention(config, 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5)
    return config, module


def test_gated_attention_and_fused_queries_match_transformers():
    config, theirs = their_attention()
    native = ModelConfig(**SHAPE, attention_output_gate=True)
    stored = {f"model.layers.0.self_attn.{key}": from_array(value.numpy())
              for key, value in theirs.state_dict().items()}  # fmt: skip
    names = [rule.name.format(i=0) for rule in NAMES.rules]
    tensors = NAMES.to_jaxforge(stored, names, native)
    model = Model(native)
    params = jax.device_get(initial_params(model))
    for name, tensor in tensors.items():
        *_, module, leaf = name.split(".")
        params["layers"]["attention"][module][leaf] = tensor.all()[None]
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 32)).astype(np.float32)
    rotary = transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextRotaryEmbedding(config)
    at = torch.arange(LENGTH)[None]
    mask = torch.where(torch.tensor(allowed_keys(LENGTH)), 0.0, -torch.inf)
    with torch.no_grad():
        expected, _ = theirs(torch.from_numpy(x), rotary(torch.from_numpy(x), at), mask[:, None])

    @jax.jit
    def attend(params, x):
        block = model.module(LAYERS, jax.tree.map(lambda leaf: leaf[0], params["layers"]))
        settings = LayerSettings(model.plan.layers[0], model.plan, model.runtime)
        return block.attention(x, model.context(x), settings=settings).y

    result = attend(params, x)
    np.testing.assert_allclose(result, expected.numpy(), rtol=0, atol=1e-5)
    back = NAMES.to_dialect(tensors, native)
    assert back.keys() == stored.keys()
    for key, tensor in back.items():
        np.testing.assert_array_equal(tensor.all(), stored[key].all(), key)
