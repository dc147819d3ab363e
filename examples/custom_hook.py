"""A hook of your own: which layers have the largest gradients, and how long evaluation takes.

    python examples/custom_hook.py --config configs/debug.toml [--section.key=value ...]

The run directory is runs/custom_hook, unless --checkpoint.dir names another.
"""

import sys
import time

import jax
from jaxforge.training.hooks import Hook, StepContext

from jaxforge.cli.running import run_main
from jaxforge.commands.train import parse_command_line, run


class LayerNorms(Hook):
    """Prints the gradient norm of each layer.

    Args:
        interval: steps between lines; reading what is on the device waits for it.
    """

    collect = ("grad_norms_per_layer",)

    def __init__(self, interval: int = 10) -> None:
        self._interval = interval
        self._began = 0.0

    def on_step_end(self, context: StepContext) -> None:
        """Only process 0 prints; every process must read alike."""
        if context.step % self._interval:
            return
        norms = jax.device_get(context.metrics["grad_norms_per_layer"]["layers"])
        if jax.process_index() == 0:
            print(f"step {context.step}: |g| of layers", *(f"{norm:.3f}" for norm in norms))

    def on_eval_begin(self, step: int) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
        """Stop the clock."""
        print(f"step {step}: evaluated in {time.perf_counter() - self._began:.1f} s")


def main() -> int:
    """Trains as `python -m jaxforge.train` does, with the hook."""
    config = parse_command_line(["--checkpoint.dir=runs/custom_hook", *sys.argv[1:]])
    return run(config, hooks=[LayerNorms()]).code


if __name__ == "__main__":
    raise SystemExit(run_main(main))
