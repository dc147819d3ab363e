"""Models of transformers with the settings of a `ModelConfig`, for comparisons."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

RENAMED = {
    "model.embed_tokens": "token_embedding.embedding",
    "model.layers": "layers",
    "model.norm": "norm",
    "lm_head": "output_head.proj",
    "self_attn": "attention",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}
SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128,
         "ffn_hidden_dim": 96, "norm_eps": 1e-5, "rope_theta": 10000.0}  # fmt: skip


def hugging_face(family, config):
    """Return the network of `transformers` with this shape and random weights."""
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}Config")
    network = getattr(transformers, f"{family}ForCausalLM")(hugging_face_config(kind, config))
    return random_weights(network)


def hugging_face_config(kind, config):
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling.model_dump()
        original = scaling.pop("original_max_seq_len")
        del scaling["rotated_share"]
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": original, **scaling}
    return kind(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters=rope,
        max_position_embeddings=256,
        initializer_range=0.1,  # so that attention is not almost uniform
        attn_implementation="eager",
    )


def random_weights(network):
    """Draw norms and biases as well: a swap of initial ones and zeros would go unnoticed."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
    return network.eval()
