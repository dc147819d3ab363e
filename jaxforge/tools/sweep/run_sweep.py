"""Execution of `jaxforge sweep`, and the table of its results."""

import argparse
import dataclasses
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from jaxforge.config.model import MODELS, ModelConfig
from jaxforge.config.reading.load import load_unresolved
from jaxforge.config.resolution import World, resolve
from jaxforge.data.sources import sequences_per_epoch
from jaxforge.errors import UserError
from jaxforge.model.transformer import active_parameter_count
from jaxforge.program import Program
from jaxforge.runs.reading import Series, read_series
from jaxforge.storage import urls
from jaxforge.telemetry.numbers import exact, human
from jaxforge.tools.sweep.runs import PlannedRun, Point, Runner, points

_SCRIPT = """\
#!/bin/bash
# {count} points, one array task each: sbatch FILE. Submit it again to run what has failed.
# Each saves two minutes before the time limit, or when Slurm preempts it, and queues itself again.
#SBATCH --job-name=jaxforge-sweep
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node={devices}
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append

# srun passes USR1 on to its task; TERM (preemption) it would turn into SIGKILL.
asked= step=
trap 'asked=1; [ -n "$step" ] && kill -USR1 "$step"' USR1 TERM

srun {command} --point "$SLURM_ARRAY_TASK_ID" &
step=$!
[ -n "$asked" ] && kill -USR1 "$step" # it came before there was a step to tell
while kill -0 "$step" 2>/dev/null; do # `wait` would not see a signal that comes just before it
  sleep 0.2
done
wait "$step"
code=$?

if [ "$code" -eq 75 ]; then # stopped after a checkpoint; docs/launching.md has all codes
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def slurm_script(arguments: Sequence[str], count: int, devices: int) -> str:
    """Return the script for `sbatch`.

    Args:
        arguments: arguments of `jaxforge.sweep`.
        count: number of points.
        devices: GPUs of each point.
    """
    command = shlex.join(["python", "-m", "jaxforge", "sweep", *arguments, f"--devices={devices}"])
    return _SCRIPT.format(count=count, last=count - 1, devices=devices, command=command)


_MOST_PROBLEMS = 10


def run(arguments: Sequence[str], args: argparse.Namespace, settings: Sequence[str]) -> int:
    """Run the points, or list them; return the exit code."""
    jax.config.update("jax_platforms", "cpu")  # the devices are for the runs
    if args.slurm and args.devices is None:
        raise UserError("--slurm needs --devices N, the number of GPUs of each run")
    devices = args.devices or _devices()
    runs = plan_runs(points(args.grid), args.config, settings, devices)
    if args.dry_run:
        for run_ in runs:
            size = human(parameters(run_.config.model))
            steps = run_.config.train.max_steps
            print(f"{run_.point.name}  {size} parameters, {steps} steps, {run_.state}")
        return 0
    if args.slurm:
        _write_script(args.slurm, slurm_script(_for_tasks(arguments), len(runs), devices))
        return 0
    if args.point is not None:
        if not 0 <= args.point < len(runs):
            raise UserError(f"--point {args.point}: points are 0 to {len(runs) - 1}")
        return Runner().run([runs[args.point]])
    code = 0 if args.results else Runner().run(runs)
    print(table(*results(runs)))
    return code


def plan_runs(
    every: Sequence[Point], config: str, settings: Sequence[str], devices: int
) -> list[PlannedRun]:
    """Return the checked runs of all points.

    Args:
        every: the points.
        config: path of the base config.
        settings: settings over the base config, for all points.
        devices: number of devices of each run.

    Raises:
        UserError: configs are invalid, or directories belong to other runs; the message names
            every such point.
    """
    runs, problems = [], []
    # All problems together: a sweep must not stop at its last point after days.
    for point in every:
        try:
            runs.append(_planned(point, config, settings, devices))
        except UserError as error:
            problems.append(f"{point.name}: {error}".replace("\n", "\n    "))
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        lines = [*problems[:_MOST_PROBLEMS], *([f"and {more} more points"] if more > 0 else [])]
        raise UserError("nothing is run:\n" + "\n".join(lines))
    return runs


def _planned(point: Point, path: str, settings: Sequence[str], devices: int) -> PlannedRun:
    overrides = [*settings, *point.overrides]
    unresolved = load_unresolved(path, overrides)
    root = urls.path(unresolved.known.checkpoint.dir, "checkpoint.dir")
    if urls.in_bucket(root):
        raise UserError(f"checkpoint.dir = {root}: a sweep is in a directory, not in a bucket")
    directory = root / point.name
    overrides.append(f"--checkpoint.dir={directory}")
    # Read again: the directory of the point is part of its config.
    written = load_unresolved(path, overrides)
    config = resolve(written, World(devices), sequences_per_epoch).config
    _ = Program.without_devices(config).optimizer  # refuses patterns that match no parameter
    command = [sys.executable, "-m", "jaxforge.train", "--config", path, *overrides]
    run = PlannedRun(point, directory, config, command)
    run.check_directory()
    return run


def _devices() -> int:
    """Return the number of devices of a run, counted and released by a child process."""
    # A process that has counted devices holds them; the runs need them.
    code = "import jax; print(jax.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"no devices: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout.split()[-1])


def _for_tasks(arguments: Sequence[str]) -> list[str]:
    """Return the command line of an array task: without the options that request the script."""
    remaining, skip = [], False
    for i, argument in enumerate(arguments):
        if skip:
            skip = False
            continue
        name = argument.partition("=")[0]
        if name in ("--slurm", "--devices"):
            following = arguments[i + 1] if i + 1 < len(arguments) else "--"
            skip = "=" not in argument and not following.startswith("--")
            continue
        remaining.append(argument)
    return remaining


def _write_script(target: str, text: str) -> None:
    if target == "-":
        print(text, end="")
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
    print(f"written to {target}: run it with sbatch", file=sys.stderr)


VALIDATION, TRAINING = "eval/loss", "train/loss"
_SHARE = 10  # the last 1 / _SHARE of the logged steps is averaged


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one point.

    Attributes:
        run: run of the point.
        loss: final loss; NaN if the run is unfinished, or its loss is not finite.
        parameters: active parameters per token.
        tokens: tokens trained on.
    """

    run: PlannedRun
    loss: float
    parameters: int
    tokens: int


