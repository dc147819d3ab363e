"""Slurm job array of a sweep: a task per point, each on a single node."""

import shlex
from collections.abc import Sequence

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


def script(arguments: Sequence[str], count: int, devices: int) -> str:
    """Return the script for `sbatch`.

    Args:
        arguments: arguments of `jaxforge.sweep`.
        count: number of points.
        devices: GPUs of each point.
    """
    command = shlex.join(["python", "-m", "jaxforge", "sweep", *arguments, f"--devices={devices}"])
    return _SCRIPT.format(count=count, last=count - 1, devices=devices, command=command)
