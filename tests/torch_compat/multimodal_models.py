"""Tiny random models with images or sound, of the classes that transformers publishes."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.auto import modeling_auto  # noqa: E402 (needs torch)

TEXT = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": None,
        "bos_token_id": 1, "eos_token_id": 0}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
HALF = {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
TEXTS = {
    "gemma3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
               "global_head_dim": 16, "hidden_size_per_layer_input": 4,
               "vocab_size_per_layer_input": 128, "pad_token_id": 0},
    "exaone4_5": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4v": {"rope_parameters": HALF},
    "glm46v": {"rope_parameters": HALF},
    "glm4v_moe": {"rope_parameters": HALF, "n_routed_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "granite_speech": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                       "attention_multiplier": 0.3, "logits_scaling": 3.0},
    "llama4": {"intermediate_size_mlp": 40, "num_local_experts": 4, "attention_chunk_size": 8},
    "minicpmv4_6": DELTA,
    "mistral3": {"sliding_window": None},
    "mistral3, ministral3": {"model_type": "ministral3"},
    "qwen2_vl": {"rope_parameters": SECTIONS},
    "qwen2_5_vl": {"rope_parameters": SECTIONS},
    "qwen3_vl": {"rope_parameters": {**SECTIONS, "rope_theta": 500000.0}},
    "qwen3_vl_moe": EXPERTS,
    "qwen3_5": DELTA,
    "qwen3_5_moe": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24},
}  # fmt: skip
"""Model type, and name of a case -> keys of its `text_config` in addition to the sizes."""
ENCODERS = {"llama4": {"intermediate_size": 128}, "mistral3": {"image_size": 56}}
"""Model type -> other sizes of its encoder."""
TOPS = {"gemma3": {"mm_tokens_per_image": 4}}
"""Model type -> further keys at the top of its config."""
_ENCODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "depth": 2, "num_heads": 4, "embed_dim": 32, "image_size": 28, "patch_size": 14,
    "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0], "projection_dim": 32, "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32, "encoder_layers": 2, "d_model": 32,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_key_value_heads": 4, "head_dim": 8,
    "hidden_dim": 32, "output_dim": 32, "num_layers": 2,
}  # fmt: skip
"""Sizes of encoders of images and sound, of which a class has some."""


@functools.lru_cache
def network(case):
    """Return a network of a model type or case; norms and biases are random, too."""
    torch.manual_seed(0)
    kind = case.partition(",")[0]
    config_class = type(transformers.AutoConfig.for_model(kind))
    usual = config_class()
    tables = {"text_config": {"model_type": usual.text_config.model_type, **TEXT,
                              **TEXTS.get(case, {})}}  # fmt: skip
    for key in config_class.sub_configs.keys() - tables:
        part = getattr(usual, key) or config_class.sub_configs[key]()  # Gemma 4 has none
        sizes = {name: size for name, size in _ENCODER.items() if hasattr(part, name)}
        tables[key] = {"model_type": part.model_type, **sizes, **ENCODERS.get(kind, {})}
    result = _class_of(kind)(config_class(**tables, **TOPS.get(kind, {}))).eval()
    with torch.no_grad():
        for name, value in result.named_parameters():
            if value.ndim == 1:
                value.uniform_(0.5, 1.5) if "norm" in name else value.normal_(0, 0.3)
    return result


def _class_of(kind):
    names = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    return getattr(transformers, next(table[kind] for table in names if kind in table))


def logits(model, tokens):
    """Return the logits of text."""
    # The class of Llama 4 in transformers 5.24 reads an attribute that its output lacks.
    text = model.language_model if model.config.model_type == "llama4" else model
    with torch.no_grad():
        return text(input_ids=torch.from_numpy(tokens)).logits.float().numpy()


_RNG = np.random.default_rng(0)
_PIXELS = torch.from_numpy(_RNG.standard_normal((1, 3, 28, 28)).astype(np.float32))
_GRID = torch.tensor([[1, 4, 4]])  # patches in time, height and width


def _image(model):
    return model.get_image_features(pixel_values=_PIXELS)


def _patches(model):
    vision = model.config.vision_config
    size = 3 * vision.temporal_patch_size * vision.patch_size**2
    values = np.random.default_rng(0).standard_normal((16, size)).astype(np.float32)
    return model.get_image_features(pixel_values=torch.from_numpy(values), image_grid_thw=_GRID)


FEATURES = {
    **dict.fromkeys(("gemma3", "llava", "internvl", "aya_vision", "cohere2_vision"), _image),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
                     "qwen3_5_moe", "glm4v", "glm4v_moe"), _patches),
    "mistral3": lambda model: model.get_image_features(
        _PIXELS.repeat(1, 1, 2, 2), image_sizes=[(56, 56)]
    ),
    "llama4": lambda model: model.get_image_features(
        _PIXELS, vision_feature_select_strategy="full"
    ),
}  # fmt: skip
"""Model type -> function (network) -> features of an image."""


def features(model):
    """Return the features of an image as a flat list of arrays."""
    with torch.no_grad():
        output = FEATURES[model.config.model_type](model)
    return [value.numpy() for value in _tensors(output)]


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
