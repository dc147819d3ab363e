"""Parts of Gemma 4 on meshes, in packed rows, in decoding and after a resume.

Values are compared with transformers in tests/torch_compat/test_families.py.
"""

import functools

import jax
import numpy as np
import pytest

from jaxforge.config import rules
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model.decoding import Decoder
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model, join
from tests.conftest import tiny_config
from tests.helpers import (
    assert_resumes_bit_exactly,
    initial_params,
    loss_and_gradient,
    random_batches,
    setup,
)

WIDE = {
    "n_layers": 4, "n_kv_heads": 4, "head_dim": 8, "qk_norm": True, "value_norm": True,
    "attention_scale": 0.2, "norm_placement": "sandwich", "layer_multipliers": True,
    "tie_embeddings": True, "sliding_window": 5, "attention_pattern": ["sliding", "full"],
    "mixer_pattern": ["attention", "global_attention"], "local_rope_theta": 100.0,
    "rope_scaling": {"rope_type": "proportional", "factor": 1.0, "rotated_share": 0.25},
    "global_attention": {"head_dim": 16, "n_kv_heads": 2, "keys_as_values": True},
}  # fmt: skip
SHARING = {**WIDE, "n_kv_shared_layers": 2, "kv_shared_ffn_dim": 96, "layer_embedding_dim": 6}
EXPERTS = {**WIDE, "num_experts": 4, "moe_shared_experts": 1, "moe_separate_norms": True,
           "moe_expert_scales": True, "moe_shared_expert_dim": 48}  # fmt: skip
DEEP = {**SHARING, "n_layers": 8, "n_kv_shared_layers": 4}
MODELS = {"wide": WIDE, "sharing": SHARING, "deep": DEEP, "experts": EXPERTS}


