"""Faults of jobs with other meshes, models, data and averages, and of jobs that change meshes."""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.faults import data
from benchmarks.faults.bucket import bucket_of
from benchmarks.faults.case import STEPS, Case
from benchmarks.faults.elastic_kinds import nearly_matches
from benchmarks.faults.kind import (
    GOES_ON,
    LEFT_OUT,
    SAVES,
    STOPPED,
    TERM,
    Kind,
    asked_to_stop,
    killed_anywhere,
    killed_in_save,
    of_job,
    one_bad_step,
    one_is_killed,
    one_is_told_to_stop,
    rolled_back,
)


class JobSettings(NamedTuple):
    """Job of the drill.

    Attributes:
        name: name of the job.
        settings: settings of the job.
        n: number of processes, each with one device.
    """

    name: str
    settings: tuple[str, ...]
    n: int = 1


MOE = (
    "--model.num_experts=4",
    "--model.moe_bias_update=sign",
    "--model.moe_shared_experts=1",
    "--model.moe_expert_dim=64",
)
_MIXTURE = (
    "--data.dataset_path=",
    f"--data.datasets=[{{path='{{tokens}}/{data.TRAINING}',name='a',weight=2}},"
    f"{{path='{{tokens}}/{data.SECOND}',name='b'}}]",
    "--data.phases=[{start_step=50,dataset_weights={a=1,b=4}},"
    "{start_step=123,dataset_weights={a=3,b=1},lr_scale=0.5}]",
    "--data.shuffle=true",
)
EMA = JobSettings("EMA", ("--train.ema_decay=0.95", "--train.ema_dtype=bfloat16"))
MIXTURE = JobSettings("mixture with phases", _MIXTURE)
LORA = JobSettings("LoRA", ("--lora.rank=4", "--lora.dropout=0.1", "--checkpoint.load_path={base}"))
EXPERTS = JobSettings("MoE", MOE)
RAMP = JobSettings(
    "batch ramp",
    (
        "--train.grad_accum_steps=4",
        "--train.batch_ramp=[{start=0,grad_accum_steps=1},{start=33,grad_accum_steps=2},"
        "{start=77,grad_accum_steps=4}]",
        "--scheduler.unit=samples",
    ),
)
FSDP_2 = JobSettings("fsdp 2", ("--distributed.dp_shard=2",), 2)
TP_2 = JobSettings("tp 2", ("--distributed.tp=2",), 2)
PP_2 = JobSettings("pp 2", ("--distributed.pp=2", "--train.grad_accum_steps=2"), 2)
EP_2 = JobSettings("MoE with ep 2", (*MOE, "--distributed.ep=2"), 2)
FSDP_4 = JobSettings("fsdp 4", ("--distributed.dp_shard=4",), 4)
TP_FSDP = JobSettings("tp 2 and fsdp 2", ("--distributed.tp=2",), 4)
PP_FSDP = JobSettings("pp 2 and fsdp 2", ("--distributed.pp=2", "--train.grad_accum_steps=2"), 4)
UNSHARDED = JobSettings("one process", ())
Scenario = Callable[[Case], None]


def of(job: JobSettings, scenario: Scenario) -> Scenario:
    """Return a scenario of a job."""

    def job_scenario(case: Case) -> None:
        base = ""
        if "{base}" in "".join(job.settings):
            base = str(case.shared.undisturbed().directory)
        settings = [setting.replace("{base}", base) for setting in job.settings]
        of_job(scenario, *settings, n=job.n)(case)

    return job_scenario


def moved_to(job: JobSettings) -> Callable[[Case], None]:
    """Return a restart on another mesh: the curve is the same up to rounding."""

    def restart(case: Case) -> None:
        reference = case.undisturbed()
        case.run.job, case.run.n = job.settings, job.n
        case.goes_on()
        nearly_matches(case, reference)

    return restart


def killed_and_moved(strike: Callable[..., None], job: JobSettings) -> Scenario:
    """Return a scenario that kills a run and restarts it on the mesh of another job."""
    return lambda case: strike(case, moved_to(job))


def in_bucket(scenario: Scenario) -> Scenario:
    """Return a scenario of a run in a bucket."""

    def bucket_scenario(case: Case) -> None:
        with bucket_of(case) as bucket:
            bucket.hold_run()
            scenario(case)

    return bucket_scenario


_STOP_IN_STEP = asked_to_stop(TERM, STOPPED, "signal_in_step", step=range(1, STEPS))
_OF_ONE: tuple[tuple[str, int, Scenario, str], ...] = (
    ("kill -9, at any time", 5, killed_anywhere, GOES_ON),
    ("kill -9, during a save", 4, killed_in_save, GOES_ON),
    ("SIGTERM, in a step", 3, _STOP_IN_STEP, SAVES),
)
_OF_SEVERAL: tuple[tuple[str, int, Scenario, str], ...] = (
    ("kill -9 of one", 4, one_is_killed, GOES_ON),
    ("kill -9 of all, at any time", 4, killed_anywhere, GOES_ON),
    ("kill -9 of one, during a save", 3, killed_in_save, GOES_ON),
    ("signal to one", 3, one_is_told_to_stop, SAVES),
)
_NAN = ("NaN loss, skip", 2, one_bad_step("NaN loss"), LEFT_OUT)
_ROLLBACK = ("NaNs in a row, rollback, kill -9", 3, rolled_back("NaN loss", killed=True),
             "as if the span were not there")  # fmt: skip
_MOVES = (
    (FSDP_2, UNSHARDED),
    (TP_2, FSDP_2),
    (PP_2, UNSHARDED),
    (UNSHARDED, FSDP_2),
    (TP_FSDP, TP_2),
    (PP_FSDP, FSDP_2),
)  # fmt: skip
_BOTH = JobSettings("mixture and EMA, in a bucket", (*MIXTURE.settings, *EMA.settings))

JOB_KINDS = (
    *(Kind(f"{job.name}: {name}", count, of(job, scenario), expected, n=job.n)
      for jobs, scenarios in (
          ((MIXTURE, RAMP), _OF_ONE),
          ((LORA,), (*_OF_ONE, _NAN)),
          ((EXPERTS, EMA), (*_OF_ONE, _NAN, _ROLLBACK)),
          ((TP_2, PP_2, EP_2), (*_OF_SEVERAL, _NAN)),
          ((FSDP_2,), (*_OF_SEVERAL, _NAN, _ROLLBACK)),
          ((FSDP_4, TP_FSDP, PP_FSDP), (*_OF_SEVERAL[:1], *_OF_SEVERAL[2:])),
      )
      for job in jobs
      for name, count, scenario, expected in scenarios),
    *(Kind(f"{old.name}, killed, then {new.name}", 3,
           of(old, killed_and_moved(one_is_killed if old.n > 1 else killed_anywhere, new)),
           "the same curve, up to rounding", n=max(old.n, new.n))
      for old, new in _MOVES),
    *(Kind(f"{_BOTH.name}: {name}", 4, of(_BOTH, in_bucket(scenario)), expected)
      for name, _, scenario, expected in _OF_ONE[1:]),
)  # fmt: skip
