"""Faults as schedulers cause them: Slurm requeues a job, Kubernetes replaces a pod.

Slurm's programs are replaced by scripts. A pod is a process in namespaces of its own: it is PID 1,
with its own host name and `/dev/shm`. Its disk is empty; the run is in a bucket.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.faults.bucket import bucket_of
from benchmarks.faults.bucket_kinds import run_in_bucket
from benchmarks.faults.case import ROOT, Case, Job, Variation, require
from benchmarks.faults.kind import (
    GOES_ON,
    KILLED,
    LOST_PEER,
    SAVES,
    STOPPED,
    TERM,
    USR1,
    Kind,
    last_step_is_saved,
    least_saved,
    of_job,
    resumes,
    started,
)

Strike = Callable[[Case, Job], None]
"""Ends a job as a scheduler does."""
Prepare = Callable[[Case, int], None]
"""Prepares the next start, in a new allocation or pod with a number."""

RECIPE = ROOT / "examples" / "launch" / "slurm_one_node.sbatch"
SUPERVISE = (sys.executable, "-m", "jaxforge", "supervise", "--grace=180", "--backoff=0.5", "--")
_GRACE = 200.0  # seconds that a scheduler leaves for a save; many, since the machine may be busy

_SRUN = """#!/bin/bash
# Passes USR1 on to its task; real tasks are killed by TERM.
while [[ $1 == --* ]]; do shift; done
"$@" & task=$!
trap 'kill -USR1 $task' USR1
trap 'kill -KILL $task' TERM
while kill -0 $task 2>/dev/null; do wait $task; code=$?; done
exit $code
"""
_SCONTROL = '#!/bin/bash\necho "$@" >> "$REQUEUED"\n'


def ended_again_and_again(
    prepare: Prepare, strike: Strike, ends: int = 2, start: Callable[[Case], Job] = started
) -> Callable[[Case], None]:
    """Return a scenario in which a scheduler ends a run twice, and then lets it finish."""

    def scenario(case: Case) -> None:
        for number in range(ends):
            prepare(case, number)
            strike(case, start(case))
        prepare(case, ends)
        resumes(case)

    return scenario


def tree(job: Job) -> list[psutil.Process]:
    """Return all processes of a job."""
    processes = []
    for process in job.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            processes += [parent, *parent.children(recursive=True)]
    return processes


def hit(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to processes."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def kill(case: Case, job: Job) -> None:
    """Kill all processes of a job, as when its node fails."""
    logged = case.run.last_logged()
    processes = tree(job)
    while True:  # a stopped process starts no other one
        hit(processes, signal.SIGSTOP)
        if set(more := tree(job)) <= set(processes):
            break
        processes = more
    hit(processes, signal.SIGKILL)
    roots = {process.pid for process in job.processes}
    psutil.wait_procs([process for process in processes if process.pid not in roots], _GRACE)
    case.ends(job, KILLED, 0, STOPPED, *LOST_PEER, noisy=True)
    least_saved(case, logged)


# Slurm


def slurm_environment(case: Case, restart: int) -> dict[str, str]:
    """Return the variables of a job that was requeued `restart` times."""
    number = 100_000 + case.rng.randrange(4096) if restart == 0 else None
    number = number or int(case.run.variations[0].environment["SLURM_JOB_ID"])
    count = {"SLURM_RESTART_COUNT": str(restart)} if restart else {}
    return {"SLURM_JOB_ID": str(number), "SLURM_NODEID": "0", **count}


def batch_script(case: Case, restart: int) -> None:
    """Let the run start by the batch script of the examples."""
    tools = case.shared.root / "slurm"  # names of cases have colons, which PATH separates
    with case.shared.lock:
        if not tools.exists():
            tools.mkdir()
            for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
                (tools / name).write_text(text)
                (tools / name).chmod(0o755)
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**slurm_environment(case, restart), "PATH": path,
                   "REQUEUED": str(requeued(case))}  # fmt: skip
    # The script expects the config and settings alone.
    command = ["bash", "-c", 'shift 4; exec bash "$0" "$@"', str(RECIPE)]
    case.run.variations = {0: Variation(environment=environment, wrapper=command)}


def requeued(case: Case) -> Path:
    """Return the file to which `scontrol` writes its arguments."""
    return case.run.directory.with_name("requeued")


def two_tasks(case: Case, restart: int) -> None:
    """Let the run start as two tasks of a step, which find each other by Slurm's variables."""
    environment = {
        **slurm_environment(case, restart), "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1",
        "JAX_COORDINATOR_ADDRESS": "", "JAX_NUM_PROCESSES": "", "JAX_PROCESS_ID": "",
    }  # fmt: skip
    case.run.variations = {
        task: Variation(
            environment={**environment, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            wrapper=SUPERVISE,
        )
        for task in range(2)
    }


def supervised(case: Case) -> Job:
    """Start a run, and return at a random time after its supervisors have begun."""
    job = started(case)
    case.wait_until(lambda: job.output().count("supervise: start 1") == case.run.n, job)
    return job


def ask_script(case: Case, job: Job) -> None:
    """Send the signal of a time limit or a preemption to the batch script, which requeues it."""
    job.signal(case.rng.choice([USR1, TERM]))
    case.ends(job, STOPPED, 0)
    last_step_is_saved(case)
    calls = requeued(case).read_text() if requeued(case).exists() else ""
    number = case.run.variations[0].environment["SLURM_JOB_ID"]
    expected = f"requeue {number}\n" * case.codes.count(STOPPED)
    require(calls == expected, f"codes {case.codes}, but scontrol was called with {calls!r}")


def preempt(*, grace: bool) -> Strike:
    """Send SIGTERM to all tasks and their children, and SIGKILL after a time for a save or less."""

    def strike(case: Case, job: Job) -> None:
        tasks = [process for process in tree(job) if process.name() not in ("bash", "srun")]
        hit(tasks, signal.SIGCONT)
        hit(tasks, signal.SIGTERM)
        job.wait_at_most(_GRACE if grace else case.rng.uniform(0, 0.3))
        require(job.ended or not grace, f"not saved within {_GRACE:.0f} s: {job.tail()}")
        if job.ended:
            case.ends(job, STOPPED, 0)
            last_step_is_saved(case)
        else:
            kill(case, job)

    return strike


# Kubernetes

_KILLED = (KILLED, 1)  # `unshare` ends with 1 where it fails to kill itself as its child was killed


def pod(command: Sequence[str] = SUPERVISE, name: str = "train-{index}-{number}") -> Prepare:
    """Prepare pods with empty disks, whose first process is `command` or the training."""

    def prepare(case: Case, number: int) -> None:
        variations = {}
        for index in range(case.run.n):
            host = name.format(index=index, number=number)
            disk = case.run.directory.with_name(host)
            (disk / "tmp").mkdir(parents=True, exist_ok=True)
            environment = {"TMPDIR": str(disk / "tmp"), "HOME": str(disk),
                           "JAX_COMPILATION_CACHE_DIR": str(disk / "cache")}  # fmt: skip
            (disk / "hosts").write_text(f"127.0.0.1 localhost {host}\n")
            inside = (
                'hostname "$0" && mount -t tmpfs tmpfs /dev/shm '
                '&& mount --bind "$HOME/hosts" /etc/hosts && exec "$@"'
            )
            spaces = ["--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--mount"]
            wrapper = ["unshare", *spaces, "sh", "-c", inside, host, *command]
            variations[index] = Variation(environment=environment, wrapper=wrapper)
        case.run.variations = variations

    return prepare


def in_pods(
    strike: Strike, command: Sequence[str] = SUPERVISE, start: Callable[[Case], Job] = started
) -> Callable[[Case], None]:
    """Return a scenario in which pods are ended and replaced; the run is in a bucket."""
    scenario = ended_again_and_again(pod(command), strike, start=start)

    def bucket_scenario(case: Case) -> None:
        with bucket_of(case) as bucket:
            run_in_bucket(case, bucket)
            scenario(case)

    return bucket_scenario


def first(job: Job, index: int = 0) -> list[psutil.Process]:
    """Return PID 1 of a pod; none if the pod has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(job.processes[index].pid).children()
    return []


def catches_term(process: psutil.Process) -> bool:
    """Return whether a process has a handler of SIGTERM, without which PID 1 does not get it."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> TERM - 1 & 1)


def kill_pod(case: Case, job: Job) -> None:
    """Kill the first process of a pod, and with it all its processes."""
    hit(first(job), signal.SIGKILL)
    case.ends(job, *_KILLED, STOPPED, 0)


def evict(*, grace: bool) -> Strike:
    """Send SIGTERM to the first process of a pod, and SIGKILL at the end of its grace period."""

    def strike(case: Case, job: Job) -> None:
        case.wait_until(lambda: any(map(catches_term, first(job))), job)
        hit(first(job), signal.SIGTERM)
        job.wait_at_most(_GRACE if grace else case.rng.uniform(0, 0.3))
        if not job.ended:
            require(not grace, f"not ended: {job.tail()}")
            kill_pod(case, job)
            return
        case.ends(job, STOPPED, 0, 128 + TERM)
        last_step_is_saved(case)

    return strike


def replace_both(case: Case, job: Job) -> None:
    """Kill one of two pods; the JobSet then ends the other one and starts both again."""
    victim = case.rng.choice([0, 1])
    hit(first(job, victim), signal.SIGKILL)
    job.wait_at_most(case.rng.uniform(0, 5))
    hit(first(job, 1 - victim), signal.SIGTERM)
    job.wait_at_most(_GRACE)
    hit(first(job, 1 - victim), signal.SIGKILL)
    case.ends(job, *_KILLED, STOPPED, 0, 128 + TERM, noisy=True)


def restoring(case: Case) -> Job:
    """Start a run, and return while it restores its checkpoint, if it has one."""
    if not case.run.durable():
        return started(case)
    job = case.run.start()
    case.wait_until(lambda: "resuming from step" in job.output(), job)
    job.wait_at_most(case.rng.uniform(0, 0.5))
    return job


_IN_POD = ended_again_and_again(pod(name="train"), kill_pod)

SCHEDULER_KINDS = (
    Kind("Slurm: signal to the batch script, requeued twice", 4,
         ended_again_and_again(batch_script, ask_script, start=supervised), SAVES),
    Kind("Slurm: preempted twice, time for a save", 4,
         ended_again_and_again(batch_script, preempt(grace=True), start=supervised), SAVES),
    Kind("Slurm: preempted twice, no time for a save", 4,
         ended_again_and_again(batch_script, preempt(grace=False), start=supervised), GOES_ON),
    Kind("Slurm: node fails twice", 3, ended_again_and_again(batch_script, kill), GOES_ON),
    Kind("Slurm: two tasks, preempted, time for a save", 2, of_job(
         ended_again_and_again(two_tasks, preempt(grace=True), 1, supervised), n=2), SAVES, n=2),
    Kind("Slurm: two tasks, preempted, no time for a save", 2, of_job(
         ended_again_and_again(two_tasks, preempt(grace=False), 1, supervised), n=2),
         GOES_ON, n=2),
    Kind("pod: evicted twice, time for a save", 3, in_pods(evict(grace=True)), SAVES,
         mounts=True),
    Kind("pod: evicted twice, no time for a save", 3, in_pods(evict(grace=False)), GOES_ON,
         mounts=True),
    Kind("pod without supervisor: evicted twice", 3, in_pods(evict(grace=True), ()), SAVES,
         mounts=True),
    Kind("pod: killed twice", 3, in_pods(kill_pod), GOES_ON, mounts=True),
    Kind("pod: killed, and again restoring", 3, in_pods(kill_pod, start=restoring), GOES_ON,
         mounts=True),
    Kind("pod: its container restarts twice", 3, _IN_POD, GOES_ON, mounts=True),
    Kind("two pods: one killed, both replaced", 3, of_job(in_pods(replace_both), n=2), GOES_ON,
         n=2, mounts=True),
)  # fmt: skip
