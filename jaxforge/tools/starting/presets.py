"""Preset configs for kinds of machines, for any data: `jaxforge init --preset NAME`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxforge.config.model import ModelConfig
from jaxforge.tools.starting.sizes import SHAPES, parameters
from jaxforge.tools.starting.sizing import TOKENS_PER_PARAMETER


class Preset(NamedTuple):
    """Preset config without data.

    Attributes:
        about: description in one line.
        devices: number of devices.
        machine: description of the machine.
        model: settings of `[model]`.
        seq_len: tokens of a sequence.
        batch: sequences of an update.
        accum: microbatches of an update.
        lr: peak learning rate.
        is_on_cpu: for CPUs, which are fastest in float32.
        distributed: settings of `[distributed]`, except dp_shard, which takes all other devices.
        active: active parameters per token of a mixture of experts.
        steps: number of updates, if 20 tokens per parameter would take too long.
    """

    about: str
    devices: int
    machine: str
    model: Mapping[str, Any]
    seq_len: int
    batch: int
    accum: int
    lr: float
    is_on_cpu: bool = False
    distributed: Mapping[str, int] = {}
    active: int | None = None
    steps: int | None = None

    @property
    def parameters(self) -> int:
        """Parameters of the model with the preset's vocabulary."""
        return parameters(ModelConfig(**self.model))

    @property
    def max_steps(self) -> int:
        """Number of updates: `steps`, or for 20 tokens per active parameter."""
        if self.steps is not None:
            return self.steps
        tokens = TOKENS_PER_PARAMETER * (self.active or self.parameters)
        return round(tokens / (self.batch * self.seq_len))


_LLAMA_3 = {"vocab_size": 128256, "rope_theta": 500000.0, "max_seq_len": 4096}

PRESETS: Mapping[str, Preset] = {
    "tiny": Preset(
        "the quickstart's shape, for ten minutes or so",
        1, "a CPU",
        {**SHAPES[1]._asdict(), "vocab_size": 4096, "max_seq_len": 256, "tie_embeddings": True},
        256, 8, 1, 2e-3, is_on_cpu=True, steps=1000,
    ),
    "124m": Preset(
        "the shape of GPT-2 small, with Llama's blocks",
        1, "a GPU of 24 GB or more",
        {"dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12, "ffn_hidden_dim": 2048,
         "vocab_size": 50304, "max_seq_len": 1024, "tie_embeddings": True},
        1024, 512, 32, 6e-4,
    ),
    "1b": Preset(
        "the shape of Llama 3.2 1B",
        8, "a node of 8 GPUs of 80 GB",
        {**SHAPES[8]._asdict(), "n_layers": 16, "ffn_hidden_dim": 8192, **_LLAMA_3,
         "tie_embeddings": True},
        4096, 256, 4, 3e-4,
    ),
    "7b": Preset(
        "the shape of Mistral 7B",
        8, "a node of 8 GPUs of 80 GB, or several",
        {**SHAPES[10]._asdict(), "ffn_hidden_dim": 14336, "vocab_size": 32000,
         "max_seq_len": 4096},
        4096, 1024, 64, 3e-4,
    ),
    "moe": Preset(
        "the shape of OLMoE: 7B parameters, 1.3B of them active",
        8, "a node of 8 GPUs of 80 GB",
        {"dim": 2048, "n_layers": 16, "n_heads": 16, "n_kv_heads": 16, "ffn_hidden_dim": 1024,
         "vocab_size": 50304, "max_seq_len": 4096, "qk_norm": True, "num_experts": 64,
         "moe_top_k": 8, "moe_expert_dim": 1024, "moe_router_z_loss_weight": 1e-3},
        4096, 1024, 32, 4e-4, distributed={"ep": 8}, active=1_280_000_000,
    ),
}  # fmt: skip
"""Presets by name, from small to large."""
