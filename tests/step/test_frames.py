"""The number of the project's own stack frames between a train step and a matrix product."""

import traceback
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxforge
from tests.conftest import tiny_config
from tests.helpers import lowered, new_setup

PACKAGE = Path(jaxforge.__file__).parent
MOST = 10
FULL, SELECTIVE = ({"activation_checkpointing": save} for save in ("full", "selective"))
MICROBATCHES = {"grad_sync": "microbatch", "grad_accum_steps": 2, "mixed_precision": "bf16"}
FP8 = {
    "mixed_precision": "fp8", "fp8_scaling": "delayed",
    "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 1,
}  # fmt: skip
KINDS = {"n_layers": 3, "sliding_window": 5, "attention_pattern": ("full", "sliding", "full")}


def stacks_of_query_products(config, monkeypatch):
    """Return own frames between `train_step` and the product of each traced query projection.

    The first product inside of attention is that of the query projection. Functions that multiply
    (`_product` of linear layers, all of `kernels/fp8.py`) count as the product.
    """
    stacks, einsum = [], jnp.einsum

    def recording_einsum(*args, **kwargs):
        frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(PACKAGE)]
        paths = [str(Path(frame.filename).relative_to(PACKAGE)) for frame in frames]
        calls = [(path, f.name, f.line) for path, f in zip(paths, frames, strict=True)]
        first = next((i for i, (_, name, _) in enumerate(calls) if name == "train_step"), None)
        last = [i for i, (path, name, _) in enumerate(calls)
                if path == "model/linear.py" and name == "__call__"]  # fmt: skip
        if first is not None and last and any("self.q_proj(" in line for *_, line in calls):
            stacks.append([f"{path}:{name}" for path, name, _ in calls[first + 1 : last[0] + 1]])
        return einsum(*args, **kwargs)

    monkeypatch.setattr(jnp, "einsum", recording_einsum)
    lowered(new_setup(config))
    return stacks


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"train": {**MICROBATCHES, **FULL}, "model": KINDS, "distributed": {"dp_shard": 2}},
        pytest.param(
            {"train": SELECTIVE, "distributed": {"dp_shard": 2, "tp": 2}}, marks=pytest.mark.slow
        ),
        pytest.param({"train": {**FULL, **FP8}}, marks=pytest.mark.slow),
        pytest.param({"distributed": {"pp": 2, "dp_shard": 2}}, marks=pytest.mark.slow),
        {"train": {**FULL, **FP8}, "distributed": {"pp": 2}},
    ],
    ids=["one device", "kinds of layers, full", "dp x tp, selective", "fp8", "pp x dp", "pp, fp8"],
)
def test_query_product_is_at_most_ten_frames_below_train_step(sections, monkeypatch):
    stacks = stacks_of_query_products(tiny_config(**sections), monkeypatch)
    assert stacks
    deepest = max(stacks, key=len)
    assert len(deepest) <= MOST, "\n".join(deepest)
