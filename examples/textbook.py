"""The textbook training loop, without its traps.

    python examples/textbook.py RUN_DIRECTORY [--train.max_steps=500 ...]

A small model learns the bytes of a file of Python's own source: cosine schedule with warm-up,
evaluation, the best and the newest checkpoint. Stop it whenever you like: the same command goes on
from the newest checkpoint, with the same losses as if it had never stopped. It runs on as many
devices as there are, and in several processes; sharding is a setting (`--distributed.tp=2`), and so
is accumulation (`--train.grad_accum_steps=2`).
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

import jaxforge as jf
from jaxforge.errors import UserError
from jaxforge.training import own_loop

BATCH = 16  # sequences of an update, over all devices

SETTINGS = [
    "--model.dim=64", "--model.n_layers=2", "--model.n_heads=4", "--model.vocab_size=256",
    "--model.max_seq_len=64", "--train.seq_len=64", "--train.max_steps=200",
    f"--train.global_batch_size={BATCH}", "--train.grad_clip_norm=1.0",
    # A rate for batches of 8, scaled in proportion; its floor is a share of it, and so scales too.
    f"--optimizer.lr={1.5e-3 * BATCH / 8}", "--optimizer.weight_decay=0.01",
    "--optimizer.betas=[0.9, 0.95]",
    "--scheduler.name=cosine", "--scheduler.warmup_steps=20", "--scheduler.min_lr_ratio=0.1",
    "--eval.enabled=true", "--eval.interval=50", "--checkpoint.interval=25",
    "--checkpoint.keep_last_n=1", "--checkpoint.keep_best_n=1", "--metrics.log_interval=10",
]  # fmt: skip


def main(
    directory: Path, overrides: Sequence[str] = (), write: Callable[[str], None] = print
) -> None:
    """Trains in `directory`, from its newest checkpoint if it has one.

    Args:
        directory: for data and checkpoints.
        overrides: settings over those above, such as "--train.max_steps=500".
        write: takes each line of the log.
    """
    own_loop.initialize()
    write_bytes(inspect.getsource(inspect).encode(), directory)
    paths = [
        f"--data.dataset_path={directory / 'train'}",
        f"--eval.dataset_path={directory / 'val'}",
        f"--checkpoint.dir={directory}",
    ]
    program = jf.Program(jf.load_config(None, [*SETTINGS, *paths, *overrides]))
    with program.context():
        train(program, write if jax.process_index() == 0 else lambda line: None)


def write_bytes(text: bytes, directory: Path) -> None:
    """Token shards of a text, a byte a token; its last tenth is for evaluation."""
    tokens = np.frombuffer(text, np.uint8)
    end = len(tokens) * 9 // 10
    for name, part in (("train", tokens[:end]), ("val", tokens[end:])):
        (directory / name).mkdir(parents=True, exist_ok=True)
        partial = directory / name / f"partial.{jax.process_index()}"
        with partial.open("wb") as file:
            np.save(file, part)
        partial.replace(directory / name / "bytes.npy")  # whole, whichever process looks


def train(program: jf.Program, write: Callable[[str], None]) -> None:
    """Trains to `train.max_steps`."""
    config = program.config
    evaluate = own_loop.open_evaluator(program)
    checkpoints = own_loop.open_checkpoints(program)
    # Step, moments, place in the data: a checkpoint holds all of it, and counts finished updates.
    state, progress = own_loop.starting_state(program, checkpoints)
    batches = own_loop.open_batches(program, progress)
    rate, is_due = own_loop.learning_rate(config), own_loop.SavePolicy(config)
    for batch in batches:  # epochs go by in them
        step = progress.step  # this update's, counted from 0
        state, metrics = program.step(state, batch, own_loop.Controls())
        progress.advance(BATCH, BATCH * config.train.seq_len)
        if step % config.metrics.log_interval == 0:  # only then is the device waited for
            result = own_loop.StepResult(metrics, config.train)
            write(
                f"step {step:6d}  lr {rate(step):.2e}  loss {result.loss_dict['lm loss']:.4f}  "
                f"|g| {result.grad_norm:.3f}"
            )
            if result.should_exit:
                raise SystemExit(result.exit_code)
        is_last = progress.step == config.train.max_steps
        scores = {}
        if progress.step % config.eval.interval == 0 or is_last:
            # Each device evaluates its part, and every token counts once.
            scores = own_loop.summary(evaluate(state.params))
            write(f"  val loss {scores['eval/loss']:.4f}")
        if scores or is_due(progress.step) or is_last:
            checkpoints.save(progress, state, scores)  # while training goes on
    checkpoints.close()


def command() -> int:
    """Read the command line, and train."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise UserError("name a run directory: textbook.py RUN_DIRECTORY [--train.max_steps=500]")
    main(Path(sys.argv[1]), sys.argv[2:])
    return 0


if __name__ == "__main__":
    raise SystemExit(own_loop.run_main(command))
