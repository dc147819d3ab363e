"""The largest attention logit of a batch: `metrics.max_attention_logit_interval`.

Growing logits announce a divergence. Megatron reads the largest one from its fused kernel; here a
forward pass on the batch and the weights of the step computes it, before the step.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxforge.config.eval import MAX_LOGITS
from jaxforge.errors import UserError
from jaxforge.model.layer import Capture
from jaxforge.model.transformer import Model, Params
from jaxforge.step.context import spread_sequences
from jaxforge.step.update_loss import Batch
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.health.watchdog import Watchdog


class AttentionLogits:
    """The largest logit over all layers, heads and visible keys of a batch.

    Args:
        interval: `metrics.max_attention_logit_interval`.
    """

    def __init__(self, interval: int, model: Model, mesh: Mesh) -> None:
        self._interval = interval
        self._compute = jax.jit(
            functools.partial(_largest_logit, model),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )

    def log_if_due(
        self, number: int, params: Params, batch: Batch, tracker: Tracker, watchdog: Watchdog
    ) -> None:
        """Log the largest logit of a step before the step replaces its parameters."""
        if number % self._interval:
            return
        with (
            tracker.paused(),
            watchdog.section("evaluation"),
            watchdog.naming("measuring attention logits"),
        ):
            tracker.note_attention_logit(number, self.measure(params, batch))

    def measure(self, params: Params, batch: Batch) -> float:
        """Return the largest logit. Collective; waits for the devices.

        Raises:
            UserError: the model does not provide its logits.
        """
        return float(self._compute(params, batch))


def _largest_logit(model: Model, params: Params, batch: Batch) -> Float[Array, ""]:
    def of_microbatch(microbatch: Batch) -> Float[Array, ""]:
        _, out = model.forward(params, microbatch, capture=Capture((MAX_LOGITS,)))
        # A registered model may leave captures out; models without attention have no logits.
        if MAX_LOGITS not in out.activations:
            raise UserError(
                f'model.model_type = "{model.config.model_type}" does not provide its attention '
                "logits. Remove metrics.max_attention_logit_interval"
            )
        return jnp.max(model.stack.unstack(out.activations[MAX_LOGITS]))

    return jnp.max(jax.lax.map(of_microbatch, spread_sequences(model, batch)))
