"""Summaries of epochs: `epoch/*`, logged at the step with which an epoch of the data ends."""

from jaxforge.telemetry.sinks import Metrics


def epoch_summary(epoch: int, steps: int, seconds: float, interval: Metrics) -> Metrics:
    """Return the metrics of an epoch.

    After a restart or a rollback within an epoch they cover the steps since then.

    Args:
        epoch: number of complete epochs.
        steps: number of steps in the summary.
        seconds: time of these steps, without pauses.
        interval: `Sums.since` of these steps.
    """
    names = {"interval/loss": "epoch/loss", "interval/skipped_steps": "epoch/skipped_steps"}
    sums = {names[name]: value for name, value in interval.items() if name in names}
    return {
        "epoch/number": float(epoch),
        **sums,
        "epoch/steps": float(steps),
        "epoch/time_sec": seconds,
    }


def describe_epoch(step: int, summary: Metrics) -> str:
    """Return the log message of an epoch; without a loss if no update was applied."""
    loss = f"mean loss {summary['epoch/loss']:.4f}, " if "epoch/loss" in summary else ""
    return (
        f"epoch {summary['epoch/number']:.0f} ended at step {step}: {loss}"
        f"{summary['epoch/steps']:.0f} steps, {summary['epoch/skipped_steps']:.0f} skipped, "
        f"{summary['epoch/time_sec']:.1f} s"
    )
