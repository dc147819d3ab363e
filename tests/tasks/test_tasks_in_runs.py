"""Tasks during training: schedules, stopped and killed evaluations, no effect on the run."""

import json
import os
import signal

import numpy as np
import pytest

from jaxforge.config import ineffective_settings, rules
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.tasks.core import CoreTask
from jaxforge.tools.plan.dry_run import open_data
from jaxforge.training import launch
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.summary import schedule_summary
from tests.conftest import tiny_config
from tests.tasks import core_bundle

NAMES = ["copa", "jeopardy", "winograd"]  # one of each type

pytestmark = pytest.mark.usefixtures("one_device")


def config(root, name, **evaluation):
    data, bundle = root / "data", root / "bundle"
    if not data.exists():
        data.mkdir()
        text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 200, np.uint8)
        np.save(data / "a.npy", text.astype(np.uint16))
        core_bundle.write_bundle(bundle, n=4, labels=NAMES)
    sets = {"datasets": {"dataset_path": str(data)}, "steps": 2}
    tasks = {"tasks_core": str(bundle), "tasks_interval": 2, "tasks_batch_size": 16}
    section = {"enabled": True, "interval": 4, **sets, **tasks, **evaluation}
    return tiny_config(
        model={"vocab_size": 264},
        train={"max_steps": 6, "batch_size": 8},
        data={"dataset_path": str(data), "tokenizer_path": "byte", "num_workers": 1},
        eval=section,
        checkpoint={"dir": str(root / name), "interval": 100},
    )


def lines(root, name):
    """Return the logged values by step and metric; a list, because each is logged once."""
    rows = map(json.loads, (root / name / "metrics.jsonl").read_text().splitlines())
    return sorted(
        (row["step"], key, value)
        for row in rows
        for key, value in row.items()
        if key.startswith("eval/") or key in ("train/loss", "train/grad_norm")
    )


def of_tasks(logged):
    return [line for line in logged if line[1].startswith("eval/tasks/")]


def progress(root, name, step):
    path = root / name / "checkpoints" / f"step_{step}" / "progress" / "metadata"
    return json.loads(path.read_text())


class Log(Callback):
    def __init__(self):
        self.events = []

    def on_eval_begin(self, step):
        self.events.append(f"begin {step}")

    def on_eval_end(self, metrics, step):
        self.events.append(f"end {step}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with tasks every 2 steps and a set every 4."""
    root, log = tmp_path_factory.mktemp("tasks"), Log()
    assert launch.fit(config(root, "whole"), [log]) is Exit.COMPLETED
    return root, log.events


def test_tasks_are_logged_at_their_interval(whole):
    root, events = whole
    assert events == ["begin 2", "end 2", "begin 4", "end 4", "begin 6", "end 6"]
    logged = of_tasks(lines(root, "whole"))
    metrics = [f"eval/tasks/core/{name}/{metric}" for name in NAMES
               for metric in ("acc", "acc_stderr", "centered_acc")]  # fmt: skip
    assert [line[:2] for line in logged] == [
        (step, x) for step in (2, 4, 6) for x in sorted(metrics)
    ]
    assert {step for step, name, _ in lines(root, "whole") if name == "eval/loss"} == {4}


def test_tasks_do_not_change_run(whole):
    root, _ = whole
    assert launch.fit(config(root, "plain", tasks_core="", datasets=(), enabled=False)) is (
        Exit.COMPLETED
    )
    plain = lines(root, "plain")
    assert plain == [line for line in lines(root, "whole") if line[1].startswith("train/")]


def test_tasks_need_no_evaluation_set(whole):
    root, _ = whole
    assert launch.fit(config(root, "alone", datasets=())) is Exit.COMPLETED
    logged = lines(root, "alone")
    assert of_tasks(logged) == of_tasks(lines(root, "whole"))
    assert not [line for line in logged if line[1] == "eval/loss"]


# Within the first task, and between the next two.
@pytest.mark.slow
@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_signal_within_tasks_resumes_there(whole, monkeypatch, at):
    root, _ = whole
    name, evaluate, count = f"stopped{at}", CoreTask.evaluate, 0

    def with_signal(task):
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(task)

    first, second, finished = Log(), Log(), [f"core/{x}" for x in NAMES[: at - 1]]
    with monkeypatch.context() as patch:
        patch.setattr(CoreTask, "evaluate", with_signal)
        assert launch.fit(config(root, name), [first]) is Exit.SIGNAL
    stored = progress(root, name, 2)["validation"]
    assert stored["pending_tasks"][0] == f"core/{NAMES[at - 1]}"
    assert list(stored["results"]) == finished
    assert not of_tasks(lines(root, name))
    assert launch.fit(config(root, name), [second]) is Exit.COMPLETED
    assert lines(root, name) == lines(root, "whole")
    assert [*first.events, *second.events] == whole[1]


def test_killed_evaluation_is_repeated_once(whole, monkeypatch):
    root, _ = whole
    evaluate = CoreTask.evaluate

    def failing(task):
        if task.name == "core/jeopardy":
            raise ZeroDivisionError
        return evaluate(task)

    with monkeypatch.context() as patch:
        patch.setattr(CoreTask, "evaluate", failing)
        with pytest.raises(ZeroDivisionError):
            launch.fit(config(root, "killed"))
    assert launch.fit(config(root, "killed")) is Exit.COMPLETED
    assert lines(root, "killed") == lines(root, "whole")


@pytest.mark.slow
def test_average_is_evaluated_on_tasks(whole):
    root, _ = whole
    job = config(root, "ema", tasks_weights="ema", tasks_interval=6, interval=6)
    job = job.model_copy(update={"train": job.train.model_copy(update={"ema_decay": 0.5})})
    assert launch.fit(job) is Exit.COMPLETED
    names = {name for _, name, _ in of_tasks(lines(root, "ema"))}
    assert "eval/tasks/core/copa/ema_acc" in names
    assert "eval/tasks/core/copa/acc" not in names


def with_keys(job, section, **keys):
    return job.model_copy(update={section: getattr(job, section).model_copy(update=keys)})


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "exit_reason"), [("auto", Exit.EARLY_STOPPED),
                                                   ("min", Exit.COMPLETED)])  # fmt: skip
