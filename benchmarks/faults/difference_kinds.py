"""Processes that differ from one another, and clocks that are wrong."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.faults import data
from benchmarks.faults.case import ROOT, Case, Variation, require
from benchmarks.faults.kind import USER, Kind

_REFUSED = "refused with code 2 before a step"


def refused(vary: Callable[[Case], Variation], *said: str) -> Callable[[Case], None]:
    """Start one of two processes with a variation: both refuse, and name the difference."""

    def scenario(case: Case) -> None:
        case.run.n, only = 2, case.rng.choice([0, 1])
        job = case.run.start(variations={only: vary(case)})
        output = case.ends(job, USER)
        case.says(output, *said)
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        require(len(errors) == 2, f"not one message each: {errors}")
        require(not case.run.checkpoints.exists(), "a checkpoint directory was created")
        require(not case.run.last_logged(), "a step took place")
        case.goes_on()
        case.matches(case.undisturbed())

    return scenario


def copy_code(case: Case) -> Path:
    """Return a copy of the code that may be changed."""
    root = case.run.directory.with_name("code")
    for name in ("jaxforge", "torch_compat"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def other_code(case: Case) -> Variation:
    """Return a variation with a changed source file of jaxforge."""
    root = copy_code(case)
    with (root / "jaxforge" / "optim" / "schedule.py").open("a") as file:
        file.write("\n# another commit\n")
    return Variation(root=root)


def other_version(case: Case) -> Variation:
    """Return a variation whose metadata name another version of a package."""
    root = copy_code(case)
    package = case.rng.choice(["jaxforge", "optax", "grain"])
    metadata = root / f"{package}-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.0\n")
    return Variation(root=root)


def other_config(case: Case) -> Variation:
    """Return a variation with another setting."""
    key = case.rng.choice(["optimizer.lr=1e-3", "train.seed=7", "model.n_layers=3",
                           "checkpoint.interval=20", "data.shuffle=true"])  # fmt: skip
    return Variation(overrides=[f"--{key}"])


def other_environment(case: Case) -> Variation:
    """Return a variation with another numerical setting of JAX."""
    return Variation(environment={"JAX_DEFAULT_MATMUL_PRECISION": "highest"})


def other_data(case: Case) -> Variation:
    """Return a variation whose data directory has other tokens under the same path."""
    training = case.own_tokens() / data.TRAINING
    others = training.with_name("others")
    shutil.copytree(training, others)
    path = sorted(others.iterdir())[case.rng.randrange(4)]
    tokens = np.load(path)
    tokens[0] = (tokens[0] + 1) % data.MARKS
    np.save(path, tokens)
    mount = f'mount --bind {others} {training} && exec "$@"'
    return Variation(wrapper=["unshare", "-m", "sh", "-c", mount, "sh"])


def lacking_data(case: Case) -> Variation:
    """Return a variation whose data directory is empty, as on a host without a mount."""
    training = case.own_tokens() / data.TRAINING
    empty = training.with_name("empty")
    empty.mkdir()
    mount = f'mount --bind {empty} {training} && exec "$@"'
    return Variation(wrapper=["unshare", "-m", "sh", "-c", mount, "sh"])


def clock_runs_at(rate: float) -> Callable[[Case], None]:
    """Let Python's clocks run at another rate."""

    def scenario(case: Case) -> None:
        case.ends(case.run.start(fault=("clock_from_start", {"rate": rate})), 0)
        case.matches(case.undisturbed())

    return scenario


def clock_of_one_host_is_off(case: Case) -> None:
    """Set the clock of one of two processes off by hours, in either direction."""
    offset = case.rng.choice([-1, 1]) * case.rng.uniform(1, 12) * 3600
    fault = ("clock_from_start", {"offset": offset})
    case.run.n = 2
    case.ends(case.run.start(fault=fault, only=case.rng.choice([0, 1])), 0)
    case.matches(case.undisturbed())


def clock_is_set_back_between_starts(case: Case) -> None:
    """Stop a run, and resume it with a clock that is hours behind."""
    stop = case.rng.randrange(20, 180)
    case.ends(case.run.start(f"--train.exit_interval={stop}"), 75)
    offset = -case.rng.uniform(1, 12) * 3600
    case.goes_on(fault=("clock_from_start", {"offset": offset}))
    case.matches(case.undisturbed())


DIFFERENCE_KINDS = (
    Kind("clock at half speed", 4, clock_runs_at(0.5), "nothing"),
    Kind("clock at double speed", 4, clock_runs_at(2.0), "nothing"),
    Kind("clock set back by hours between two starts", 6, clock_is_set_back_between_starts,
         "nothing"),
    Kind("two processes: clock of one off by hours", 6, clock_of_one_host_is_off, "nothing", n=2),
    Kind("two processes: other code", 2, refused(other_code, "code of jaxforge"), _REFUSED, n=2),
    Kind("two processes: other version", 2, refused(other_version, "version of ", "99.0"), _REFUSED,
         n=2),
    Kind("two processes: other config", 6, refused(other_config, "process 0", "process 1"),
         _REFUSED, n=2),
    Kind("two processes: other environment", 2,
         refused(other_environment, "JAX_DEFAULT_MATMUL_PRECISION"), _REFUSED, n=2),
    Kind("two processes: other data", 4, refused(other_data, data.TRAINING, "differs between"),
         _REFUSED, n=2, mounts=True),
    Kind("two processes: no data on one", 2,
         refused(lacking_data, data.TRAINING, "no file matches"), _REFUSED, n=2, mounts=True),
)  # fmt: skip
