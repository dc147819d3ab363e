"""Loss over a held-out set: token-weighted, the same batches every time, on any mesh."""

import itertools
import math
from collections.abc import Callable, Iterable

import jax

from jaxforge.config.train import TrainConfig
from jaxforge.model.transformer import Model, Params
from jaxforge.training.loss import LossSum
from jaxforge.training.step import Batch, loss_sum

_MAX_EXPONENT = 20.0  # perplexity is exp(min(loss, 20)), as in KempnerForge

EvalStep = Callable[[LossSum, Params, Batch], LossSum]


def make_eval_step(model: Model, config: TrainConfig) -> EvalStep:
    """The jitted `(sums so far, params, batch [1, batch, seq]) -> sums`."""

    @jax.jit
    def eval_step(total: LossSum, params: Params, batch: Batch) -> LossSum:
        microbatch = jax.tree.map(lambda leaf: leaf[0], batch)
        return total.plus(loss_sum(model, config, params, microbatch))

    return eval_step


def evaluate(
    eval_step: EvalStep, params: Params, batches: Iterable[Batch], steps: int
) -> dict[str, float]:
    """`eval/loss` (nats per valid token) and `eval/perplexity` over at most `steps` batches."""
    total = LossSum.zero()
    for batch in itertools.islice(batches, steps):
        total = eval_step(total, params, batch)
    total = jax.device_get(total)
    loss = float(total.total / total.weight) if total.weight else math.nan
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, _MAX_EXPONENT))}
