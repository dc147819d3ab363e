"""All benchmarks and checks that need a GPU, most informative first, in under nine minutes.

    python benchmarks/gpu.py [--seconds N] [--only NAME ...] [--output DIR] [--on-cpu]

Each check is a process with its own time limit: a failure, a hang or a lack of memory does not
affect other checks. After each check, its results are in `benchmarks/results/` (or DIR) as
`<benchmark>-gpu.json`, and `checks-gpu.json` has the outcome of all checks. Nothing is downloaded.
`--on-cpu` runs the same checks in miniature without a GPU, and keeps no results without --output.

Exit code 0: all passed. 1: some failed or had no time left. 2: there is no GPU.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SECONDS = 520
ELSEWHERE = "JAXFORGE_RESULTS"  # as in results.py, which imports what may be missing here
NEEDS = ("jax", "jaxlib", "jax_cuda13_plugin", "flax", "optax", "orbax.checkpoint", "grain",
         "huggingface_hub", "jaxtyping", "numpy", "pydantic", "rich", "tokenizers", "torch",
         "triton", "pytest")  # fmt: skip
GPU_ONLY = ("jax_cuda13_plugin", "triton")
_OUTPUT_LIMIT = 6000  # characters of what a failed check has said
_SHORTEST = 10.0  # seconds in which a check can still come to something
_PROBE = """
import importlib, json, sys
broken = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        broken[name] = repr(error)
import jax
device = jax.devices()[0]
print(json.dumps({"platform": device.platform, "kind": device.device_kind, "broken": broken}))
"""


class Check(NamedTuple):
    """Process that must end with 0.

    Attributes:
        name: name for display.
        command: arguments of Python.
        seconds: time limit.
        env: additional environment variables.
    """

    name: str
    command: Sequence[str]
    seconds: float
    env: dict[str, str] = {}  # noqa: RUF012 (no dataclass)


class Ended(NamedTuple):
    """Result of a check.

    Attributes:
        check: name of the check.
        ended: "passed", or the failure.
        seconds: duration.
        said: end of the output.
    """

    check: str
    ended: str
    seconds: float
    said: str = ""

    @property
    def passed(self) -> bool:
        """Return whether all checks passed."""
        return self.ended == "passed"


def checks(*, on_gpu: bool) -> list[Check]:
    """Return the checks to run, the most informative first."""

    def script(name: str, seconds: float, cases: str = "", *options: str) -> Check:
        label = f"{name}: {cases}" if cases else name
        of_cases = [f"--cases={cases}"] if cases else []
        quick = [] if on_gpu else ["--quick"]
        command = [str(HERE / f"{name}.py"), *of_cases, *dict.fromkeys((*quick, *options))]
        return Check(label, command, seconds)

    models = ("1B", "4 layers of 7B") if on_gpu else ("0.7M",)
    # Without Lion, which moves by the sign of a sum: on a GPU, sums are in no fixed order.
    golden = Check(
        "golden",
        ["-m", "pytest", "-p", "no:cacheprovider", "-k",
         "follows_the_reference and not dp_shard and not lion",
         str(ROOT / "tests" / "golden" / "test_trajectories.py")],
        60, {"JAX_DEFAULT_MATMUL_PRECISION": "highest"},
    )  # fmt: skip
    return [
        script("gpu_train", 130),
        script("step", 130, models[0]),
        script("gpu_planned", 80, models[0]),
        script("gpu_flags", 150),
        *(check for case in models[1:] for check in (script("step", 110, case),
                                                     script("gpu_planned", 80, case))),
        script("gpu_numerics", 60, "attention"),
        script("gpu_numerics", 60, "experts"),
        script("gpu_numerics", 120, "losses"),
        script("attention", 120, "packed"),
        script("kernels", 60, "attention"),
        script("grouped", 80),
        script("moe", 90, "8 experts"),
        script("decode", 120),
        script("kernels", 45, "loss"),
        script("checkpoint", 60),
        script("data", 40, "", "--quick"),
        golden,
    ]  # fmt: skip


def missing(*, on_gpu: bool) -> list[str]:
    """Return the packages that are not installed, without importing any."""
    return [name for name in NEEDS if not _is_installed(name) and (on_gpu or name not in GPU_ONLY)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


def run_check(check: Check, seconds: float, results: Path) -> Ended:
    """Run a check with a time limit, then kill it and its children.

    Args:
        check: the check.
        seconds: time limit.
        results: directory of its results.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", ELSEWHERE: str(results)}
    env |= check.env
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *check.command], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=seconds)
            ended = "passed" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {seconds:.0f} s"
        finally:
            _end(process)
        return Ended(check.name, ended, time.monotonic() - started, _tail(output))


