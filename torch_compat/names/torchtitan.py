"""Names of torchtitan's Llama, with Meta's interleaved rotary channels."""

from torch_compat.names.table import EMBEDDING, HEAD, InterleavedRotary, NameMap, Rule

_FREQUENCIES = ("freqs_cis", "rope.cache")


def _llama(name: str, about: str, qkv: str, head: str, *, has_one_group: bool) -> NameMap:
    layer = "layers.{i}."
    return NameMap(
        name,
        about,
        (
            Rule(EMBEDDING, "tok_embeddings.weight"),
            Rule(HEAD, head),
            Rule("norm.weight", "norm.weight"),
            Rule(f"{layer}attention_norm.weight", f"{layer}attention_norm.weight"),
            Rule(f"{layer}mlp_norm.weight", f"{layer}ffn_norm.weight"),
            Rule(f"{layer}attention.q_proj.weight", f"{layer}{qkv}wq.weight", InterleavedRotary()),
            Rule(f"{layer}attention.k_proj.weight", f"{layer}{qkv}wk.weight", InterleavedRotary()),
            Rule(f"{layer}attention.v_proj.weight", f"{layer}{qkv}wv.weight"),
            Rule(f"{layer}attention.o_proj.weight", f"{layer}attention.wo.weight"),
            Rule(f"{layer}mlp.gate_proj.weight", f"{layer}feed_forward.w1.weight"),
            Rule(f"{layer}mlp.down_proj.weight", f"{layer}feed_forward.w2.weight"),
            Rule(f"{layer}mlp.up_proj.weight", f"{layer}feed_forward.w3.weight"),
        ),
        ignored=_FREQUENCIES,
        writes_tied_head=True,
        has_one_group=has_one_group,
    )


TORCHTITAN = _llama(
    "torchtitan",
    "torchtitan's Llama since 2026 (0.3)",
    "attention.qkv_linear.",
    "lm_head.weight",
    has_one_group=False,
)
TORCHTITAN_2025 = _llama(
    "torchtitan-2025",
    "torchtitan's Llama until 2025 (0.1, 0.2)",
    "attention.",
    "output.weight",
    has_one_group=True,
)
