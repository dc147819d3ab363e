"""CPU time of an update with Gated DeltaNet layers, compared with transformers on one core.

    python benchmarks/mixers.py [--quick] [--cases WORDS]

Both have a model of Qwen3-Next's layers without experts, float32, AdamW and the same tokens, and
alternate in one process. The process keeps to one core, and CPU time does not depend on the load.
"""

import os
from collections.abc import Callable

import moe
import results
import step
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from jaxforge.config.model import ModelConfig
from jaxforge.parallel import host_memory


def case(name: str, layers: int, ffn: int, heads: tuple[int, int, int], *,
         tokens: tuple[int, int] = (8, 256)) -> step.Case:  # fmt: skip
    """Return a case of width 256; heads are key heads, value heads and their width."""
    net = {"key_heads": heads[0], "value_heads": heads[1], "key_head_dim": heads[2],
           "value_head_dim": heads[2]}  # fmt: skip
    model = {"dim": 256, "n_layers": layers, "n_heads": 4, "ffn_hidden_dim": ffn,
             "vocab_size": 1024, "mixer_pattern": ["gated_delta_net"],
             "gated_delta_net": net}  # fmt: skip
    return step.Case(name, model, *tokens)


CASES = (
    case("4M, 4 heads of 64, 8 x 256 tokens", 4, 704, (2, 4, 64)),
    case("4M, 2 heads of 128, 8 x 256 tokens", 4, 704, (1, 2, 128)),
    case("4M, 8 heads of 32, 8 x 256 tokens", 4, 704, (8, 8, 32)),
    case("4M, 4 heads of 64, 1 x 2048 tokens", 4, 704, (2, 4, 64), tokens=(1, 2048)),
)
QUICK = case("1M, 4 heads of 16, 2 x 128 tokens", 1, 256, (2, 4, 16), tokens=(2, 128))


def of_transformers(model: ModelConfig) -> nn.Module:
    """Return the model of transformers with the same layers."""
    net, layers = model.gated_delta_net, model.n_layers
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        Qwen3NextConfig(
            vocab_size=model.vocab_size, hidden_size=model.dim, intermediate_size=model.ffn_dim,
            num_hidden_layers=layers, layer_types=["linear_attention"] * layers,
            mlp_only_layers=list(range(layers)), use_cache=False,
            linear_num_key_heads=net.key_heads, linear_num_value_heads=net.value_heads,
            linear_key_head_dim=net.key_head_dim, linear_value_head_dim=net.value_head_dim,
            linear_conv_kernel_dim=net.conv_size,
        )
    )  # fmt: skip


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
    return results.Row(f"Gated DeltaNet, {at.name}", ours, "transformers", theirs,
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
