"""Model FLOPs of a token, in two conventions.

Model FLOPs count the matrix products of the forward pass, three times (the backward pass takes two
more). What rematerialisation computes again, norms, softmax and the embedding's look-up do not
count. Sizes as in `model/transformer.py`: L layers, D width, H query heads, K key/value heads, h
head width, F feed-forward width, V vocabulary, S sequence.
"""

from collections.abc import Iterator

from jaxforge.config.model import ModelConfig


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """KempnerForge's count, which is PaLM's (arXiv:2204.02311, appendix B): 6 P + 12 L H h S.

    P are the matrices without the embedding, the feed-forward always with three; attention is
    counted in full, as if it looked ahead; a sliding window of W tokens counts as W, a chunk
    of C as C. KempnerForge takes `model.max_seq_len` for S, we what is trained on. Of
    experts count those that a token goes to, and the shared one; KempnerForge takes them for as
    wide as a dense feed-forward, whatever `model.moe_expert_ffn_multiplier` says.
    """
    matrices = matrix_elements(model, 3, model.moe_top_k)
    reaches = sum(min(window or chunk or seq_len, seq_len) for window, chunk in _of_layers(model))
    return 6 * matrices + 12 * model.n_heads * model.head_size * reaches


def causal_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Megatron's count: 6 P + 6 L H h S; attention looks back only, at half of S on average.

    Over a sliding window of W tokens, at W - W² / 2 S of them; within chunks of C, at half of C.

    The feed-forward has the matrices that it has: three when gated, else two. Packed documents
    count as one sequence. Of experts count those that a token goes to. Source: Megatron-Bridge,
    `utils/flop_utils.py`.
    """
    matrices = matrix_elements(model, 2 + model.is_gated, model.moe_top_k)
    pairs = pairs_twice(model, seq_len)
    return 6 * matrices + 6 * model.n_heads * model.head_size * pairs // seq_len


def pairs_twice(model: ModelConfig, seq_len: int) -> int:
    """Twice the pairs of a query and a key that sees it in a sequence, over all layers."""
    return sum(_pairs_twice(*of_layer, seq_len) for of_layer in _of_layers(model))


def _of_layers(model: ModelConfig) -> Iterator[tuple[int | None, int | None]]:
    """Window and chunk of each layer, tokens."""
    return zip(model.windows, model.chunks, strict=True)


def _pairs_twice(window: int | None, chunk: int | None, seq_len: int) -> int:
    """Twice the pairs of a query and a key that it sees in a sequence, itself counted half."""
    if chunk is not None:
        whole, remainder = divmod(seq_len, chunk)
        return whole * chunk**2 + remainder**2
    reach = min(window or seq_len, seq_len)
    return reach * (2 * seq_len - reach)


def matrix_elements(model: ModelConfig, feed_forward: int, experts: int) -> int:
    """Return the number of matrix elements of a model, without embedding and routers.

    Args:
        model: of Llama's shape.
        feed_forward: matrices of a feed-forward: 3 when gated, else 2.
        experts: of each layer that has experts, how many count next to the shared one.
    """
    heads = 2 * model.n_heads + 2 * model.kv_heads  # q and o, k and v
    wide = experts * model.expert_dim + model.shared_expert_dim
    widths = sum(wide if has_experts else model.ffn_dim for has_experts in model.has_experts)
    attention = model.n_layers * heads * model.head_size
    return model.dim * (attention + feed_forward * widths + model.vocab_size)
