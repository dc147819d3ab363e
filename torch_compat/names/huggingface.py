"""Hugging Face transformers: one table per family. Rotary channels are paired as ours are."""

from torch_compat.names.table import EMBEDDING, HEAD, Dialect, Rule

_LAYER, _THEIRS = "layers.{i}.", "model.layers.{i}."
_EXPERT = "layers.{i}.mlp.experts.{j}."

_COMMON = (
    Rule(EMBEDDING, "model.embed_tokens.weight"),
    Rule(HEAD, "lm_head.weight"),
    Rule("norm.weight", "model.norm.weight"),
    Rule(f"{_LAYER}attention_norm.weight", f"{_THEIRS}input_layernorm.weight"),
    Rule(f"{_LAYER}mlp_norm.weight", f"{_THEIRS}post_attention_layernorm.weight"),
    *(
        Rule(f"{_LAYER}attention.{m}_proj.weight", f"{_THEIRS}self_attn.{m}_proj.weight")
        for m in "qkvo"
    ),
)
_DENSE = tuple(
    Rule(f"{_LAYER}mlp.{m}_proj.weight", f"{_THEIRS}mlp.{m}_proj.weight")
    for m in ("gate", "up", "down")
)
_BIASES = tuple(
    Rule(f"{_LAYER}attention.{m}_proj.bias", f"{_THEIRS}self_attn.{m}_proj.bias") for m in "qkv"
)
_QK_NORMS = tuple(
    Rule(f"{_LAYER}attention.{m}_norm.weight", f"{_THEIRS}self_attn.{m}_norm.weight") for m in "qk"
)
_MIXTRAL = (
    Rule(f"{_LAYER}mlp.router.gate.weight", f"{_THEIRS}block_sparse_moe.gate.weight"),
    *(
        Rule(f"{_EXPERT}{ours}_proj.weight", f"{_THEIRS}block_sparse_moe.experts.{{j}}.{w}.weight")
        for ours, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    ),
)
_QWEN3_MOE = (
    Rule(f"{_LAYER}mlp.router.gate.weight", f"{_THEIRS}mlp.gate.weight"),
    *(
        Rule(f"{_EXPERT}{m}_proj.weight", f"{_THEIRS}mlp.experts.{{j}}.{m}_proj.weight")
        for m in ("gate", "up", "down")
    ),
)
_REFUSED = {
    r".*\.router\.expert_(bias|ema)": "no family chooses experts as KempnerForge's sigmoid router "
    "does",
    r".*\.shared_expert\..*": "this family has no shared expert",
    r".*norm\.bias": "no family here has LayerNorm",
    r".*\.[qk]_norm\.weight": "this family has no q/k norms; hf-qwen3 has",
    r".*\.[qkv]_proj\.bias": "this family has no biases; hf-qwen2 has",
}


def _family(name: str, about: str, *rules: tuple[Rule, ...]) -> Dialect:
    table = tuple(rule for group in (_COMMON, *rules) for rule in group)
    ignored = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\..*")
    return Dialect(name, about, table, ignored, _REFUSED)


FAMILIES = {
    "llama": _family("hf-llama", "LlamaForCausalLM", _DENSE),
    "mistral": _family("hf-mistral", "MistralForCausalLM", _DENSE),
    "qwen2": _family("hf-qwen2", "Qwen2ForCausalLM", _DENSE, _BIASES),
    "qwen3": _family("hf-qwen3", "Qwen3ForCausalLM", _DENSE, _QK_NORMS),
    "mixtral": _family("hf-mixtral", "MixtralForCausalLM", _MIXTRAL),
    "qwen3_moe": _family("hf-qwen3-moe", "Qwen3MoeForCausalLM", _DENSE, _QWEN3_MOE, _QK_NORMS),
}
"""`model_type` of config.json -> its table."""
