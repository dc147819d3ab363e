"""Runs that are exported in pipeline stages."""

import numpy as np

from jaxforge.state.progress import Progress
from tests.conftest import tiny_config
from tests.torch_compat.tensors import random_array
from torch_compat.checkpoint import orbax_store
from torch_compat.checkpoint.state import CheckpointState, abstract_target
from torch_compat.formats.lazy import from_array

MODEL = {"dim": 32, "n_layers": 5, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 48,
         "ffn_hidden_dim": 40, "max_seq_len": 32}  # fmt: skip


def write_run(directory, optimizer="adamw", seed=0, model=None):
    """A run directory at step 3 in which no two values are alike."""
    scheduler = {"name": "none"} if optimizer.startswith("schedule_free") else {}
    config = tiny_config(
        model=MODEL | (model or {}), optimizer={"name": optimizer}, scheduler=scheduler
    )
    declared = abstract_target(config)
    seeds = iter(range(1000 * seed, 1000 * seed + 1000))

    def random(shapes):
        arrays = {n: random_array("float32", shape, next(seeds)) for n, shape in shapes.items()}
        return {name: from_array(array) for name, array in arrays.items()}

    weight_sum = 3 * config.optimizer.lr * (1 - config.optimizer.betas[0])
    scalars = {"updates": np.int32(3), "weight_sum": np.float32(weight_sum)}
    checkpoint = CheckpointState(
        params=random(declared.params),
        moments={field: random(shapes) for field, shapes in declared.moments.items()},
        scalars={name: np.asarray(scalars[name]) for name in declared.scalars},
        progress=Progress(step=3, samples=24, tokens=768),
    )
    writer = orbax_store.stage(checkpoint, declared, directory, {}, 1 << 20)
    with writer.staging:
        writer.staging.write(writer.units, lambda nbytes: None)
        writer.commit()
    (directory / "config.toml").write_text(config.to_toml())
    return directory
