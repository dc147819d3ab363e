"""Faults of object storage that holds a run or its data."""

import time
from collections.abc import Callable

from benchmarks.faults import data
from benchmarks.faults.bucket import Bucket, bucket_of
from benchmarks.faults.case import INTERVAL, STEPS, Case, Job, require
from benchmarks.faults.damage_kinds import with_manifest
from benchmarks.faults.kind import HALF, STOPPED, STORAGE, Kind, resumes

Put = Callable[[Case, Bucket], None]
"""Puts a part of the job into the bucket."""


def run_in_bucket(case: Case, bucket: Bucket) -> None:
    """Let the run be in the bucket, with fewer checkpoints, since each makes many requests."""
    bucket.hold_run()
    case.run.settings = ["--checkpoint.interval=25"]


def data_in_bucket(case: Case, bucket: Bucket) -> None:
    """Let the training data be in the bucket, with hashes."""
    bucket.upload(with_manifest(case), data.TRAINING)
    case.run.data = [
        f"--data.dataset_path={bucket.url(data.TRAINING)}",
        f"--eval.dataset_path={case.run.tokens / data.HELD_OUT}",
    ]


def endured(put: Put, begin: Callable[[Case, Bucket], None]) -> Callable[[Case], None]:
    """Return a scenario in which the server is faulty through two starts of a run."""

    def scenario(case: Case) -> None:
        with bucket_of(case) as bucket:
            put(case, bucket)
            begin(case, bucket)
            stop = case.rng.randrange(INTERVAL + 1, STEPS - INTERVAL)
            case.ends(case.run.start(f"--train.exit_interval={stop}"), STOPPED)
            begin(case, bucket)
            resumes(case)

    return scenario


def throttle(case: Case, bucket: Bucket) -> None:
    """Refuse a share of the requests."""
    bucket.server.fail(case.rng.randrange(3, 12), (503, 429, 500))


def cut_answers(case: Case, bucket: Bucket) -> None:
    """Truncate a share of the answers."""
    bucket.server.fail(case.rng.randrange(3, 12), ("cut",))


def slow_down(case: Case, bucket: Bucket) -> None:
    """Delay each answer."""
    bucket.server.delay = case.rng.uniform(0.05, 0.3)


def stall(case: Case, bucket: Bucket) -> None:
    """Leave some of the first requests without an answer."""
    bucket.server.stall(case.rng.randrange(1, 4))


def at_step(case: Case, bucket: Bucket) -> Job:
    """Start a run whose bucket vanishes after a step."""
    mark = case.run.directory.with_name("mark")
    fault = ("make_file", {"step": case.rng.randrange(1, HALF), "path": str(mark)})
    job = case.run.start('--plugins.callbacks=["benchmarks.faults.pace.Pace"]', fault=fault)
    case.wait_until(mark.exists, job)
    bucket.vanish()
    return job


def in_restore(case: Case, bucket: Bucket) -> Job:
    """Stop a run, and resume it; the bucket vanishes while the checkpoint is restored."""
    case.ends(case.run.start(f"--train.exit_interval={HALF}"), STOPPED)
    mark = case.run.directory.with_name("mark")
    job = case.run.start(fault=("make_file_in_restore", {"path": str(mark)}))
    case.wait_until(mark.exists, job)
    bucket.vanish()
    return job


def at_start(case: Case, bucket: Bucket) -> Job:
    """Start a run whose bucket is gone."""
    bucket.vanish()
    return case.run.start()


Begin = Callable[[Case, Bucket], Job]


def gone_for_seconds(put: Put, begin: Begin) -> Callable[[Case], None]:
    """Return a scenario in which the server vanishes and returns: nothing happens."""

    def scenario(case: Case) -> None:
        with bucket_of(case) as bucket:
            put(case, bucket)
            job = begin(case, bucket)
            time.sleep(case.rng.uniform(2, 20))
            require(not job.ended, f"ended before the bucket returned: {job.tail()}")
            bucket.mend()
            case.ends(job, 0)
            case.matches(case.undisturbed())

    return scenario


def gone_for_good(put: Put, begin: Begin) -> Callable[[Case], None]:
    """Return a scenario in which the server stays away until the run has ended."""

    def scenario(case: Case) -> None:
        with bucket_of(case) as bucket:
            put(case, bucket)
            job = begin(case, bucket)
            gone = time.monotonic()
            output = case.ends(job, STORAGE, noisy=True, patience=_PATIENCE)
            case.notes["seconds until the end"] = time.monotonic() - gone
            case.says(output, "s3://")
            bucket.mend()
            resumes(case)

    return scenario


_PATIENCE = 900.0
"""Seconds: save, copies of files and lock each wait a minute and a half for the bucket."""

_RETURNS = "resumes when the bucket is back"
_PUTS: tuple[tuple[str, Put], ...] = (("run", run_in_bucket), ("data", data_in_bucket))

BUCKET_KINDS = (
    *(Kind(f"bucket with the {what}: {how}", count, endured(put, begin), "nothing")
      for what, put in _PUTS
      for how, count, begin in (("throttled", 8, throttle), ("truncated answers", 8, cut_answers),
                                ("slow", 4, slow_down))),
    Kind("bucket with the data: requests without an answer", 2, endured(data_in_bucket, stall),
         "nothing"),
    Kind("bucket with the run: gone for seconds", 6, gone_for_seconds(run_in_bucket, at_step),
         "nothing"),
    *(Kind(f"bucket with the {what}: gone for seconds, restoring", 4,
           gone_for_seconds(put, in_restore), "nothing")
      for what, put in _PUTS),
    Kind("bucket with the run: gone for good", 2, gone_for_good(run_in_bucket, at_step), _RETURNS),
    *(Kind(f"bucket with the {what}: gone for good, restoring", 2, gone_for_good(put, in_restore),
           _RETURNS)
      for what, put in _PUTS),
    *(Kind(f"bucket with the {what}: gone at the start", 2, gone_for_good(put, at_start), _RETURNS)
      for what, put in _PUTS),
)  # fmt: skip
