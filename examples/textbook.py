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

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import starting_state
from jaxforge.checkpoint.save_policy import SavePolicy
from jaxforge.cli.running import run_main
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import make_config
from jaxforge.config.rules import check
from jaxforge.data.loader import training_batches
from jaxforge.data.sources import open_eval_data, open_training_data
from jaxforge.errors import UserError
from jaxforge.model.transformer import build_model, matmul_precision
from jaxforge.optim.optimizer import build_optimizer, learning_rate
from jaxforge.parallel import multihost
from jaxforge.parallel.mesh import make_mesh
from jaxforge.step.train_step import Controls, make_train_step
from jaxforge.training.evaluation import Evaluator, summary
from jaxforge.training.result import StepResult

BATCH = 16  # sequences of an update, over all devices

SETTINGS = {
    "model": {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 256, "max_seq_len": 64},
    "train": {"global_batch_size": BATCH, "seq_len": 64, "max_steps": 200, "grad_clip_norm": 1.0},
    # A rate for batches of 8, scaled in proportion; its floor is a share of it, and so scales too.
    "optimizer": {"lr": 1.5e-3 * BATCH / 8, "weight_decay": 0.01, "betas": [0.9, 0.95]},
    "scheduler": {"name": "cosine", "warmup_steps": 20, "min_lr_ratio": 0.1},
    "eval": {"enabled": True, "interval": 50},
    "checkpoint": {"interval": 25, "keep_last_n": 1, "keep_best_n": 1},
    "metrics": {"log_interval": 10},
}


def main(
    directory: Path, overrides: Sequence[str] = (), write: Callable[[str], None] = print
) -> None:
    """Trains in `directory`, from its newest checkpoint if it has one.

    Args:
        directory: for data and checkpoints.
        overrides: settings over those above, such as "--train.max_steps=500".
        write: takes each line of the log.
    """
    multihost.initialize()
    config = settings(directory, overrides)
    mesh = make_mesh(config)
    with jax.set_mesh(mesh), matmul_precision(config):
        train(config, mesh, write if jax.process_index() == 0 else lambda line: None)


def settings(directory: Path, overrides: Sequence[str]) -> JobConfig:
    """The config of a run in `directory`, checked against the devices that there are."""
    write_bytes(inspect.getsource(inspect).encode(), directory)
    paths = [
        f"--data.dataset_path={directory / 'train'}",
        f"--eval.dataset_path={directory / 'val'}",
        f"--checkpoint.dir={directory}",
    ]
    config = make_config(SETTINGS, [*paths, *overrides])
    check(config, jax.device_count())
    return config


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


def train(config: JobConfig, mesh: jax.sharding.Mesh, write: Callable[[str], None]) -> None:
    """Trains to `train.max_steps`."""
    model = build_model(config)
    optimizer = build_optimizer(config, model.axes)  # decays matrices, and nothing else
    train_step = make_train_step(model, optimizer, config, mesh)
    evaluate = Evaluator(config, mesh, model, open_eval_data(config), tokenizer=None)
    checkpoints = Checkpoints(
        Path(config.checkpoint.dir), config.checkpoint, model.axes,
        config.model_dump(mode="json"), stack=model.stack,
    )  # fmt: skip
    # Step, moments, place in the data: a checkpoint holds all of it, and counts finished updates.
    state, progress = starting_state(config, checkpoints, model, optimizer, mesh)
    batches = training_batches(
        config, mesh, open_training_data(config), progress.samples,
        n_updates=config.train.max_steps - progress.step,
    )  # fmt: skip
    rate, is_due = learning_rate(config), SavePolicy(config)
    for batch in batches:  # epochs go by in them
        step = progress.step  # this update's, counted from 0
        state, metrics = train_step(state, batch, Controls())
        progress.advance(BATCH, BATCH * config.train.seq_len)
        if step % config.metrics.log_interval == 0:  # only then is the device waited for
            result = StepResult(metrics, config.train)
            write(
                f"step {step:6d}  lr {rate(step):.2e}  loss {result.loss_dict['lm loss']:.4f}  "
                f"|g| {result.grad_norm:.3f}"
            )
            if result.should_exit:
                raise SystemExit(result.exit_code)
        is_last = progress.step == config.train.max_steps
        scores = {}
        if progress.step % config.eval.interval == 0 or is_last:
            scores = summary(evaluate(state.params))  # each device its part, every token once
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
    raise SystemExit(run_main(command))
