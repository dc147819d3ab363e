"""Language models inside multimodal Hugging Face checkpoints: their config and their tensors.

    config.json of the class that publishes      its tensors
      text_config {...}       <-> [model]          language_model.model.layers...   <-> parameters
      vision_config {...}                          vision_tower... (left aside)

`text_config` is read as the config of a family, and the tensors below one prefix as those of its
class. `originals` has the way back.
"""

import dataclasses
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jaxforge.errors import UserError
from torch_compat.families import FAMILIES
from torch_compat.families.family import HF_NAME, NAME, consecutive_rows, fused
from torch_compat.formats.lazy import LazyTensor
from torch_compat.names.table import EMBEDDING, HEAD, NameMap, Rule, Transposed

_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""`model_type` whose files of 2024 have the keys of the text at the top -> that of the text."""
_ALIASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "glm4v_text": ("glm4", {"rms_norm_eps": 1e-5}),
    "glm4v_moe_text": ("glm4_moe", {"attention_bias": True}),
    "qwen2_vl_text": ("qwen2", {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8,
                                "max_window_layers": 80}),
    "qwen2_5_vl_text": ("qwen2", {"rms_norm_eps": 1e-5, "rope_theta": 1e6,
                                  "num_key_value_heads": 8, "max_window_layers": 80}),
    "qwen3_vl_text": ("qwen3", {"rope_theta": 5e5}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"rope_theta": 5e5, "num_key_value_heads": 16,
                                        "head_dim": 128, "num_experts_per_tok": 4,
                                        "num_experts": 60, "moe_intermediate_size": 1408}),
}  # fmt: skip
"""`model_type` of a text model -> the family that it equals for text, and defaults that differ."""
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "vocab_size", "max_position_embeddings")  # fmt: skip
_DEFAULTS: Mapping[str, tuple[int, ...]] = {
    "cohere": (8192, 22528, 40, 64, 256000, 8192),
    "cohere2": (8192, 22528, 40, 64, 256000, 8192),
    "deepseek_v3": (7168, 18432, 61, 128, 129280, 4096),
    "exaone4": (4096, 16384, 32, 32, 102400, 2048),
    "gemma": (3072, 24576, 28, 16, 256000, 8192),
    "gemma2": (2304, 9216, 26, 8, 256000, 8192),
    "gemma3_text": (2304, 9216, 26, 8, 262208, 131072),
    "gemma4_text": (2304, 9216, 30, 8, 262144, 131072),
    "glm4v_moe_text": (4096, 10944, 46, 96, 151424, 65536),
    "glm4v_text": (4096, 13696, 40, 32, 151552, 32768),
    "granite": (4096, 11008, 32, 32, 32000, 2048),
    "llama": (4096, 11008, 32, 32, 32000, 2048),
    "llama4_text": (5120, 8192, 48, 40, 202048, 131072),
    "ministral3": (4096, 14336, 34, 32, 131072, 262144),
    "mistral": (4096, 14336, 32, 32, 32000, 131072),
    "qwen2": (4096, 22016, 32, 32, 151936, 32768),
    "qwen2_5_vl_text": (8192, 29568, 80, 64, 152064, 32768),
    "qwen2_vl_text": (8192, 29568, 80, 64, 152064, 32768),
    "qwen3": (4096, 22016, 32, 32, 151936, 32768),
    "qwen3_5_moe_text": (2048, 512, 40, 16, 248320, 32768),
    "qwen3_5_text": (4096, 12288, 32, 16, 248320, 32768),
    "qwen3_moe": (2048, 6144, 24, 32, 151936, 32768),
    "qwen3_vl_moe_text": (2048, 5632, 24, 16, 151936, 128000),
    "qwen3_vl_text": (4096, 22016, 32, 32, 151936, 128000),
}
"""`model_type` of a text model -> `_SIZES` in transformers, which published files leave out."""
_CONSTANTS = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""`model_type` of a text model -> values that its class has whatever the file says."""
_REFUSED = {
    "paligemma": "its language model attends to a prompt in both directions",
}
"""`model_type` of a class whose language model is not that of a family -> the reason."""
TIED = "tie_word_embeddings"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_INHERITED = (*_TOKENS, "dtype", "torch_dtype", "quantization_config")
"""Keys that the text model takes from the top of the file, where it has none of its own."""
ROTARY = ("rope_parameters", "rope_scaling")
OF_IMAGES = ("mrope_section", "mrope_interleaved", "mrope_section_interleaved")
"""Keys of rotary positions in three dimensions, which are the same for every token of text."""
_UNUSED = ("num_image_tokens",)