def results(runs: Sequence[PlannedRun]) -> tuple[str, list[Result]]:
    """Read the logs of the runs.

    Returns:
        Name of the compared metric: "eval/loss", or "train/loss" if no point was evaluated.
        Results by increasing loss; points without a loss are last.
    """
    logged = [_logged(run) for run in runs]
    metric = VALIDATION if any(VALIDATION in series for series in logged) else TRAINING
    points = [_result(run, series, metric) for run, series in zip(runs, logged, strict=True)]
    return metric, sorted(points, key=lambda x: (not math.isfinite(x.loss), x.loss))


def _logged(run: PlannedRun) -> dict[str, Series]:
    """Return the metrics of a finished run; empty if it is unfinished or has logged nothing."""
    try:
        return read_series(run.directory)[0] if run.is_finished else {}
    except UserError:
        return {}


def _result(run: PlannedRun, series: Mapping[str, Series], metric: str) -> Result:
    values = series[metric].value.tolist() if metric in series else []
    # The loss of a single step is noisy; an evaluation always reads the same text.
    last = values[-max(1, len(values) // _SHARE) :] if metric == TRAINING else values[-1:]
    loss = statistics.fmean(last) if last else math.nan
    tokens = int(series["train/tokens"].last_finite) if "train/tokens" in series else 0
    return Result(run, loss, parameters(run.config.model), tokens)


def parameters(model: ModelConfig) -> int:
    """Return the active parameters per token, without using a device."""
    return active_parameter_count(MODELS[model.model_type](model))


def table(metric: str, points: Sequence[Result]) -> str:
    """Return the results as plain text."""
    rows = [("", "point", "parameters", "tokens", metric)]
    for i, point in enumerate(points, 1):
        run = point.run
        loss = "not finite" if run.is_finished else f"not finished ({run.state})"
        loss = exact(point.loss) if math.isfinite(point.loss) else loss
        rows.append((str(i), run.point.name, human(point.parameters), human(point.tokens), loss))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
