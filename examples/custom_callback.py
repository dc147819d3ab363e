"""Write a callback: print the gradient norm of each layer and the duration of evaluations.

    python examples/custom_callback.py --config configs/debug.toml [--section.key=value ...]

The run directory is runs/custom_callback. Change it with --checkpoint.dir.
"""

import sys
import time

import jax

import jaxforge as jf
from jaxforge.cli.running import run_main
from jaxforge.commands.train import parse_command_line
from jaxforge.training.callbacks.callback import EvalContext, StepContext


class LayerNorms(jf.Callback):
    """Print gradient norms and the duration of evaluations.

    Args:
        interval: number of steps between two lines. Reading a value waits for the device, so do
            not read values at every step.
    """

    collect = ("grad_norms_per_layer",)  # an additional output of every step

    def __init__(self, interval: int = 10) -> None:
        self._interval = interval
        self._eval_start = 0.0

    def on_step_end(self, context: StepContext) -> None:
        """Print the norms."""
        if context.step % self._interval:
            return
        # Every process must read the value, because it may be spread over their devices.
        norms = jax.device_get(context.metrics["grad_norms_per_layer"]["layers"])
        if jax.process_index() == 0:
            print(f"step {context.step}: |g| of layers", *(f"{norm:.3f}" for norm in norms))

    def on_eval_begin(self, step: int) -> None:
        """Start the clock."""
        self._eval_start = time.perf_counter()

    def on_eval_end(self, metrics: dict[str, float], step: int, context: EvalContext) -> None:
        """Print the duration of the evaluation."""
        print(f"step {step}: evaluated in {time.perf_counter() - self._eval_start:.1f} s")


def main() -> int:
    """Train with the callback; return the exit code."""
    config = parse_command_line(["--checkpoint.dir=runs/custom_callback", *sys.argv[1:]])
    return jf.fit(config, callbacks=[LayerNorms()]).code


if __name__ == "__main__":
    raise SystemExit(run_main(main))