def job(name, train=(), **mesh):
    groups = mesh.get("dp_shard", 1) * mesh.get("ep", 1)
    sizes = {"dim": 32, "n_heads": 4, "vocab_size": 64, "ffn_hidden_dim": 48, "max_seq_len": 32}
    return tiny_config(
        model={**sizes, **MODELS[name]},
        train={"batch_size": 4 // groups, "seq_len": 16, "max_steps": 8, **dict(train)},
        distributed={"dp_shard": 1, **mesh}, data={"pack_sequences": True},
    )  # fmt: skip


def values(section):
    """Return the loss of a batch of packed documents, and all gradients."""
    (batch,) = random_batches(section, 1)
    segments = np.repeat([1, 2, 3], [6, 7, 3]).astype(np.int32)
    batch["segment_ids"] = np.broadcast_to(segments, batch["input_ids"].shape)
    return loss_and_gradient(setup(section), batch)


@functools.cache
def on_one_device(name):
    return values(job(name, {"grad_accum_steps": 2}))


RING = {"dp_shard": 2, "cp": 2, "tp": 2, "cp_strategy": "ring"}
MICROBATCH = {"grad_sync": "microbatch"}


@pytest.mark.parametrize(
    ("name", "train", "mesh"),
    [
        ("sharing", {}, RING),
        *(pytest.param(*keys, marks=pytest.mark.slow) for keys in (
            ("experts", {"activation_checkpointing": "full"}, {"ep": 2, "tp": 2}),
            ("deep", {**MICROBATCH, "activation_checkpointing": "full"},
             {"dp_shard": 4, "tp": 2}),
            ("deep", {"activation_checkpointing": "selective"}, {"cp": 2, "dp_shard": 2}),
            ("wide", {}, {"pp": 2, "tp": 2}),
            ("wide", {}, {"pp": 4, "dp_shard": 2}),
            ("wide", {}, RING),
            ("experts", MICROBATCH, {"ep": 2, "dp_shard": 2, "tp": 2}),
            ("experts", {}, {"pp": 2, "ep": 2}),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_losses_and_gradients_do_not_depend_on_the_mesh(name, train, mesh):
    losses, gradients = values(job(name, {"grad_accum_steps": 2, **train}, **mesh))
    expected_losses, expected = on_one_device(name)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(gradients, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["sharing", "experts"])
def test_packed_documents_equal_documents_alone(name):
    model = Model(job(name).model)
    params = join(initial_params(model), model.initial_state())
    tokens = np.random.default_rng(0).integers(0, 64, (1, 16))
    segments = np.repeat([1, 2], [9, 7])[None]
    hidden = jax.jit(model.hidden)
    packed = hidden(params, tokens, segments)
    for document in (slice(0, 9), slice(9, 16)):
        alone = hidden(params, tokens[:, document])
        np.testing.assert_allclose(packed[:, document], alone, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharing", "experts"])
def test_run_resumes_bit_exactly(name, tmp_path):
    program = setup(job(name, {"activation_checkpointing": "full"}, dp_shard=2))
    batches = random_batches(program.config, 3)
    state, _ = program.run(program.state(), batches[:2])
    assert_resumes_bit_exactly(program, state, batches[2:], tmp_path)


@pytest.mark.parametrize(("name", "unstacks"), [("sharing", True), ("deep", False)])
def test_layers_that_share_keys_decode_as_whole_texts_compute(name, unstacks):
    model = Model(job(name).model)
    model.runtime = model.runtime._replace(unstacks=unstacks)
    params = join(initial_params(model), model.initial_state())
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    decoder = Decoder(model, params, 12, Sampling(temperature=0.0))
    logits = jax.jit(lambda tokens: model.logits(params, model.hidden(params, tokens)))
    for prompt, out in zip(prompts, decoder.complete(prompts, range(2)), strict=True):
        text = [*prompt, *out.tokens]
        best = np.argmax(logits(np.array([text])), axis=-1)[0]
        assert out.tokens == best[len(prompt) - 1 : -1].tolist()


def test_layers_that_share_keys_have_no_cache_and_no_matrices_of_keys():
    model = Model(job("sharing").model)
    cache = jax.eval_shape(lambda: model.empty_cache(2, 16))
    shared = {name for name in model.config.stacks if name.startswith("shared_")}
    assert shared == {"shared_attention_layers", "shared_global_attention_layers"}
    for name in model.config.stacks:
        (mixer,) = (key for key in model.abstract[name] if key.endswith("attention"))
        assert (cache[name] is None) == (name in shared)
        assert ("k_proj" in model.abstract[name][mixer]) == (name not in shared)
        width = 96 if name in shared else 48
        assert model.abstract[name]["mlp"]["up_proj"]["weight"].shape[1] == width


def test_wide_heads_next_to_another_mixer_rotate_all_their_channels():
    model = ModelConfig(**{**WIDE, "mixer_pattern": ["attention", "global_attention+mamba2"]})
    assert [rope.size for rope in model.ropes] == [8, 16, 8, 16]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n_kv_shared_layers": 4}, "must be less than n_layers = 4: an earlier layer"),
        ({"n_kv_shared_layers": 3}, 'layers of mixer "global_attention", whose keys no earlier'),
        ({"n_kv_shared_layers": 1, "mixer_pattern": ["mamba2"]}, 'layers of mixer "mamba2"'),
        ({"n_kv_shared_layers": 1, "mtp_depth": 1}, "mtp_depth = 1 is not supported with n_kv_s"),
        ({"layer_embedding_dim": 4, "hyper_connections": "dynamic"}, "with layer_embedding_dim"),
        ({"global_attention": {"n_kv_heads": 3}}, "n_heads = 4 must be a multiple of global_atten"),
        ({"global_attention": {"head_dim": 7}}, "head_dim = 7 must be even"),
        ({"partial_rotary_factor": 0.5}, 'is not supported with mixer "global_attention"'),
        ({"mixer_pattern": ["attention+global_attention"]}, "side by side"),
        ({"mixer_pattern": ["latent_attention", "global_attention"]}, "choose one of them"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_settings_are_problems(keys, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"dim": 32, "n_heads": 4, **WIDE, **keys})


def test_stages_cannot_share_keys():
    with pytest.raises(UserError, match=r"model.n_kv_shared_layers = 2 is not supported with dis"):
        rules.check(job("sharing", {"grad_accum_steps": 2}, pp=2), 2)
