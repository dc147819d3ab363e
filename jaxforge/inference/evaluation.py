"""Evaluation of a trained model on text datasets: the command `jaxforge evaluate`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from jaxforge.checkpoint.weights import Weights
from jaxforge.cli.running import STDOUT, wide_console, write_json
from jaxforge.config.job import JobConfig
from jaxforge.data import sources
from jaxforge.errors import UserError
from jaxforge.inference.trained import TrainedModel, open_run
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.program import Program
from jaxforge.runs import run_directory
from jaxforge.storage import urls
from jaxforge.telemetry.console import begin_command
from jaxforge.telemetry.numbers import finite
from jaxforge.training.evaluation import Evaluator, SetSums, merge_sums, summary
from jaxforge.training.foreign import open_foreign
from jaxforge.training.frozen import open_frozen


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Evaluate, print a table and write JSON."""
    begin_command()
    trained, sums = evaluate(
        urls.path(args.run), overrides, sets=args.set, step=args.step,
        batch_size=args.batch_size, steps=args.steps, weights=args.weights,
    )  # fmt: skip
    if jax.process_index() == 0:
        _print(trained, sums, to_stderr=args.json == STDOUT)
        if args.json:
            write_json(args.json, report(trained, sums), indent=2)
    return 0


def evaluate(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    sets: Sequence[str] = (),
    step: int | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    weights: Weights = "raw",
) -> tuple[TrainedModel, dict[str, SetSums]]:
    """Evaluate a checkpoint of a run.

    Args:
        path: a run directory, or one of its checkpoints.
        overrides: settings over the run's config, such as "--distributed.tp=2".
        sets: "NAME=DIR" of each set; by default those of the run's `[eval]`.
        step: the checkpoint; by default the newest, or the one that `path` names.
        batch_size: sequences per batch, over all devices; by default as in training.
        steps: batches of each set; by default all.
        devices: the devices to use; all by default.
        weights: "ema" evaluates the average of the parameters.

    Returns:
        The model, and the sums over each set by name.

    Raises:
        UserError: checkpoint or set do not exist, or they do not match.
    """
    overrides = [*overrides, *set_overrides(sets)]
    trained = open_run(path, overrides, step=step, devices=devices, weights=weights)
    # `open_run` removes the batch size of training, which is the default here.
    as_trained = run_directory.read_config(trained.run, overrides)
    config = _with_batch(trained, as_trained, batch_size)
    if not config.eval.sources():
        raise UserError(f"{trained.run} has no [eval] to evaluate on: give --set NAME=DIR")
    config = _with_objective(config)
    datasets = sources.open_eval_data(config)
    tokenizer = run_directory.find_tokenizer(trained.run)
    with trained.in_use() as params:
        program = Program(config, trained.mesh, model=trained.model)
        frozen = open_frozen(program, open_foreign, trained.progress())
        evaluator = Evaluator(config, trained.mesh, trained.model, datasets, tokenizer, frozen)
        return trained, evaluator(params, steps)


def report(trained: TrainedModel, sums: Mapping[str, SetSums]) -> dict[str, Any]:
    """Return the JSON report; non-finite numbers become null.

    `metrics` has the names and values that training logs; `sets` has each set separately.
    """
    sets = [
        {
            "name": name,
            "tokens": sums_of_set.tokens,
            "bytes": sums_of_set.n_bytes,
            **finite(sums_of_set.metrics()),
        }
        for name, sums_of_set in sums.items()
    ]
    mesh = {axis: size for axis, size in trained.mesh.shape.items() if size > 1}
    return {
        "run": str(trained.run),
        "step": trained.step,
        "weights": trained.weights,
        "mesh": mesh,
        "metrics": finite(summary(sums)),
        "sets": sets,
    }


def set_overrides(sets: Sequence[str]) -> list[str]:
    """Return the settings of `[eval]` for `--set NAME=DIR`; they replace configured sets."""
    tables = []
    for text in sets:
        name, equals, location = text.partition("=")
        if not (name and equals and location):
            raise UserError(f"--set {text}: expected NAME=DIR")
        table, path = {"name": name, "dataset_path": location}, urls.path(location, f"--set {name}")
        if "*" in path.name:
            table |= {"dataset_path": str(path.parent), "file_pattern": path.name}
        tables.append(table)
    if not tables:
        return []
    return [f"--eval.datasets={tables}"]


def _with_batch(trained: TrainedModel, as_trained: JobConfig, batch_size: int | None) -> JobConfig:
    """Return the config with the requested batch size, by default that of training."""
    groups = data_parallel_size(trained.mesh)
    if batch_size is not None and batch_size % groups:
        raise UserError(
            f"--batch-size {batch_size} must be a multiple of the {groups} data-parallel groups of "
            f"devices: change it to {-(-batch_size // groups) * groups}, or raise --distributed.tp"
        )
    rows = batch_size or as_trained.eval_batch_size(groups)
    return trained.config.with_values({"eval.batch_size": rows})


def _with_objective(config: JobConfig) -> JobConfig:
    """Return the config with the objective that its evaluation sets need."""
    if not sources.eval_sets_have_pairs(config):
        return config
    # `open_run` has set next-token prediction.
    return config.with_values({"train.objective": "dpo"})


def _print(trained: TrainedModel, sums: Mapping[str, SetSums], *, to_stderr: bool) -> None:
    """Print a table with a row for each set, and a row for all if there are several."""
    average = ", average of the parameters" if trained.weights == "ema" else ""
    title = f"{trained.run.name}, step {trained.step}{average}"
    table = Table(title=title, title_justify="left")
    table.add_column("set")
    functions = list(next(iter(sums.values())).functions)
    for name in ("tokens", "loss", "perplexity", "bits/byte", *functions):
        table.add_column(name, justify="right")
    rows = {name or "eval": sums_of_set for name, sums_of_set in sums.items()}
    if len(rows) > 1:
        rows["all"] = merge_sums(sums.values())
    for name, sums_of_set in rows.items():
        values = sums_of_set.metrics()
        bits = f"{values['bits_per_byte']:.4f}" if "bits_per_byte" in values else "-"
        results = (f"{values[function]:.4f}" for function in functions)
        table.add_row(name, f"{sums_of_set.tokens:,}", f"{values['loss']:.4f}",
                      f"{values['perplexity']:,.2f}", bits, *results)  # fmt: skip
    wide_console(sys.stderr if to_stderr else sys.stdout).print(table)
