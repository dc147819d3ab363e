"""Steps of `train.objective` with a frozen model, for tests."""

import jax
import numpy as np
import torch

from jaxforge.model.transformer import Model, join
from jaxforge.parallel.sharding import batch_shardings
from jaxforge.step.frozen_model import FrozenModel, frozen_config
from jaxforge.step.train_step import Controls
from tests.conftest import tiny_config
from tests.helpers import setup
from tests.step.torch_decoder import adamw, named

SEQ, LR, DECAY = 32, 1e-2, 0.1
MODEL = {"dim": 32, "vocab_size": 64, "init_std": 0.2, "ffn_hidden_dim": 48}
TRAIN = {"seq_len": SEQ, "batch_size": 4, "grad_accum_steps": 2}


def job(objective, *, model=None, train=None, axes=None, **sections):
    axes = axes or {}
    groups = axes.get("dp_shard", 1) * axes.get("dp_replicate", 1) * axes.get("ep", 1)
    return tiny_config(
        model={**MODEL, **(model or {})},
        train={**TRAIN, "batch_size": 4 // groups, "objective": objective, **(train or {})},
        optimizer={"lr": LR, "weight_decay": DECAY},
        scheduler={"name": "none", "warmup_steps": 0},
        checkpoint={"load_path": "reference"},
        data={"dataset_path": "data"},
        distributed={"dp_shard": 1, **axes},
        **sections,
    )


class FrozenSetup:
    """A step and its frozen model.

    Args:
        config: the config of the run.
        frozen: the `[model]` section of the frozen model.
    """

    def __init__(self, config, frozen=None):
        self.program = setup(config, collect=("grads",))
        mesh = self.program.mesh
        self.frozen = FrozenModel(frozen_config(config, frozen), config, mesh, ("cpu", None))
        model = self.frozen.model
        plain = Model(model.config)
        self.params = jax.device_get(plain.init(jax.random.key(7)))

        def placed(tree, like):
            rows = {
                name: jax.tree.map(model.stack.of(name).stack, part)
                if name in model.config.stacks else part
                for name, part in tree.items()
            }  # fmt: skip
            return jax.tree.map(
                lambda x, like: jax.device_put(np.asarray(x, like.dtype), like.sharding), rows, like
            )

        state = placed(jax.device_get(plain.initial_state()), self.frozen.like_state)
        self._params = join(placed(self.params, self.frozen.like), state)
        self._add = jax.jit(self.frozen.add_fields)

    def add_fields(self, batch):
        """Return a batch on the devices, with the fields of the frozen model."""
        batch = {name: np.asarray(x, np.int32) for name, x in batch.items()}
        with self.program.context():
            return self._add(
                self._params, jax.device_put(batch, batch_shardings(self.program.mesh, batch))
            )

    def run(self, batches):
        """Return the metrics of each update, and the parameters after the last, by layer."""
        state, logged, stack = self.program.state(), [], self.program.model.stack
        for batch in batches:
            with_fields = self.add_fields(batch)
            with self.program.context():
                state, metrics = self.program.step(state, with_fields, Controls())
            logged.append(jax.device_get(metrics))
        params = jax.device_get(state.params)
        stacks = self.program.config.model.stacks
        return logged, {
            name: jax.tree.map(lambda x: np.asarray(stack.unstack(x)), part)
            if name in stacks else part
            for name, part in params.items()
        }  # fmt: skip


def follow_torch(frozen_setup, batches, torch_loss):
    """Compare losses, metrics, gradients and parameters of updates with those of PyTorch.

    Args:
        frozen_setup: the step and its frozen model.
        batches: a batch for each update.
        torch_loss: (parameters, frozen parameters, batch) -> loss of the update, metrics by name.
    """
    model = frozen_setup.program.config.model
    frozen, initial = (
        named(tree, model) for tree in (frozen_setup.params, frozen_setup.program.state().params)
    )
    p = {name: x.clone().requires_grad_() for name, x in initial.items()}
    optimizer = adamw(p, LR, DECAY)
    logged, params = frozen_setup.run(batches)
    for batch, of_step in zip(batches, logged, strict=True):
        loss, metrics = torch_loss(p, frozen, batch)
        optimizer.zero_grad()
        loss.backward()
        for name, grad in named(of_step["grads"], model).items():
            expected = p[name].grad
            # Elements are sums of terms as large as the largest, and have the rounding of these.
            rounding = 5e-6 * max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(grad, expected, rtol=1e-4, atol=rounding, msg=name)
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        optimizer.step()
        np.testing.assert_allclose(of_step["loss"], loss.item(), rtol=1e-5, atol=1e-6)
        ours_by_name = {**of_step["side"], **of_step.get("losses", {})}
        for name, value in metrics.items():
            np.testing.assert_allclose(
                ours_by_name[name], value, rtol=1e-4, atol=1e-5, err_msg=name
            )
    for name, x in named(params, model).items():
        torch.testing.assert_close(x, p[name].detach(), rtol=1e-4, atol=2e-4, msg=name)


def check_equal(results, expected):
    """Compare metrics and parameters of two runs."""
    for frozen_setup, reference in zip(results[0], expected[0], strict=True):
        assert frozen_setup["side"].keys() == reference["side"].keys()
        for name in ("loss", "grad_norm", "losses", "side"):
            if name in reference:
                jax.tree.map(
                    lambda x, y, name=name: np.testing.assert_allclose(
                        x, y, rtol=1e-4, atol=1e-5, err_msg=name
                    ),
                    frozen_setup[name], reference[name],
                )  # fmt: skip
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=5e-4), results[1], expected[1]
    )  # of a rate of 1e-2
