"""Fuzz test of all readers and ports with damaged files and messages, for hours.

    python benchmarks/fuzz.py [--hours 1] [--seed 0] [--only N] [--out results.json]

Real files are mutated in bits, in structure and as files, one mutation at a time
(`tests/torch_compat/mutations.py`): checkpoints of every format (DCP written by torch, by jaxforge,
by pipeline stages and by torchtitan, safetensors in one or several files, also with 8-bit weights,
adapters of PEFT, jaxforge's own), logs and configs of runs, capsules, saved logits, records of
Arrow and Parquet, the state of an interrupted `prepare`, and messages to the ports of supervisors
and replicas. A separate process reads each mutant like `inspect`, `convert`, `report`, `replay
verify`, `train` and `prepare`, within 5 seconds and 300 MB. A mutant must be read unchanged or
rejected with one message; anything else is a fault. The seed and the number determine a mutant:
`--only` repeats one.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from tests.torch_compat import mutations, reading  # noqa: E402
from tests.torch_compat.subjects import SUBJECTS, write_subjects  # noqa: E402

READINGS = 10_000  # of a process: each leaves some 30 KB behind, of the gigabyte that it may take
SECONDS = 5  # of a processor
PATIENCE = 120  # seconds on the clock, however busy the machine


class Worker:
    """Process that reads checkpoints until one of them terminates it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.torch_compat.reading"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self._answer(PATIENCE, 1e9) is not None

    def read(self, path: Path) -> dict[str, Any]:
        """Return the outcome of reading a checkpoint."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n")
        answer = self._answer(PATIENCE, self._processor() + SECONDS)
        if answer is not None:
            return answer
        code = self._process.poll()
        return {"kind": "hang" if code is None else "crash", "message": f"exit code {code}"}

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self, patience: float, processor: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        late = time.monotonic() + patience
        while time.monotonic() < late and self._processor() < processor:
            if select.select([self._process.stdout], [], [], 0.2)[0]:
                line = self._process.stdout.readline()
                if not line:
                    self._process.wait()
                return json.loads(line) if line else None
        return None

    def _processor(self) -> float:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Tally:
    """Outcomes of the mutants so far.

    Attributes:
        outcomes: subject -> kind -> count.
        faults: the mutants with a fault.
    """

    outcomes: dict[str, collections.Counter[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    faults: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def total(self) -> collections.Counter[str]:
        """Return kind -> count over all subjects."""
        return sum(self.outcomes.values(), collections.Counter())

    def write(self, path: Path, seed: int, seconds: float) -> None:
        """Write the tally as JSON."""
        total = self.total()
        report = {
            "mutants": total.total(), "seconds": round(seconds), "seed": seed,
            "outcomes": total, "by subject": self.outcomes, "faults": self.faults,
        }  # fmt: skip
        path.write_text(json.dumps(report, indent=2) + "\n")


def main() -> int:
    """Run for the requested time; return 1 if there were faults."""
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="fuzz") as directory:
        tally = fuzz(args, Path(directory))
    print(dict(tally.total()))
    return 1 if tally.faults else 0


def fuzz(args: argparse.Namespace, directory: Path) -> Tally:
    """Try mutants of each subject in alternation."""
    subjects = write_subjects(directory / "subjects")
    worker, tally = Worker(), Tally()
    originals = {name: worker.read(path)["checkpoint"] for name, path in subjects.items()}
    assert all(originals.values())
    began = time.monotonic()
    for number in itertools.count() if args.only is None else [args.only]:
        if time.monotonic() > began + 3600 * args.hours:
            break
        name = SUBJECTS[number % len(SUBJECTS)]
        mutant = directory / "mutant"
        shutil.copytree(subjects[name], mutant, symlinks=True)
        what = mutations.mutate(np.random.default_rng([args.seed, number]), mutant)
        kind, message = reading.judge(worker.read(mutant), originals[name], what)
        shutil.rmtree(mutant)
        tally.outcomes[name][kind] += 1
        if kind.isupper():
            about = {"number": number, "subject": name, "mutation": what, "kind": kind}
            tally.faults.append({**about, "message": message[:2000]})
        if kind.isupper() or number % READINGS == 0:
            worker.end()
            worker = Worker()
        if kind.isupper() or args.only is not None:
            said = f"{number} {name}: {what}\n    {kind}: {message[:2000]}"
            print(said.encode("ascii", "backslashreplace").decode(), flush=True)
        if args.out is not None and (number % 200 == 0 or kind.isupper()):
            tally.write(args.out, args.seed, time.monotonic() - began)
    worker.end()
    if args.out is not None:
        tally.write(args.out, args.seed, time.monotonic() - began)
    return tally


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one mutant, to do it again")
    parser.add_argument("--out", type=Path, help="JSON of the counts and of every fault")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