def is_nested(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is that of a model with images or sound."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:  # also a registered one
        return False
    return isinstance(config.get("text_config"), dict) or kind in [*_FLAT]


def text_config(
    config: Mapping[str, Any], has_head: Callable[[], bool], where: str
) -> dict[str, Any]:
    """Return the config of the language model as a `config.json` of its family.

    Args:
        config: the nested config.
        has_head: whether the files have an output head, which tells whether it is tied if the
            config does not.
        where: the file, for messages.

    Raises:
        UserError: the language model is of no family.
    """
    text = _nested(config)
    if (reason := _REFUSED.get(str(config.get("model_type")))) is not None:
        raise UserError(
            f"{where}: model_type {config['model_type']!r} has no counterpart in jaxforge: {reason}"
        )
    kind = text.get("model_type")
    family, defaults = _ALIASES.get(str(kind), (kind, {}))
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            f"{where}: text_config has model_type {reprlib.repr(kind)}, which is not one of "
            f"{', '.join(sorted({*FAMILIES, *_ALIASES}))}. A language model that attends to images "
            "by layers of its own has no counterpart in jaxforge"
        )
    sizes = dict(zip(_SIZES, _DEFAULTS.get(str(kind), ()), strict=False))
    inherited = {key: config[key] for key in _INHERITED if key in config}
    names = {FAMILIES[family].llama_name(key) for key in text}  # also of keys with two names
    absent = {k: v for k, v in {**sizes, **defaults}.items() if k not in names}
    flat = {**absent, **inherited, **text, "model_type": family}
    flat |= _CONSTANTS.get(str(kind), {})
    flat = {key: value for key, value in flat.items() if key not in _UNUSED}
    for key in ROTARY:
        if isinstance(flat.get(key), dict):
            flat[key] = _without_images(flat[key])
    return {**flat, TIED: _is_tied(config, text, has_head)}


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the text; those at the top of the file if it has no table of them."""
    if isinstance(text := config.get("text_config"), dict):
        return text
    foreign = re.compile(r"(?!bos|eos|pad).*_token_id|.*_config|architectures|model_type")
    text = {key: value for key, value in config.items() if not foreign.fullmatch(key)}
    return {**text, "model_type": _FLAT[config["model_type"]]}


def _without_images(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters for text, where all three dimensions have the same position."""
    result = {key: value for key, value in rotary.items() if key not in OF_IMAGES}
    for key in ("type", "rope_type"):
        if result.get(key) == "mrope":
            result[key] = "default"
    return result


def _is_tied(
    config: Mapping[str, Any], text: Mapping[str, Any], has_head: Callable[[], bool]
) -> bool:
    """Return whether output head and embedding are one tensor.

    The class has the head, so its flag counts and not that of the text. Many files have neither.
    """
    flag, of_text = config.get(TIED), text.get(TIED)
    if flag or (flag is False and not of_text):
        return bool(flag)
    # Older files have the flag in the text, and files without any flag take that of the class.
    return not has_head() or bool(flag is None and of_text)


class Nesting(NamedTuple):
    """Names of the language model in the files of a multimodal checkpoint.

    Attributes:
        base: the family's prefix of all names but those of the output head, such as `model.`.
        model: prefix that replaces it, such as `language_model.model.`.
        head: prefix of the family's other names, such as `language_model.` of `lm_head.weight`.
    """

    base: str
    model: str
    head: str

    def key(self, family_key: str) -> str:
        """Return the name in the files of a key of the family."""
        if family_key.startswith(self.base):
            return self.model + family_key.removeprefix(self.base)
        return self.head + family_key


class Parts(NamedTuple):
    """Tensors of a multimodal checkpoint.

    Attributes:
        text: tensors of the language model by the family's keys.
        aside: all other tensors by their names.
        nesting: names of the language model.
        dialect: name map of the family, with the files' layout of experts.
    """

    text: dict[str, LazyTensor]
    aside: dict[str, LazyTensor]
    nesting: Nesting
    dialect: NameMap

    @property
    def has_head(self) -> bool:
        """True if the files have an output head."""
        return self.dialect.key_for(HEAD) in self.text


