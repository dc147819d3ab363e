"""Flipped bits in files of a run, outside of the arrays of checkpoints, and in its data.

A flip is either found, or its effect is limited to what the scenario says.
"""

import json
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.faults import data
from benchmarks.faults.case import INTERVAL, STEPS, Case, Variation, require
from benchmarks.faults.kind import (
    HALF,
    KILLED,
    USER,
    Kind,
    copy_half_run,
    flip,
    resumes,
)
from jaxforge.data.corpus.manifest import Manifest, Shard, extend_hashes


def flipped_in(*patterns: str) -> Callable[[Case], None]:
    """Flip a bit in a small file of a stopped run.

    The run resumes bit for bit, or the start is refused, names the file or its checkpoint, and
    resumes once the file is mended.
    """

    def scenario(case: Case) -> None:
        copy_half_run(case)
        files = sorted(path for pattern in patterns for path in case.run.directory.glob(pattern)
                       if path.stat().st_size)  # fmt: skip
        path = case.rng.choice(files)
        spare = path.read_bytes()
        flip(path, case)
        output = case.ends(case.run.start(), 0, USER)
        is_detected = case.codes[-1] == USER
        case.notes["detected"] = is_detected
        if is_detected:
            checkpoint = str(case.run.checkpoints / f"step_{HALF}")
            require(path.name in output or checkpoint in output, f"{path} is not named: {output}")
            path.write_bytes(spare)
            case.goes_on()
        case.matches(case.undisturbed())

    return scenario


def flipped_in_metrics(case: Case) -> None:
    """Flip a bit in `metrics.jsonl`: a line that is no longer JSON is moved; a digit is not found.

    All other lines stay as they are.
    """
    copy_half_run(case)
    path = case.run.directory / "metrics.jsonl"
    before = path.read_bytes()
    flip(path, case)
    changed = [line for line in before.splitlines() if line not in path.read_bytes().splitlines()]
    steps = [json.loads(line)["step"] for line in changed]
    output = case.goes_on()
    case.codes.append(0)
    moved = path.with_name("metrics.damaged.jsonl").exists()
    require(not moved or "metrics.damaged.jsonl" in output, "moved without a warning")
    case.notes["detected"] = moved
    case.matches(case.undisturbed(), unlike=steps)


def with_manifest(case: Case) -> Path:
    """Return a copy of the training data with a manifest."""
    training = case.own_tokens() / data.TRAINING
    shards = []
    for path in sorted(training.iterdir()):
        tokens = np.load(path)
        hashes = extend_hashes("", 0, tokens.tobytes())
        shards.append(Shard(path.name, tokens.size, int(tokens.max()), hashes))
    Manifest.of_shards(
        shards, version=1, dtype="uint16", documents=1, eos_id=None, vocab_size=data.VOCABULARY,
        tokenizer="byte", tokenizer_sha256="0" * 64,
    ).write(training)  # fmt: skip
    return training


_HEADER = 128  # bytes of the header of a .npy file


def flipped_in_shard(case: Case) -> None:
    """Flip a bit in a shard with hashes: named when its block is read."""
    path = sorted(with_manifest(case).glob("*.npy"))[case.rng.randrange(6)]
    spare = path.read_bytes()
    flip(path, case, first=_HEADER)
    output = case.ends(case.run.start(), USER)
    case.says(output, str(path))
    path.write_bytes(spare)
    resumes(case)


def flipped_in_bare_shard(case: Case) -> None:
    """Flip a bit in a shard without hashes: found only if the token is outside the vocabulary."""
    path = sorted((case.own_tokens() / data.TRAINING).iterdir())[case.rng.randrange(6)]
    spare = path.read_bytes()
    flip(path, case, first=_HEADER)
    output = case.ends(case.run.start(), 0, USER)
    is_detected = case.codes[-1] == USER
    case.notes["detected"] = is_detected
    if is_detected:
        case.says(output, str(path))
        path.write_bytes(spare)
        resumes(case)
    else:
        require(case.run.last_logged() == STEPS, "steps are missing")
        case.identical = case.run.curve() == case.undisturbed().curve()


def flipped_in_manifest(case: Case) -> None:
    """Flip a bit in the manifest: refused, or without an effect on what is trained."""
    path = with_manifest(case) / "manifest.json"
    spare = path.read_bytes()
    flip(path, case)
    output = case.ends(case.run.start(), 0, USER)
    case.notes["detected"] = case.codes[-1] == USER
    if case.codes[-1] == USER:
        require("manifest" in output or ".npy" in output, f"not named: {output[-1500:]}")
        path.write_bytes(spare)
        case.goes_on()
    case.matches(case.undisturbed())


