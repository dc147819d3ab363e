"""CPU time of an update with each mixer, compared with transformers on one core.

    python benchmarks/mixers.py [--quick] [--cases WORDS]

Both have the same layers, float32, AdamW and the same tokens, and alternate in one process. The
process keeps to one core, and CPU time does not depend on the load. transformers gets the model by
the keys of our export. It trains no indexer, so that the one of sparse attention is frozen.
"""

import dataclasses
import os
from collections.abc import Callable

import moe
import results
import step
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from jaxforge.config.model import ModelConfig
from jaxforge.parallel import host_memory
from torch_compat.checkpoint.hf_config import select_family
from torch_compat.families import FAMILIES


def case(name: str, mixer: str, tokens: tuple[int, int] = (8, 256), layers: int = 4,
         **keys: object) -> step.Case:  # fmt: skip
    """Return a case of width 256; keys are tables of mixers or keys of `[model]`."""
    model = {"dim": 256, "n_layers": layers, "n_heads": 4, "ffn_hidden_dim": 704,
             "vocab_size": 1024, "mixer_pattern": [mixer], **keys}  # fmt: skip
    return step.Case(name, model, *tokens)


def delta_net(heads: tuple[int, int, int], **options: object) -> step.Case:
    """Return a case of Gated DeltaNet with numbers of key and value heads, and their width."""
    keys, values, width = heads
    net = {"key_heads": keys, "value_heads": values, "key_head_dim": width,
           "value_head_dim": width}  # fmt: skip
    at = case("", "gated_delta_net", gated_delta_net=net, qk_norm=True, norm_unit_offset=True,
              attention_output_gate=True, **options)  # fmt: skip
    name = f"Gated DeltaNet, {values} heads of {width}, {at.batch} x {at.seq} tokens"
    return dataclasses.replace(at, name=name)


_EXPERTS = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 256, "moe_shared_experts": 1,
            "moe_router": "sigmoid_topk", "moe_bias_update": "sign", "moe_bias_update_rate": 0.0,
            "moe_aux_loss_weight": 0.0}  # fmt: skip
_LATENT = {"q_rank": 128, "kv_rank": 64, "nope_head_dim": 64, "rope_head_dim": 32,
           "value_head_dim": 64}  # fmt: skip
_INDEXER = {"index_heads": 8, "index_head_dim": 64, "index_loss_weight": 0.0}
_MAMBA = {"heads": 8, "head_dim": 64, "state_size": 64, "groups": 1, "gated_norm": "none"}
_GEMMA = {
    "n_heads": 2, "n_kv_heads": 2, "head_dim": 64, "norm_eps": 1e-6, "norm_placement": "sandwich",
    "qk_norm": True, "qk_norm_eps": 1e-6, "value_norm": True, "layer_multipliers": True,
    "attention_scale": 1.0, "activation": "gelu_tanh", "gated_mlp": True, "tie_embeddings": True,
    "embedding_multiplier": 16.0, "sliding_window": 128, "rope_theta": 1e6, "local_rope_theta": 1e4,
    "rope_scaling": {"rope_type": "proportional", "factor": 1.0, "rotated_share": 0.25},
    "attention_pattern": ["sliding", "sliding", "full"],
    "mixer_pattern": ["attention", "attention", "global_attention"],
    "global_attention": {"head_dim": 128},
}  # fmt: skip
CASES = (
    delta_net((2, 4, 64)),
    delta_net((1, 2, 128)),
    delta_net((8, 8, 32)),
    delta_net((2, 4, 64), tokens=(1, 2048)),
    case("Kimi Delta Attention, 4 heads of 64, 8 x 256 tokens", "kimi_delta_attention",
         kimi_delta_attention={"heads": 4, "head_dim": 64}, rope_pattern=[False], **_EXPERTS),
    case("latent attention with experts, 8 x 256 tokens", "latent_attention",
         latent_attention=_LATENT, **_EXPERTS),
    case("sparse attention with experts, 128 of 8 x 512 tokens", "latent_attention", (8, 512),
         latent_attention={**_LATENT, **_INDEXER, "index_top_k": 128}, **_EXPERTS),
    case("short convolutions, 8 x 256 tokens", "short_convolution", qk_norm=True),
    case("attention and Mamba-2 in a layer, 8 x 256 tokens", "attention+mamba2", mamba2=_MAMBA),
    case("Gemma 4, shared keys, embeddings of layers, 8 x 256 tokens", "attention", layers=6,
         n_kv_shared_layers=3, layer_embedding_dim=64, **_GEMMA),
)  # fmt: skip
QUICK = delta_net((2, 4, 16), tokens=(2, 128), layers=1)


def of_transformers(model: ModelConfig) -> nn.Module:
    """Return the model of transformers with the same layers."""
    family = FAMILIES[select_family(model)]
    torch.manual_seed(0)
    keys = {**family.keys(model), "use_cache": False, "pad_token_id": None}
    keys.pop("time_step_limit", None)  # infinity has another form in files
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family.model_type].from_dict(keys))


def peer_step(at: step.Case) -> Callable[[], None]:
    """Return an update of the model of transformers with fused AdamW and clipping."""
    model = of_transformers(step.job(at).model)
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens = torch.tensor(step.tokens_and_labels(at)[0], dtype=torch.long)

    def update() -> None:
        model(tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def compare(at: step.Case, rounds: int) -> results.Row:
    """Return the CPU milliseconds of an update of both."""
    seconds = moe.measure({"ours": step.jax_step(at), "theirs": peer_step(at)}, rounds)
    ours, theirs = (round(1e3 * seconds[name][1]) for name in ("ours", "theirs"))
    return results.Row(at.name, ours, "transformers", theirs,
                       "ms of one core", smaller_is_better=True)  # fmt: skip


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX and torch start threads
    torch.set_num_threads(1)
    host_memory.keep_freed_memory()  # as a run does
    cases = [at for at in ((QUICK,) if args.quick else CASES) if args.cases in at.name]
    rows = [compare(at, 3 if args.quick else 7) for at in cases]
    is_whole = not args.quick and not args.cases
    results.report("mixers", rows, ("jax", "torch", "transformers"), write=is_whole)


if __name__ == "__main__":
    main()
