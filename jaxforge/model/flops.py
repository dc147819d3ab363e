"""Model FLOPs per token, in two conventions.

Model FLOPs count the matrix products of the forward pass three times, since the backward pass has
twice as many. Rematerialisation, norms, softmax and the embedding lookup do not count. Sizes as in
`model/transformer.py`: L layers, D width, H query heads, K key/value heads, h head width, F
feed-forward width, V vocabulary, S sequence.
"""

from collections.abc import Iterator

from jaxforge.config.model import SHARED_MIXERS, LayerParts, ModelConfig
from jaxforge.model.cost import MixerCost, attention_cost


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Return the count of KempnerForge and PaLM (arXiv:2204.02311, appendix B): 6 P + 12 L H h S.

    P is the number of matrix elements without the embedding, with three matrices per feed-forward.
    Attention counts in full, without the causal mask; a sliding window of W tokens counts as W, a
    chunk of C as C, and k keys that an indexer selects as k. The experts of a token count, and the
    shared expert. In mixers other than attention, 2 H h S is replaced by the multiply-adds of
    `MixerCost`.

    Two differences from KempnerForge: S is the training length and not `model.max_seq_len`, and
    experts have their own width and not that of a dense feed-forward
    (`model.moe_expert_dim`). Each module of multi-token prediction counts as a layer
    with a projection of 2 D² elements and another product with the output head.
    """
    matrices = matrix_elements(model, 3, model.moe_top_k)
    selected = min(model.latent_attention.index_top_k, seq_len)
    per_token = sum(
        cost.per_pair * min(window or chunk or seq_len, seq_len)
        + cost.per_selected * selected
        + cost.per_token
        for cost, window, chunk in _mixing(model)
    )
    return 6 * (matrices + per_token)


def causal_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Return the count of Megatron, with causal attention: 6 P + 6 L H h S.

    A token attends to S/2 tokens on average; to W - W² / 2 S with a sliding window of W tokens, and
    to C/2 within chunks of C. Feed-forwards count three matrices if gated, else two. Packed
    documents count as one sequence. The experts of a token count. Source: Megatron-Bridge,
    `utils/flop_utils.py`.
    """
    matrices = matrix_elements(model, 2 + model.is_gated, model.moe_top_k)
    # A query has as many selected keys as with a window of that size.
    selected = _pairs_twice(model.latent_attention.index_top_k, None, seq_len)
    twice = sum(
        cost.per_pair * _pairs_twice(window, chunk, seq_len)
        + cost.per_selected * selected
        + 2 * cost.per_token * seq_len
        for cost, window, chunk in _mixing(model)
    )
    return 6 * matrices + 3 * twice // seq_len


def visible_fraction(model: ModelConfig, seq_len: int) -> float:
    """Return the fraction of query-key pairs that masks allow, over all layers that score pairs."""
    spans = [(window, chunk) for cost, window, chunk in _mixing(model) if cost.per_pair]
    twice = sum(_pairs_twice(window, chunk, seq_len) for window, chunk in spans)
    return twice / (2 * max(1, len(spans)) * seq_len**2)


def _mixing(model: ModelConfig) -> Iterator[tuple[MixerCost, int | None, int | None]]:
    """Return the mixer's cost, window and chunk in tokens, of each layer and prediction module."""
    costs = {name: _mixer_cost(model, name) for name, _ in {*model.layer_parts}}
    mixers = [costs[parts.mixer] for parts in model.layer_parts]
    layers = list(zip(mixers, model.windows, model.chunks, strict=True))
    module = (costs[model.mtp_parts.mixer], *layers[-1][1:])
    return iter(layers + [module] * model.mtp_depth)


def _mixer_cost(model: ModelConfig, mixer: str) -> MixerCost:
    """Return the cost of a mixer in one layer; JAX is not imported for softmax attention."""
    if mixer in (*SHARED_MIXERS, *SHARED_MIXERS.values()):
        return attention_cost(model, model.head_sizes(mixer))
    from jaxforge.model.mixers import mixer_class

    return mixer_class(mixer).cost(model)


def _pairs_twice(window: int | None, chunk: int | None, seq_len: int) -> int:
    """Return twice the number of query-key pairs of a sequence; the diagonal counts half.

    Full attention has S²/2 such pairs. With a window W, the first W tokens have W²/2 and each of
    the other S - W tokens has W: together (2 S - W) W / 2.
    """
    if chunk is not None:
        whole, remainder = divmod(seq_len, chunk)
        return whole * chunk**2 + remainder**2
    reach = min(window or seq_len, seq_len)
    return reach * (2 * seq_len - reach)


def matrix_elements(model: ModelConfig, feed_forward: int, experts: int) -> int:
    """Return the number of matrix elements that multiply a token, without embedding and routers.

    The output head counts once for each depth of multi-token prediction, too, and so do the
    projections to and from the latent of experts (`model.moe_latent_dim`). Matrices of
    hyper-connections count once for each vector that they multiply, and so do those of the
    embeddings of layers (`model.layer_embedding_dim`).

    Args:
        model: a model with the structure of Llama.
        feed_forward: matrices of a feed-forward: 3 if gated, else 2.
        experts: number of experts that count per layer with experts, without the shared one.
    """
    routed = feed_forward * experts * model.expert_embed_dim * model.expert_dim
    routed += 2 * model.dim * (model.moe_latent_dim or 0)
    experts_and_shared = routed + feed_forward * model.dim * model.shared_expert_dim

    def elements(block: LayerParts) -> int:
        if block.feed_forward == "none":
            return 0
        if block.feed_forward == "experts":
            return experts_and_shared
        return feed_forward * model.dim * model.dense_width(block)

    blocks = model.layer_parts + (model.mtp_parts,) * model.mtp_depth
    feed_forwards = sum(map(elements, blocks))
    # To the embeddings of all layers, and to and from the width of one in each layer.
    embeddings = 3 * model.dim * model.n_layers * (model.layer_embedding_dim or 0)
    mixers = sum(cost.matrices for cost, _, _ in _mixing(model))
    # Coefficients of the residual streams, of each part.
    n, parts = model.n_streams, sum(len(block.mixers) > 0 for block in blocks)
    parts += sum(block.feed_forward != "none" for block in blocks)
    per_part = n * (n + 2)
    mixing = {"none": 0, "dynamic": per_part * parts, "manifold": n * (per_part * parts + n)}
    projections = model.mtp_depth * 2 * model.dim
    heads = (1 + model.mtp_depth) * model.vocab_size
    of_streams = mixing[model.hyper_connections]
    return mixers + feed_forwards + embeddings + model.dim * (projections + heads + of_streams)