def flipped_in_replica(copies: Sequence[int], *said: str) -> Callable[[Case], None]:
    """Flip a bit in files of process 0 in the memory of hosts, after both processes were killed.

    Args:
        copies: hosts whose copies are harmed; host 0 holds its own, host 1 the peer's.
        said: texts of the log.
    """

    def scenario(case: Case) -> None:
        hosts = [case.run.directory.with_name(f"host_{i}") for i in range(2)]
        variations = {
            i: Variation(overrides=[f"--checkpoint.replica_dir={host}"])
            for i, host in enumerate(hosts)
        }
        settings = [f"--checkpoint.replica_interval={INTERVAL}", "--checkpoint.interval=50",
                    "--distributed.dp_shard=2"]  # fmt: skip
        step = case.rng.randrange(75, STEPS - 20)
        fault = ("signal_in_step", {"step": step, "number": signal.SIGKILL})
        case.run.n, case.run.variations = 2, variations
        case.ends(case.run.start(*settings, fault=fault),
                  KILLED, 1, -signal.SIGABRT)  # fmt: skip
        newest = max(_complete(hosts[0]) & _complete(hosts[1]))
        at = None  # the same byte: copies that are damaged in different blocks mend each other
        for i in copies:
            (path,) = hosts[i].rglob(f"step_{newest}.*/0.data")
            at = case.rng.randrange(path.stat().st_size) if at is None else at
            flip(path, case, at, at + 1)
        job = case.run.start(*settings)
        require(set(job.wait()) == {0}, f"does not go on: {job.tail()}")
        output = job.output()
        resumed = int(re.findall(r"resuming from (?:the replica of )?step (\d+)", output)[-1])
        case.notes["steps before the replica"] = newest - resumed
        require(resumed == newest if len(copies) < 2 else resumed < newest, f"from {resumed}")
        case.says(output, *said)
        case.matches(case.undisturbed("--distributed.dp_shard=2"))

    return scenario


def _complete(host: Path) -> set[int]:
    """Return the steps whose files of both processes are on a host."""
    groups = [path.parent for path in host.rglob("step_*/0.json")]
    return {int(re.findall(r"step_(\d+)\.", group.name)[0]) for group in groups
            if (group / "1.json").exists()}  # fmt: skip


_NEWEST = f"checkpoints/step_{HALF}"
_SOUND = "resumes bit for bit, or names the file"

DAMAGE_KINDS = (
    Kind("flipped bit: config.toml", 12, flipped_in("config.toml"), _SOUND),
    Kind("flipped bit: config of a checkpoint", 8, flipped_in(f"{_NEWEST}/config/*"), _SOUND),
    Kind("flipped bit: metadata of a checkpoint", 8, flipped_in(f"{_NEWEST}/progress/*"), _SOUND),
    Kind("flipped bit: hashes of a checkpoint", 8, flipped_in(f"{_NEWEST}/checksums/*"), _SOUND),
    Kind("flipped bit: indices of a checkpoint", 16,
         flipped_in(f"{_NEWEST}/_*", f"{_NEWEST}/state/_*", f"{_NEWEST}/state/manifest*",
                    f"{_NEWEST}/state/array_metadatas/*"), _SOUND),
    Kind("flipped bit: starts.jsonl", 8, flipped_in("starts.jsonl"), _SOUND),
    Kind("flipped bit: other files of the run", 12,
         flipped_in("*.json", "attempts*", "progress.txt", "logs/*"), _SOUND),
    Kind("flipped bit: metrics.jsonl", 12, flipped_in_metrics, "all other lines are kept"),
    Kind("flipped bit: shard with hashes", 10, flipped_in_shard, "names the file"),
    Kind("flipped bit: shard without hashes", 6, flipped_in_bare_shard,
         "not found, unless outside the vocabulary"),
    Kind("flipped bit: manifest of the data", 10, flipped_in_manifest, _SOUND),
    Kind("two processes: flipped bit in a replica", 4,
         flipped_in_replica([0], "restored step"), "the peer's copy is used", n=2),
    Kind("two processes: flipped bit in a peer's copy", 2,
         flipped_in_replica([1], "restored step"), "the own copy is used", n=2),
    Kind("two processes: flipped bits in both copies", 4,
         flipped_in_replica([0, 1], "the next older checkpoint is used"),
         "the next older source is used", n=2),
)  # fmt: skip