def test_metric_of_task_stops_run_at_target(whole, mode, exit_reason):
    root, _ = whole
    job = with_keys(
        config(root, f"target_{mode}"), "early_stop", target=-5.0,
        metric="eval/tasks/core/copa/centered_acc", mode=mode,
    )  # fmt: skip
    assert launch.fit(job) is exit_reason


@pytest.mark.parametrize(("mode", "stated", "best"), [
    ("auto", True, (4, 0.75)), ("min", True, (2, 0.25)), ("auto", False, (2, 0.25)),
])  # fmt: skip
def test_metric_of_task_ranks_checkpoints_and_stops_run(whole, monkeypatch, mode, stated, best):
    root, _ = whole
    accuracies = iter((0.25, 0.75, 0.5))
    monkeypatch.setattr(CoreTask, "evaluate", lambda task: {task.name: {"acc": next(accuracies)}})
    monkeypatch.setattr(CoreTask, "directions", lambda task: {task.name: {"acc": stated}})
    name, metric = f"best_{mode}_{stated}", "eval/tasks/core/copa/acc"
    job = config(root, name, tasks_core=str(one_task(root)))
    keys = {"best_metric": metric, "best_mode": mode}
    job = with_keys(job, "checkpoint", keep_last_n=1, keep_best_n=1, **keys)
    job = with_keys(job, "early_stop", metric=metric, mode=mode, patience_steps=3)
    is_stopped = best[0] == 2  # no better value for four steps
    assert launch.fit(job) is (Exit.EARLY_STOPPED if is_stopped else Exit.COMPLETED)
    steps = {path.name for path in (root / name / "checkpoints").iterdir()}
    assert steps == {f"step_{best[0]}", "step_6"}
    stored = progress(root, name, 6)
    assert (stored["best_step"], stored["best_metric"]) == best


def one_task(root):
    path = root / "one_task"
    return path if path.exists() else core_bundle.write_bundle(path, n=4, labels=["copa"])


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("eval/tasks/core/copa/ac", r'is not a metric of a task; did you mean "eval/tasks/core/co'),
        ("eval/tasks/core", r'is not a metric of a task'),  # tasks of CORE are missing
    ],
)  # fmt: skip
def test_unknown_metric_of_task_raises_before_run(whole, metric, message):
    root, _ = whole
    job = with_keys(config(root, "unknown"), "checkpoint", best_metric=metric)
    with pytest.raises(UserError, match=message):
        launch.fit(job)
    assert not (root / "unknown" / "metrics.jsonl").exists()


def test_summary_lists_tasks(whole):
    text = schedule_summary(config(whole[0], "x"), 1)
    assert "every 2 updates, tasks CORE" in text


ENABLED = ["--eval.enabled=true", "--eval.tasks=piqa"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eval.tasks_weights=ema"], r'eval.tasks_weights = "ema" requires train.ema_decay'),
        (['--eval.tasks=["piqa", "piqa"]'], "tasks contains a name twice"),
        (["--eval.tasks=[]", "--eval.dataset_path=x",
          "--checkpoint.best_metric=eval/tasks/piqa/acc"],
         r'best_metric = "eval/tasks/piqa/acc" is a metric of a task, and there are no tasks'),
        (["--checkpoint.keep_best_n=2"], "keep_best_n ranks by .* requires an evaluation set"),
        (["--early_stop.active=true", "--early_stop.patience_steps=5"],
         r'early_stop.metric = "eval/loss" requires an evaluation set'),
        (["--eval.tasks=[]", "--eval.dataset_path=x", "--early_stop.active=true",
          "--early_stop.target=5", "--early_stop.metric=eval/tasks/piqa/acc"],
         r"early_stop.metric = .* and there are no tasks: set eval.tasks or eval.tasks_core"),
        (["--early_stop.active=true", "--early_stop.target=5", "--early_stop.metric=train/lr"],
         r'early_stop.metric = "train/lr": the direction of this metric is unknown. Set early_st'),
    ],
)  # fmt: skip
def test_settings_that_tasks_exclude_raise(options, message):
    with pytest.raises(UserError, match=message):
        rules.check(load_config(None, [*ENABLED, *options]), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eval.enabled=false"], "eval.tasks has no effect with eval.enabled = false"),
        (["--eval.tasks_interval=500"], "eval.tasks_interval = 500 exceeds train.max_steps = 100"),
        (["--eval.interval=40", "--eval.start_step=95"], "eval.start_step = 95 leaves no multiple"),
    ],
)
def test_tasks_that_never_run_are_warned_of(options, message):
    job = load_config(None, [*ENABLED, "--train.max_steps=100", *options])
    rules.check(job, 1)
    warnings = ineffective_settings.ineffective_settings(job, "cpu")
    assert [warning for warning in warnings if message in warning]


def test_missing_lm_eval_names_the_command(whole, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lm_eval, which is not installed: pip install 'jaxforge"):
        launch.fit(config(whole[0], "without", tasks=["piqa"]))


def test_dry_run_describes_tasks(whole):
    root, _ = whole
    job = config(root, "dry")
    _, rows = open_data(job, opens=True, is_elsewhere=False)
    assert rows[-1] == "tasks: 3 of 22 of CORE"
    assert open_data(job, opens=True, is_elsewhere=True)[1] == rows[:-1]
