"""Metrics of experts, `moe/*`: the distribution of the tokens of a step over experts."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxforge.telemetry.sinks import Metrics

ROUTER_OUTPUTS = (
    "expert_counts",
    "aux_loss",
    "router_z",
    "router_entropy",
    "router_bias",
    "dropped",
)
"""Outputs of the router of every layer (`model.router`)."""
LOAD = "moe/load/layers."
"""Prefix of the list of loads of a layer."""


def moe_metrics(outputs: Mapping[str, Any]) -> Metrics:
    """Return the metrics of routers; empty without experts.

        moe/aux_loss          Σ over layers of E Σ f p, before its weight; 1 each at an even load
        moe/router_z_loss     Σ over layers of mean (log Σ exp logit)², before its weight
        moe/expert_balance    load of the least loaded expert / most loaded, over all layers
        moe/dropped           share of the assignments beyond the capacity of their expert
        moe/balance/…         the same ratio of loads within each layer
        moe/router_entropy/…  mean entropy of each layer's scores, nats
        moe/router_bias/…     the largest bias of each layer, if routers have biases
        moe/load/…            list of the assignments of each expert, relative to an even load

    Args:
        outputs: values by the names of `ROUTER_OUTPUTS`, one row for each layer; NaN or 0 for
            layers without experts.
    """
    if "expert_counts" not in outputs:
        return {}
    counts_LE = np.asarray(outputs["expert_counts"], np.float64)
    layers = np.flatnonzero(counts_LE.sum(axis=1))
    means = {
        name: np.asarray(outputs[name], np.float64)
        for name in ROUTER_OUTPUTS[1:]
        if name in outputs
    }
    metrics: Metrics = {
        "moe/aux_loss": float(means["aux_loss"][layers].sum()),
        "moe/router_z_loss": float(means["router_z"][layers].sum()),
        "moe/expert_balance": _balance(counts_LE[layers]),
        "moe/dropped": float(means["dropped"][layers].mean()),
    }
    for layer in layers.tolist():
        metrics[f"moe/balance/layers.{layer}"] = _balance(counts_LE[layer])
        for name in ("router_entropy", "router_bias"):
            if name in means:
                metrics[f"moe/{name}/layers.{layer}"] = float(means[name][layer])
        load_E = counts_LE[layer] / counts_LE[layer].mean()
        metrics[f"{LOAD}{layer}"] = load_E.round(3).tolist()
    return metrics


def _balance(counts: Float[np.ndarray, "..."]) -> float:
    return float(counts.min() / counts.max()) if counts.size else float("nan")
