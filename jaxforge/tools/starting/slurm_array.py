"""Slurm array of `jaxforge prepare --slurm N`: its script, and the share of a task (`--share`)."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxforge.data.corpus.inputs import Unit
from jaxforge.data.corpus.manifest import Options
from jaxforge.data.corpus.parts import progress_shown
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.corpus.unit_worker import begin_job, run_units
from jaxforge.errors import InputChangedError, UserError, file_error
from jaxforge.storage import atomic_directory, locks, urls
from jaxforge.storage.atomic_directory import AtomicDirectory, Plan

_SHARE_LOCKS = "share_*.lock"

_UNSAFE = re.compile(r"[^\w.-]")  # in the name of a job, which sbatch reads as words

_TEMPLATE = """\
#!/bin/bash
# Prepares {output} in an array of {n} tasks, then commits it:
#     bash {name} [options of sbatch, such as --partition=cpu]
# A task that is lost is queued again, and repeats only its unfinished units. The job after the
# array prepares what tasks may have left, and makes the output visible. Both can be repeated.
#SBATCH --job-name={job}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem-per-cpu=2G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append

if [ -z "$SLURM_JOB_ID" ]; then
  array=$(sbatch --parsable --array=0-{last} "$@" "$0") || exit
  exec sbatch --dependency="afterany:${{array%%;*}}" --output=%x-%j.log "$@" "$0"
fi
cd {directory} || exit
srun {command} \\
  {workers}${{SLURM_ARRAY_TASK_ID:+--share "$SLURM_ARRAY_TASK_ID/{n}"}}
"""


def script(args: argparse.Namespace, name: str, directory: Path) -> str:
    """Return the script that prepares the output of a command line with `--slurm N`.

    Args:
        args: parsed command line, with its words as `command_line`.
        name: file name of the script.
        directory: working directory, to which paths are relative.
    """
    words = [sys.executable, "-m", "jaxforge.prepare", *_without_slurm(args.command_line)]
    return _TEMPLATE.format(
        output=args.output,
        n=args.slurm,
        last=args.slurm - 1,
        name=name,
        job=_UNSAFE.sub("_", f"prepare-{args.output.name}"),
        directory=shlex.quote(str(directory)),
        command=shlex.join(words),
        # Expanded in the task and not when the script is written.
        workers="" if args.workers else '--workers "$SLURM_CPUS_PER_TASK" ',
    )


def write_script(args: argparse.Namespace, n_units: int) -> str:
    """Write the script to the working directory; return the next command.

    Raises:
        UserError: the script cannot be written.
    """
    path = Path(f"prepare_{args.output.name}.sbatch")
    try:
        path.write_text(script(args, path.name, Path.cwd()), encoding="utf-8")
    except OSError as error:
        raise file_error(f"cannot write {path}", error) from error
    return (
        f"{n_units:,} units are planned for {args.slurm:,} tasks. Look at the #SBATCH lines of "
        f"{path} (time, memory, CPUs)\nNext:\n  bash {shlex.quote(str(path))}"
    )


def _without_slurm(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without `--slurm N`."""
    remaining: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--slurm":
            words.pop(0)
        elif not word.startswith("--slurm="):
            remaining.append(word)
    return remaining


def check_shares(destination: AtomicDirectory) -> None:
    """Check that no task of a Slurm array works on a local output."""
    if urls.in_bucket(destination.state):
        return
    for path in destination.state.glob(_SHARE_LOCKS):
        with locks.hold(path) as is_held:
            if not is_held:
                raise UserError(
                    f"{locks.holder(path)} is preparing a share of the output: wait until the "
                    "Slurm array has ended"
                )


def run_share(
    args: argparse.Namespace,
    plan: Plan,
    units: Sequence[Unit],
    options_for: Callable[[int], Options],
    workers: int,
) -> int:
    """Prepare the units of a share of an output that `--slurm` has planned; return the exit code.

    Args:
        args: parsed command line.
        plan: the plan of this command, which must be that of the output.
        units: all units.
        options_for: returns the options for a vocabulary size.
        workers: number of processes.

    Raises:
        UserError: nothing is planned, or something else; or a unit fails.
    """
    share, n = args.share
    destination = atomic_directory.attach(args.output, plan)
    tokenizer = load_tokenizer(destination.out / "tokenizer", is_checked=True)
    job = begin_job(destination, len(units), tokenizer, options_for(tokenizer.vocab_size))
    chosen = units[share::n]
    with (
        _locked(destination, share),
        progress_shown(sum(unit.files for unit in chosen)) as show,
    ):
        try:
            run_units(job, chosen, workers, show)
        except InputChangedError as error:
            # Work on the old content of the input cannot be continued by any task.
            atomic_directory.discard(destination.state, error.source)
            raise
    print(f"share {share} of {n}: {len(chosen):,} of {len(units):,} units are finished")
    return 0


@contextmanager
def _locked(destination: AtomicDirectory, share: int) -> Iterator[None]:
    """Keep other commands from the output while a share is prepared, on a local disk."""
    if urls.in_bucket(destination.state):
        yield
        return
    path = destination.state / _SHARE_LOCKS.replace("*", str(share))
    with locks.hold(path) as is_held:
        if not is_held:
            raise UserError(f"share {share} is being prepared by {locks.holder(path)}")
        yield
