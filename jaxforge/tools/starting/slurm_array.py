"""Slurm script of `jaxforge prepare --slurm N`: an array of tasks, and a job that commits."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxforge.errors import UserError

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
        raise UserError(f"cannot write {path}: {error.strerror}") from error
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
