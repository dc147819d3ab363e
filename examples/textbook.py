"""A complete training loop around `jaxforge.Program`, in a hundred lines.

    python examples/textbook.py RUN_DIRECTORY [--train.max_steps=500 ...]

The script trains a small byte-level model on the source of a module of Python's library. It has a
cosine schedule with warm-up, evaluates, and keeps the newest and the best checkpoint. You can stop
it at any time. The same command then resumes from the newest checkpoint, and the losses are
bit-identical to those of an uninterrupted run. It uses all devices, also of several processes. The
mesh (`--distributed.tp=2`) and gradient accumulation (`--train.grad_accum_steps=2`) are settings.
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

BATCH_SIZE = 16  # sequences per update, over all devices

SETTINGS = [
    "--model.dim=64", "--model.n_layers=2", "--model.n_heads=4", "--model.vocab_size=256",
    "--model.max_seq_len=64", "--train.seq_len=64", "--train.max_steps=200",
    f"--train.global_batch_size={BATCH_SIZE}", "--train.grad_clip_norm=1.0",
    # The learning rate grows linearly with the batch size: 1.5e-3 is for 8 sequences.
    f"--optimizer.lr={1.5e-3 * BATCH_SIZE / 8}", "--optimizer.weight_decay=0.01",
    "--optimizer.betas=[0.9, 0.95]",
    "--scheduler.name=cosine", "--scheduler.warmup_steps=20", "--scheduler.min_lr_ratio=0.1",
    "--eval.enabled=true", "--eval.interval=50", "--checkpoint.interval=25",
    "--checkpoint.keep_last_n=1", "--checkpoint.keep_best_n=1", "--metrics.log_interval=10",
]  # fmt: skip


def main(
    directory: Path, overrides: Sequence[str] = (), log: Callable[[str], None] = print
) -> None:
    """Train in a run directory, from its newest checkpoint if there is one.

    Args:
        directory: run directory, for data and checkpoints.
        overrides: settings that override `SETTINGS`, such as "--train.max_steps=500".
        log: receives each line of the log.
    """
    own_loop.initialize()
    write_dataset(inspect.getsource(inspect).encode(), directory)
    paths = [
        f"--data.dataset_path={directory / 'train'}",
        f"--eval.dataset_path={directory / 'val'}",
        f"--checkpoint.dir={directory}",
    ]
    program = jf.Program(jf.load_config(None, [*SETTINGS, *paths, *overrides]))
    with program.context():
        train(program, log if jax.process_index() == 0 else lambda line: None)


def write_dataset(text: bytes, directory: Path) -> None:
    """Write a text as token shards, one token per byte; the last tenth is for evaluation."""
    tokens = np.frombuffer(text, np.uint8)
    split = len(tokens) * 9 // 10
    for name, part in (("train", tokens[:split]), ("val", tokens[split:])):
        (directory / name).mkdir(parents=True, exist_ok=True)
        temporary = directory / name / f"temporary.{jax.process_index()}"
        with temporary.open("wb") as file:
            np.save(file, part)
        temporary.replace(directory / name / "bytes.npy")  # atomic: other processes read it


def train(program: jf.Program, log: Callable[[str], None]) -> None:
    """Train until `train.max_steps`."""
    config = program.config
    evaluate = own_loop.open_evaluator(program)
    checkpoints = own_loop.open_checkpoints(program)
    # `progress` counts finished updates and holds the position in the data.
    state, progress = own_loop.starting_state(program, checkpoints)
    batches = own_loop.open_batches(program, progress)
    lr, is_save_due = own_loop.learning_rate(config), own_loop.SavePolicy(config)
    for batch in batches:  # repeats the data as often as `train.max_steps` needs
        step = progress.step
        state, metrics = program.step(state, batch, own_loop.Controls())
        progress.advance(BATCH_SIZE, BATCH_SIZE * config.train.seq_len)
        if step % config.metrics.log_interval == 0:  # reading metrics waits for the device
            result = own_loop.StepResult(metrics, config.train)
            log(
                f"step {step:6d}  lr {lr(step):.2e}  loss {result.loss_dict['lm loss']:.4f}  "
                f"|g| {result.grad_norm:.3f}"
            )
            if result.should_exit:
                raise SystemExit(result.exit_code)
        is_last = progress.step == config.train.max_steps
        scores = {}
        if progress.step % config.eval.interval == 0 or is_last:
            scores = own_loop.summary(evaluate(state.params))  # a mean over all tokens of the set
            log(f"  val loss {scores['eval/loss']:.4f}")
        if scores or is_save_due(progress.step) or is_last:
            checkpoints.save(progress, state, scores)  # writes while training continues
    checkpoints.close()


def run() -> int:
    """Read the command line and train; return the exit code."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise UserError("a run directory is required: textbook.py RUN_DIRECTORY [settings]")
    main(Path(sys.argv[1]), sys.argv[2:])
    return 0


if __name__ == "__main__":
    raise SystemExit(own_loop.run_main(run))
