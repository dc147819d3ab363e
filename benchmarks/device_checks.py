"""Run of checks on an accelerator, for `gpu.py` and `tpu.py`.

Each check is a process with its own time limit: a failure, a hang or a lack of memory does not
affect other checks. After each check, its results are in `benchmarks/results/` (or DIR) as
`<benchmark>-<platform>.json`, and `checks-<platform>.json` has the outcome of all checks.
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
NEEDS = ("jax", "jaxlib", "flax", "optax", "orbax.checkpoint", "grain", "huggingface_hub",
         "jaxtyping", "numpy", "pydantic", "rich", "tokenizers", "torch", "pytest")  # fmt: skip
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


class Accelerator(NamedTuple):
    """Kind of device, and what to check on it.

    Attributes:
        platform: JAX's name, "gpu" or "tpu".
        backends: `JAX_PLATFORMS` of the checks; some use the CPU as well.
        packages: required packages in addition to `NEEDS`.
        checks: returns the checks, the most informative first; small ones for a CPU if False.
    """

    platform: str
    backends: str
    packages: tuple[str, ...]
    checks: Callable[[bool], list[Check]]


def script(name: str, seconds: float, cases: str = "", *options: str) -> Check:
    """Return the check that runs a benchmark.

    Args:
        name: file name without suffix.
        seconds: time limit.
        cases: words in the names of the cases to run; "" for all.
        options: further arguments.
    """
    label = f"{name}: {cases}" if cases else name
    of_cases = [f"--cases={cases}"] if cases else []
    return Check(label, [str(HERE / f"{name}.py"), *of_cases, *dict.fromkeys(options)], seconds)


def golden(words: str) -> Check:
    """Return the check of the reference trajectories whose names match `words`."""
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-k", words,
               str(ROOT / "tests" / "golden" / "test_trajectories.py")]  # fmt: skip
    return Check("golden", command, 60, {"JAX_DEFAULT_MATMUL_PRECISION": "highest"})


def missing(accelerator: Accelerator, *, on_cpu: bool) -> list[str]:
    """Return the packages that are not installed, without importing any."""
    return [name for name in needed(accelerator, on_cpu=on_cpu) if not _is_installed(name)]


def needed(accelerator: Accelerator, *, on_cpu: bool) -> tuple[str, ...]:
    """Return the packages that the checks import."""
    return NEEDS if on_cpu else (*NEEDS, *accelerator.packages)


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


def probe(packages: Sequence[str], platform: str) -> dict[str, Any]:
    """Return platform and kind of JAX's first device, queried in a separate process.

    Args:
        packages: packages to import first; "broken" in the result has failures and reasons.
        platform: expected platform; of another one, the messages of JAX are printed.

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
    if result["platform"] != platform and check.said != lines[-1]:
        print(check.said, file=sys.stderr)  # why not, perhaps
    return result


def _arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything (520)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks that begin with these")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results go")
    parser.add_argument("--on-cpu", action="store_true", help="in miniature, without the device")
    return parser.parse_args()


def main(accelerator: Accelerator, description: str | None) -> int:
    """Run all checks of an accelerator.

    Args:
        accelerator: kind of device.
        description: text of `--help`.

    Returns:
        0: all passed. 1: some failed or had no time left. 2: there is no such device.
    """
    started, args = time.monotonic(), _arguments(description)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and with it the current check
    name, on_cpu = accelerator.platform.upper(), args.on_cpu
    absent = missing(accelerator, on_cpu=on_cpu)
    print(f"missing: {', '.join(absent) or 'nothing'}", flush=True)
    if on_cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    installed = [
        package for package in needed(accelerator, on_cpu=on_cpu) if _is_installed(package)
    ]
    device = probe([*installed, "jaxforge.train"], accelerator.platform)
    for package, why in device["broken"].items():
        print(f"cannot be imported: {package}: {why}", flush=True)
    if not on_cpu and device["platform"] != accelerator.platform:
        print(f"no {name}: JAX has {device['kind']} ({device['platform']}); --on-cpu tries the "
              "checks in miniature", file=sys.stderr)  # fmt: skip
        return 2
    print(f"device: {device['kind']} ({device['platform']})", flush=True)
    if not on_cpu:
        os.environ["JAX_PLATFORMS"] = accelerator.backends
    every = [check for check in accelerator.checks(not on_cpu)
             if not args.only or check.name.startswith(tuple(args.only))]  # fmt: skip
    if on_cpu:
        every = [check._replace(command=_miniature(check.command)) for check in every]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        if args.output or on_cpu:
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


def _miniature(command: Sequence[str]) -> list[str]:
    """Return the command of a check for a CPU."""
    is_benchmark = str(command[0]).endswith(".py")
    return list(dict.fromkeys([*command, "--quick"])) if is_benchmark else list(command)