def _end(process: subprocess.Popen) -> None:
    """Kill a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(output: Any) -> str:  # noqa: ANN401 (a file of bytes)
    output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_LIMIT))
    return output.read().decode(errors="replace").strip()


def run_checks(
    every: Sequence[Check],
    seconds: float,
    directory: Path,
    save: Callable[[Sequence[Ended]], None],
) -> list[Ended]:
    """Run checks one after another until the time is up, and print a line for each.

    Args:
        every: the checks in order.
        seconds: time limit of all checks.
        directory: directory of all results; `<n>` has those of the n-th check.
        save: called after each check with all finished checks.
    """
    deadline, ended = time.monotonic() + seconds, list[Ended]()
    for number, check in enumerate(every):
        left = deadline - time.monotonic()
        results = directory / f"{number:02}"
        if left < min(_SHORTEST, check.seconds):
            ended.append(Ended(check.name, "left out: no time", 0.0))
        else:
            ended.append(run_check(check, min(check.seconds, left), results))
        print(line_of(ended[-1], results), flush=True)
        save(ended)
    return ended


def line_of(check: Ended, results: Path) -> str:
    """Return a line with the outcome of a check and its results or the end of its output."""
    gist = "; ".join(gist_of(row) for result in read(results) for row in result["rows"])
    what = gist or (check.said.splitlines()[-1].strip() if check.said else "")
    return f"[{check.seconds:5.1f} s] {check.check}: {check.ended}{': ' if what else ''}{what}"


def gist_of(row: dict[str, Any]) -> str:
    """Return a short text of a comparison's or claim's row."""
    if "ratio" in row:
        return f"{row['case']}: {row['ours']} to {row['theirs']} {row['unit']} of {row['peer']}"
    return f"{'' if row['holds'] else 'FAILS '}{row['case']}: {row['measured']}"


def read(directory: Path) -> list[dict[str, Any]]:
    """Return the results of a check."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def merged(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Merge the results of checks that share a file name; return name -> content."""
    result: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.glob("*/*.json")):
        check = json.loads(path.read_text())
        whole = result.setdefault(path.name, {**check, "rows": [], "notes": []})
        whole["rows"] += check["rows"]
        whole["notes"] += [note for note in check["notes"] if note not in whole["notes"]]
    yield from result.items()


def save_all(directory: Path, device: dict[str, Any], ended: Sequence[Ended]) -> None:
    """Write the results and outcomes of all checks."""
    import results  # what it wants may be missing, and that has been said before

    results.directory().mkdir(parents=True, exist_ok=True)
    for name, content in merged(directory):
        (results.directory() / name).write_text(json.dumps(content, indent=2) + "\n")
    rows = [{"check": check.check, "ended": check.ended, "seconds": round(check.seconds, 1)}
            for check in ended]  # fmt: skip
    said = {check.check: check.said for check in ended if not check.passed}
    with contextlib.redirect_stdout(io.StringIO()):  # a check has one line
        results.write_json("checks", rows, ("jax", "jaxlib"), device=device["kind"],
                           platform=device["platform"], said=said)  # fmt: skip


def save(directory: Path, device: dict[str, Any], ended: Sequence[Ended]) -> None:
    """Call `save_all`; a failure does not prevent further checks."""
    try:
        save_all(directory, device, ended)
    except Exception as error:
        print(f"results are not written: {error!r}", file=sys.stderr)


def probe(packages: Sequence[str]) -> dict[str, Any]:
    """Return platform and kind of JAX's first device, queried in a separate process.

    Args:
        packages: packages to import first; "broken" in the result has failures and reasons.

    Raises:
        SystemExit: JAX fails to initialize.
    """
    with tempfile.TemporaryDirectory() as nothing:
        check = run_check(Check("device", ["-c", _PROBE, *packages], 90), 90, Path(nothing))
    lines = [line for line in check.said.splitlines() if line.startswith("{")]
    if not check.passed or not lines:
        print(f"JAX has no device: {check.ended}\n{check.said}", file=sys.stderr)
        raise SystemExit(2)
    result = json.loads(lines[-1])
    if result["platform"] != "gpu" and check.said != lines[-1]:
        print(check.said, file=sys.stderr)  # why not, perhaps
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything (520)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks that begin with these")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results go")
    parser.add_argument("--on-cpu", action="store_true", help="in miniature, without a GPU")
    return parser.parse_args()


def main() -> int:
    """Run all checks; the exit codes are described above."""
    started, args = time.monotonic(), _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and with it the current check
    on_gpu = not args.on_cpu
    absent = missing(on_gpu=on_gpu)
    print(f"missing: {', '.join(absent) or 'nothing'}", flush=True)
    if args.on_cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    device = probe([*(name for name in NEEDS if _is_installed(name)), "jaxforge.train"])
    for name, why in device["broken"].items():
        print(f"cannot be imported: {name}: {why}", flush=True)
    if on_gpu and device["platform"] != "gpu":
        print(f"no GPU: JAX has {device['kind']} ({device['platform']}); --on-cpu tries the checks "
              "in miniature", file=sys.stderr)  # fmt: skip
        return 2
    print(f"device: {device['kind']} ({device['platform']})", flush=True)
    if on_gpu:
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"  # some checks want both
    every = [check for check in checks(on_gpu=on_gpu)
             if not args.only or check.name.startswith(tuple(args.only))]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if args.output or args.on_cpu:
            os.environ[ELSEWHERE] = str((args.output or directory / "results").resolve())
        ended = run_checks(
            every, args.seconds - (time.monotonic() - started), directory / "checks",
            lambda ended: save(directory / "checks", device, ended),
        )  # fmt: skip
    passed = sum(item.passed for item in ended)
    print(f"{passed} of {len(ended)} passed in {time.monotonic() - started:.0f} s")
    for item in ended:
        if not item.passed and item.said:
            print(f"\n{item.check}: {item.ended}\n{item.said[-1500:]}")
    return 0 if passed == len(ended) else 1


if __name__ == "__main__":
    raise SystemExit(main())