def split(contents: Mapping[str, LazyTensor], config: Mapping[str, Any], where: str) -> Parts:
    """Separate the tensors of the language model from those of images and sound.

    Args:
        contents: tensors by their names.
        config: the nested config, whose language model is of a family.
        where: path of the checkpoint, for messages.

    Raises:
        UserError: the language model is not found.
    """
    kind = str(_nested(config).get("model_type"))
    dialect = with_packed_experts(FAMILIES[_ALIASES.get(kind, (kind,))[0]].dialect, contents)
    base, tail = dialect.key_for(EMBEDDING).split(".", 1)
    prefixes = {
        name.removesuffix(tail) for name in contents if f".{name}".endswith(f".{tail}")
    }  # fmt: skip
    if not prefixes:
        raise UserError(f"{where}: no tensor is named {tail}, with which a language model begins")
    nestings = [_nesting(prefix, contents, dialect) for prefix in sorted(prefixes)]
    if len(nestings) > 1:
        # An encoder of sound may embed tokens, too; its other names are not those of the family.
        nestings.sort(key=lambda nesting: sum(map(dialect.knows, _text(contents, nesting))))
    nesting = nestings[-1]
    text = _text(contents, nesting)
    # Older classes keep the encoder below the same `model.` as the layers.
    if nesting.model in ("", nesting.base):
        parts = {rule.key.split(".")[1] for rule in dialect.rules if rule.key.startswith(base)}
        text = {
            key: name for key, name in text.items()
            if dialect.knows(key) or key.split(".")[1] in parts
        }  # fmt: skip
    names = set(text.values())
    aside = {name: tensor for name, tensor in contents.items() if name not in names}
    return Parts({key: contents[name] for key, name in text.items()}, aside, nesting, dialect)


def _nesting(prefix: str, names: Collection[str], dialect: NameMap) -> Nesting:
    """Return the names of a language model whose embedding has a prefix."""
    base = dialect.key_for(EMBEDDING).partition(".")[0] + "."
    # `language_model.model.` has the base model inside, but `model.language_model.` is the base.
    has_inner = f".{prefix}".endswith(f".{base}")
    head, outer = dialect.key_for(HEAD), prefix.removesuffix(base) if has_inner else prefix
    # Without a head in the files: next to the base model if that is not the whole class.
    is_inside = f"{outer}{head}" in names or (head not in names and outer != prefix)
    return Nesting(base, prefix, outer if is_inside else "")


def _text(names: Collection[str], nesting: Nesting) -> dict[str, str]:
    """Return the family's key -> name of all tensors that may be the language model's."""
    below = {
        nesting.base + name.removeprefix(nesting.model): name
        for name in names if name.startswith(nesting.model)
    }  # fmt: skip
    heads = (name for name in names if name.startswith(f"{nesting.head}lm_head."))
    return below | {name.removeprefix(nesting.head): name for name in heads}


def with_packed_experts(dialect: NameMap, contents: Mapping[str, LazyTensor]) -> NameMap:
    """Return a dialect for files that hold all experts of a layer in two tensors.

    Files of `dialect` have a tensor per expert and projection. Packed files have, per layer,

        experts.gate_up_proj   [E, 2F, D], or transposed [E, D, 2F]
        experts.down_proj      [E, D, F],  or transposed [E, F, D]
    """
    packed, down = f"{HF_NAME}mlp.experts.gate_up_proj", f"{HF_NAME}mlp.experts.down_proj"
    first = next((n for n in contents if n.endswith(".mlp.experts.gate_up_proj")), None)
    if first is None or dialect.knows(packed.format(i=0)):
        return dialect
    second = contents.get(first.replace("gate_up_proj", "down_proj"))
    # Both orders cannot fit: 2F = F holds for no width.
    is_transposed = second is not None and contents[first].shape[1:2] == second.shape[2:]
    expert = f"{NAME}mlp.experts.{{j}}."
    rules = (
        *(rule for rule in dialect.rules if not rule.name.startswith(expert)),
        *fused(
            tuple(f"{expert}{m}_proj.weight" for m in ("gate", "up")), packed,
            lambda model: consecutive_rows(model.expert_dim, model.expert_dim),
            transposed=is_transposed,
        ),
        Rule(f"{expert}down_proj.weight", down, Transposed() if is_transposed else None),
    )  # fmt: skip
    return dataclasses.replace(dialect, rules=rules)
