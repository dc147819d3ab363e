"""GPT-J: attention and feed-forward in parallel, partial rotary positions, a head with a bias."""

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, gpt2
from torch_compat.families.common import COMMON
from torch_compat.families.family import OURS, Config, Family, Table, name_map
from torch_compat.names.table import EMBEDDING, HEAD, HEAD_BIAS, InterleavedRotary, Rule

_LAYER = "transformer.h.{i}."
_PAIRED = InterleavedRotary()
_RULES = (
    Rule(EMBEDDING, "transformer.wte.weight"),
    Rule(HEAD, "lm_head.weight"),
    Rule(HEAD_BIAS, "lm_head.bias"),
    *(
        Rule(f"{OURS}attention.{m}_proj.weight", f"{_LAYER}attn.{m}_proj.weight", _PAIRED)
        for m in "qk"
    ),
    Rule(f"{OURS}attention.v_proj.weight", f"{_LAYER}attn.v_proj.weight"),
    Rule(f"{OURS}attention.o_proj.weight", f"{_LAYER}attn.out_proj.weight"),
    *(
        rule
        for what in ("weight", "bias")
        for rule in (
            Rule(f"norm.{what}", f"transformer.ln_f.{what}"),
            Rule(f"{OURS}shared_norm.{what}", f"{_LAYER}ln_1.{what}"),
            Rule(f"{OURS}mlp.up_proj.{what}", f"{_LAYER}mlp.fc_in.{what}"),
            Rule(f"{OURS}mlp.down_proj.{what}", f"{_LAYER}mlp.fc_out.{what}"),
        )
    ),
)


def _read(c: Config, where: str) -> Table:
    head, rotated = common.head_size(c), c["rotary_dim"]
    if rotated > head or rotated % 2:
        raise UserError(
            f"{where}: rotary_dim = {rotated} must be even, and at most the {head} channels of a "
            "head"
        )
    inner = c["intermediate_size"] or 4 * c["hidden_size"]
    table = common.shape({**c, "intermediate_size": inner})
    table |= common.feed_forward(c, where, gated=False)
    if rotated < head:
        # head · (rotated / head) may round to below `rotated`, and int() would lose a channel.
        table["partial_rotary_factor"] = (rotated + 0.5) / head
    return {**table, "norm_type": "layernorm", "parallel_residual": True, "shared_norm": True,
            "mlp_bias": True, "head_bias": True}  # fmt: skip


def _write(model: ModelConfig) -> Table:
    return {
        **{theirs: getattr(model, ours) for ours, theirs in common.PLAIN.items()},
        "intermediate_size": model.ffn_dim,
        "hidden_act": common.activation_key(model),
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": False,
        "rotary_dim": model.rotary_size,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    }


FAMILY = Family(
    "gptj",
    name_map(
        "hf-gptj", "GPTJForCausalLM", *_RULES,
        ignored=(r"transformer\.h\.\d+\.attn\.(masked_bias|bias|embed_positions)",),
    ),
    {
        **{key: COMMON[key] for key in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
            "max_position_embeddings", "initializer_range", "tie_word_embeddings",
        )},
        "intermediate_size": 0, "hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "rotary_dim": 64,
    },
    read=_read,
    write=_write,
    only={"tie_word_embeddings": False, "rotary": True, "scale_attn_weights": True},
    names=gpt2.FAMILY.names,
    aliases=gpt2.FAMILY.aliases,
    unused=gpt2.FAMILY.unused,
    requires_head_divisor=True,
)  # fmt: skip
