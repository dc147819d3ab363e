"""Exports of muP models: transformers computes the same logits from folded weights."""

import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from tests.conftest import tiny_config
from torch_compat.checkpoint import checkpoints, hf_config, mup
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.state import abstract_target
from torch_compat.convert import conversion
from torch_compat.convert.source import Request
from torch_compat.lockstep.comparison import first_difference

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.torch_compat.huggingface import (  # noqa: E402 (needs torch)
    export,
    load,
    open_theirs,
    our_logits,
    random_params,
    save_run,
    their_logits,
    tokens_of,
)
from torch_compat.lockstep import command  # noqa: E402

SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 256,
         "ffn_hidden_dim": 48, "max_seq_len": 64, "mup_base_width": 16}  # fmt: skip
MODELS = {
    "hf-llama": {"mup_base_head_dim": 4, "qkv_bias": False},
    "hf-qwen2": {"mup_base_head_dim": 4, "qkv_bias": True},
    "hf-granite": {"tie_embeddings": True},
    "hf-qwen2-moe": {"mup_base_head_dim": 4, "qkv_bias": True, "num_experts": 4,
                     "moe_expert_dim": 16, "moe_shared_experts": 1,
                     "moe_shared_expert_gate": True},
}  # fmt: skip


def config(**model):
    return tiny_config(model={**SHAPE, **model})


@pytest.mark.parametrize("family", MODELS)
def test_mup_export_matches_transformers(family, tmp_path):
    of = config(**MODELS[family])
    params = random_params(of.model)
    run = save_run(tmp_path / "run", of, params)
    theirs = open_theirs(export(run, tmp_path / "out", dialect=family))
    tokens = tokens_of(of.model)
    native = our_logits(of.model, params, tokens)
    np.testing.assert_allclose(their_logits(theirs, tokens), native, rtol=1e-4, atol=2e-5)
    plain = of.model.model_copy(update={"mup_base_width": None, "mup_base_head_dim": None})
    assert np.abs(our_logits(plain, params, tokens) - native).max() > 0.1


def test_inexpressible_mup_model_is_refused(tmp_path):
    """The family has no scale for scores of normalised queries."""
    of = config(qk_norm=True, mup_base_head_dim=4)
    run = save_run(tmp_path / "run", of)
    with pytest.raises(UserError, match=r"has no model.attention_scale = 0.125"):
        export(run, tmp_path / "out")


def test_mup_dcp_export_requires_weights_only(tmp_path):
    of = config(mup_base_head_dim=4)
    params = random_params(of.model)
    run = save_run(tmp_path / "run", of, params)
    with pytest.raises(UserError, match=r"other learning rates.*--weights-only"):
        conversion.plan(Request(checkpoints.find(run), tmp_path / "out", "dcp"))
    alone = ReadOptions(weights_only=True)
    plan = conversion.plan(Request(checkpoints.find(run), tmp_path / "out", "dcp", options=alone))
    head = plan.source.checkpoint.params["output_head.proj.weight"].all()
    np.testing.assert_array_equal(head, params["output_head"]["proj"]["weight"] / 4)
    assert plan.source.target.config.model.mup_base_width is None


def test_standard_weights_with_mup_config_raise(tmp_path):
    plain = config(mup_base_width=None)
    out = export(save_run(tmp_path / "run", plain), tmp_path / "out")
    with pytest.raises(UserError, match=r"standard parametrisation.*remove it.*model.dim = 64"):
        load(out, tmp_path / "again", "--model.mup_base_width=16")
    load(out, tmp_path / "same", "--model.mup_base_width=64")  # standard parametrisation
    options = ReadOptions(weights_only=True)
    with pytest.raises(UserError, match="standard parametrisation"):
        checkpoints.find(out).read(config(), options)


def test_base_width_is_standard_parametrisation():
    at_base = ModelConfig(**{**SHAPE, "mup_base_width": 64, "mup_base_head_dim": 16})
    assert mup.is_standard(at_base)
    assert hf_config.select_family(mup.to_standard(at_base)) == "llama"
    shapes = abstract_target(tiny_config(model=SHAPE)).params
    assert mup.fold_multipliers(dict.fromkeys(shapes, None), at_base) == dict.fromkeys(shapes, None)


def built_as_llama(config):
    """Factory for lockstep, without muP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Mine(LlamaForCausalLM):
        def forward(self, tokens):
            return super().forward(tokens).logits

    model = config.model
    assert model.mup_base_width is None
    return Mine(LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=model.dim, intermediate_size=model.ffn_hidden_dim,
        num_hidden_layers=model.n_layers, num_attention_heads=model.n_heads,
        num_key_value_heads=model.n_kv_heads, rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
    ))  # fmt: skip


@pytest.mark.slow
def test_lockstep_compares_folded_weights(tmp_path):
    of = config(mup_base_head_dim=4)
    run = save_run(tmp_path / "run", of)
    job = command.Job(f"{__name__}:built_as_llama", str(run), size=(2, 16))
    report = command.lockstep(job)
    assert report.same, first_difference(report.rows)
    assert any("contain the multipliers of muP" in note for note in report.notes)
