"""Peak memory of starts from each kind of checkpoint, compared with a start from nothing.

    python benchmarks/restore_memory.py [--quick]

1, 2 and 4 processes (`dp_shard`) train a small model until their third step is logged. The memory
of a process is its peak resident size (VmHWM): Python, the compiled step and the state. Heaps of
CPU runs never shrink (`parallel/host_memory.py`), so the peak of a start from nothing is also the
memory of a steady run. Loops of PyTorch have run out of memory at a resume (Megatron-LM #2339).
"""

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package of the drill

import results

from benchmarks.faults import data
from benchmarks.faults.case import Run, require

NOTHING = "a start from nothing"
SAVED, MEASURED = 3, 3
"""Steps before the saved one, and of a start that is measured."""
STATE = ["--model.dim=512", "--model.n_layers=4", "--model.vocab_size=8192"]
"""Settings of a model with 264 MB of parameters and moments of AdamW."""
QUICK = ["--model.dim=128"]


def peak(run: Run, source: str, *overrides: str) -> float:
    """Return the largest peak of a process in MB once its steps are logged, and kill the run.

    Args:
        run: the run, which resumes if it exists.
        source: text of the log that names what the start has read.
        overrides: further settings.
    """
    first = run.last_logged()
    job = run.start(*overrides)
    while run.last_logged() < first + MEASURED:
        require(not job.ended, job.tail())
        time.sleep(0.02)
    status = [Path(f"/proc/{process.pid}/status").read_text() for process in job.processes]
    job.kill()
    job.wait()
    require(source in job.output(), job.output())
    return max(int(text.split("VmHWM:")[1].split()[0]) for text in status) * 1024 / 1e6


def converted(saved: Path, to: str) -> Path:
    """Return a conversion of a run, written once."""
    path = saved.with_name(f"as_{to}")
    if not path.exists():
        command = [sys.executable, "-m", "jaxforge", "convert", saved, path, "--to", to]
        subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    return path


def peaks(new: Callable[[str], Run], memory: Path) -> dict[str, float]:
    """Return the peak in MB of a start from nothing and from each kind of checkpoint."""
    saved = new("saved")
    stopped = saved.start(f"--train.exit_interval={SAVED}")
    require(set(stopped.wait()) == {75}, stopped.tail())
    replicas = [f"--checkpoint.replica_interval={MEASURED}", f"--checkpoint.replica_dir={memory}"]
    replicated = new("replicated")
    peak(replicated, "", *replicas)
    peak(replicated, "", *replicas)  # by now a replica is complete
    load = functools.partial("--checkpoint.load_path={}".format)
    lora = [load(saved.directory), "--lora.rank=8"]
    peak(new("compiling"), "", *lora)  # the other starts have the step of `saved`
    return {
        NOTHING: peak(new("nothing"), ""),
        "replica in memory": peak(replicated, "resuming from the replica", *replicas),
        "LoRA on a checkpoint": peak(new("lora"), "", *lora),
        **{
            name: peak(new(to), "", load(converted(saved.directory, to)))
            for name, to in (("DCP", "dcp"), ("Megatron-Core", "megatron"), ("Hugging Face", "hf"))
        },
        "checkpoint": peak(saved, f"resuming from step {SAVED}"),
    }


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    rows = []
    for processes in (1, 2) if quick else (1, 2, 4):
        measured = []
        for _ in range(1 if quick else 2):
            with (
                tempfile.TemporaryDirectory() as disk,
                tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
            ):
                data.write(Path(disk) / "tokens")

                def new(name: str, disk: str = disk, processes: int = processes) -> Run:
                    run = Run(Path(disk) / name, Path(disk) / "compiled", Path(disk) / "tokens")
                    run.n = processes
                    run.job = [*(QUICK if quick else STATE), f"--distributed.dp_shard={processes}",
                               "--checkpoint.interval=1000", "--eval.enabled=false"]  # fmt: skip
                    return run

                measured.append(peaks(new, Path(memory)))
        least = {name: min(each[name] for each in measured) for name in measured[0]}
        count = f"{processes} processes" if processes > 1 else "1 process"
        rows += [
            results.Row(f"{name}, {count}", round(value), NOTHING, round(least[NOTHING]), "MB",
                        smaller_is_better=True)
            for name, value in least.items() if name != NOTHING
        ]  # fmt: skip
    notes = [
        f"peak of the largest process until its step {MEASURED}, the least of two starts",
        "264 MB of parameters and moments in all processes together",
    ]
    results.report("restore_memory", rows, ("jax", "orbax-checkpoint"), notes=notes,
                   write=not quick)  # fmt: skip


if __name__ == "__main__":
    main()
