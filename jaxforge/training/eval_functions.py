"""Evaluation functions: sums over evaluation sets that are logged, and not part of a loss.

`register_eval_function` adds a function of your own; `eval.functions` selects functions by name.
"""

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxforge.aux_outputs import Max, Mean, Metric
from jaxforge.config.eval import AVERAGE_PREFIX, EVAL_FUNCTIONS, METRICS
from jaxforge.config.train import TrainConfig
from jaxforge.data.packing import IGNORE
from jaxforge.errors import UserError
from jaxforge.model.transformer import Batch, Model, Params

EvalFunction = Callable[
    [Params, Float[Array, "b s d"], Batch], Array | Mean | Mapping[str, Array | Mean]
]
"""(parameters, final hidden states, batch) -> sums over the batch.

The arrays are whole, on any mesh. The batch has `labels` [b, s] and all other fields of the data.
Labels of tokens that do not count, and of rows that fill the last batch, are -100.
"""

EvalFunctionBuilder = Callable[[TrainConfig, Model], EvalFunction]
"""(the `[train]` section, the model) -> evaluation function."""


def register_eval_function(
    name: str,
) -> Callable[[EvalFunctionBuilder], EvalFunctionBuilder]:
    """Return a decorator that registers the builder of a function for `eval.functions`.

    The function returns a sum, a `Mean` (two sums), or several of them by name. They are added over
    the batches of a set and logged as `eval/<set>/<name>`, and over all sets as `eval/<name>`.

    Args:
        name: name of the function in the config, and of its result if it returns a single one.
    """
    return EVAL_FUNCTIONS.register(name)


def build_eval_functions(
    names: Sequence[str], config: TrainConfig, model: Model
) -> Callable[[Params, Float[Array, "b s d"], Batch], dict[str, Array | Mean]]:
    """Return a function that computes the sums of all functions by name.

    Raises:
        UserError: a function is not registered. When called: two functions return the same name, or
            a function returns the name of a built-in metric or a maximum.
    """
    # Names of metrics of the average are taken as well.
    averaged = [AVERAGE_PREFIX + name for name in METRICS]
    functions = {name: EVAL_FUNCTIONS[name](config, model) for name in names}

    def evaluate(
        params: Params, hidden: Float[Array, "b s d"], batch: Batch
    ) -> dict[str, Array | Mean]:
        sums: dict[str, Array | Mean] = {}
        for function_name, function in functions.items():
            result = function(params, hidden, batch)
            by_name = dict(result) if isinstance(result, Mapping) else {function_name: result}
            for name, value in by_name.items():
                _check(name, value, function_name, {*METRICS, *averaged, *sums})
            sums |= by_name
        return sums

    return evaluate


def add_sums(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the sums of two parts of a set; no numbers stand for an empty part."""
    # A set that was stopped before its first batch has no sums.
    if not first or not second:
        return [*first, *second]
    return [a + b for a, b in zip(first, second, strict=True)]


def sums_of(value: Array | Mean) -> list[float]:
    """Return the numbers of a result that are added over batches."""
    return [float(part) for part in (value if isinstance(value, Mean) else (value,))]


def value_of(sums: Sequence[float]) -> float:
    """Return the logged value of a sum or of the two sums of a mean; NaN without weight."""
    if len(sums) == 1:
        return sums[0]
    total, weight = sums
    return total / weight if weight else float("nan")


def _check(name: str, value: Metric, function_name: str, taken: set[str]) -> None:
    """Check a result of a function.

    Raises:
        UserError: the name is taken, or the result is a maximum.
    """
    if name in taken:
        raise UserError(
            f'eval.functions: "{function_name}" returns "{name}", which another metric of '
            "evaluation is named. Choose another name"
        )
    if isinstance(value, Max):
        raise UserError(
            f'eval.functions: "{function_name}" returns a maximum as "{name}". Return a sum or a '
            "Mean"
        )


@register_eval_function("accuracy")
def _accuracy(config: TrainConfig, model: Model) -> EvalFunction:
    """Build the share of valid tokens to which the model gives the highest probability."""

    def accuracy(params: Params, hidden: Float[Array, "b s d"], batch: Batch) -> Mean:
        labels = batch["labels"]
        is_hit = jnp.argmax(model.logits(params, hidden), axis=-1) == labels
        return Mean(jnp.sum(is_hit), jnp.sum(labels != IGNORE))

    return accuracy
