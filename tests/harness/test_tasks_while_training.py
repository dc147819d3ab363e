"""Tasks of lm_eval during training: results of lm_eval's backend "hf" on the export of the step."""

import json
import random

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[lm-eval]'")
pytest.importorskip("accelerate", reason="lm_eval's hf is not installed: pip install 'lm_eval[hf]'")
pytest.importorskip("torch")

import datasets
import huggingface_hub
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from jaxforge.cli.running import run_main
from jaxforge.commands import train
from jaxforge.data.corpus.tokenizer import ByteTokenizer
from jaxforge.exit_codes import Exit
from jaxforge.tasks.opening import open_tasks
from jaxforge.training import launch
from jaxforge.training.callbacks.callback import Callback
from tests.conftest import tiny_config
from tests.harness.conftest import SENTENCE, train_command
from tests.helpers import cli, setup

COLORS = ("red", "brown", "green", "blue", "grey", "dark", "light")
CHOICES = [{"question": f"Is it {color}?", "choices": ["no", "yes"], "answer": int(i % 3 == 1)}
           for i, color in enumerate(COLORS)]  # fmt: skip
ENDINGS = [{"question": SENTENCE[:at].strip(), "answer": " " + SENTENCE[at:].split()[0]}
           for at in (9, 15, 19, 25, 30, 34)]  # fmt: skip
SHOTS, LIMIT = 2, 5
METRICS = {
    "local_choices": ["acc", "acc_norm"], "local_endings": ["perplexity", "acc"],
    "local_group": ["acc"],
}  # fmt: skip


def write_tasks(path):
    """Write a task of choices, a task of last words, and a group of both."""
    common = {"dataset_path": "json", "test_split": "test", "fewshot_split": "test",
              "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}  # fmt: skip
    kinds = {
        "local_choices": (CHOICES, {"output_type": "multiple_choice",
                                    "doc_to_choice": "{{choices}}"}),
        "local_endings": (ENDINGS, {"output_type": "loglikelihood"}),
    }  # fmt: skip
    for name, (documents, more) in kinds.items():
        file = path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(document) + "\n" for document in documents))
        metrics = [{"metric": metric} for metric in METRICS[name]]
        task = {"task": name, "dataset_kwargs": {"data_files": {"test": str(file)}},
                "metric_list": metrics, **common, **more}  # fmt: skip
        (path / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    group = {"group": "local_group", "task": ["local_choices", "local_endings"],
             "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}  # fmt: skip
    (path / "local_group.yaml").write_text(json.dumps(group))


@pytest.fixture(scope="module")
def root(corpus):
    (corpus / "tasks").mkdir()
    write_tasks(corpus / "tasks")
    return corpus


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def command(root, name, *options):
    return train_command(root, root / name, "--train.max_steps=20", *options)


def with_tasks(root, tasks):
    return ["--eval.enabled=true", f"--eval.tasks={json.dumps(tasks)}", "--eval.interval=10",
            f"--eval.tasks_path={root / 'tasks'}", f"--eval.tasks_num_fewshot={SHOTS}",
            f"--eval.tasks_limit={LIMIT}", "--eval.tasks_batch_size=8"]  # fmt: skip


def logged(root, name):
    rows = map(json.loads, (root / name / "metrics.jsonl").read_text().splitlines())
    return {
        (row["step"], key): value
        for row in rows
        for key, value in row.items()
        if key.startswith("eval/") or key == "train/loss"
    }


class States(Callback):
    """States of the global random generators around evaluations."""

    def __init__(self):
        self.states = []

    def on_eval_begin(self, step):
        self._begun = self._state()

    def on_eval_end(self, metrics, step):
        self.states.append((self._begun, self._state()))

    @staticmethod
    def _state():
        return random.getstate(), repr(np.random.get_state())


TASKS = list(METRICS)
MESH = ["--distributed.dp_replicate=2", "--distributed.dp_shard=2", "--distributed.tp=2"]


def test_tasks_equal_lm_eval_on_export_of_step(root, capfd, monkeypatch):
    log = States()
    config = train.parse_command_line(command(root, "run", *with_tasks(root, TASKS), *MESH))
    assert launch.fit(config, [log]) is Exit.COMPLETED
    assert len(log.states) == 2
    assert all(before == after for before, after in log.states)
    ours, output = logged(root, "run"), capfd.readouterr()
    assert "bootstrapping" not in output.out
    assert "it/s" not in output.err
    to = root / "export"
    cli(["convert", str(root / "run"), str(to), "--to", "hf", "--dtype", "float32"])
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # lm_eval forks for its standard errors
    theirs = lm_eval.simple_evaluate(
        HFLM(str(to), device="cpu", batch_size=4), tasks=["local_group"],
        task_manager=TaskManager(include_path=str(root / "tasks"), include_defaults=False),
        num_fewshot=SHOTS, limit=LIMIT, bootstrap_iters=1000,
    )  # fmt: skip
    for name, metrics in METRICS.items():
        for metric in metrics:
            expected = theirs["results"][name][f"{metric},none"]
            assert ours[20, f"eval/tasks/{name}/{metric}"] == pytest.approx(expected, rel=1e-5)
            error = ours[20, f"eval/tasks/{name}/{metric}_stderr"]
            if metric != "perplexity":  # of other random samples
                expected = theirs["results"][name][f"{metric}_stderr,none"]
                assert error == pytest.approx(expected, rel=1e-5)
            assert error >= 0
    assert ours[20, "eval/tasks/local_endings/perplexity_stderr"] > 0
    assert (
        ours[10, "eval/tasks/local_endings/perplexity"]
        > ours[20, "eval/tasks/local_endings/perplexity"]
    )

    assert train.main(command(root, "plain", *MESH)) == 0
    losses = {key: value for key, value in ours.items() if key[1] == "train/loss"}
    assert losses == logged(root, "plain")


def test_file_names_task_and_each_evaluation_asks_the_same(root):
    name = str(root / "tasks" / "local_choices.yaml")
    assert train.main(command(root, "file", *with_tasks(root, [name]), "--optimizer.lr=1e-30")) == 0
    ours = logged(root, "file")
    assert {key for _, key in ours if key.startswith("eval/")} == {
        f"eval/tasks/local_choices/{metric}{end}"
        for metric in METRICS["local_choices"]
        for end in ("", "_stderr")
    }
    for _, key in ours:
        if key.startswith("eval/"):
            assert ours[10, key] == ours[20, key]


@pytest.fixture(scope="module")
def lowest(root):
    """A directory with a task whose accuracy is better when it is lower, and a group with it."""
    path = root / "lowest"
    path.mkdir()
    write_tasks(path)
    task = json.loads((path / "local_choices.yaml").read_text())
    metrics = [{"metric": "acc", "higher_is_better": False}, {"metric": "acc_norm"},
               {"metric": "brier_score"}]  # fmt: skip
    filters = [{"name": name, "filter": [{"function": "take_first"}]} for name in ("none", "cut")]
    task |= {"task": "own", "metric_list": metrics, "filter_list": filters}
    (path / "own.yaml").write_text(json.dumps(task))
    group = {"group": "mixed", "task": ["own", "local_choices"], "aggregate_metric_list": [
        {"metric": "acc", "filter_list": ["none"]}, {"metric": "acc_norm"}]}  # fmt: skip
    (path / "mixed.yaml").write_text(json.dumps(group))
    return path


def test_directions_are_those_of_lm_eval(lowest):
    names = ["local_endings", "local_group", "own", "mixed"]
    section = {"enabled": True, "tasks": names, "tasks_path": str(lowest)}
    job = tiny_config(model={"vocab_size": 264}, eval=section)
    program = setup(job)
    tasks = open_tasks(job, program.mesh, program.model, ByteTokenizer())
    assert tasks.directions() == {
        "eval/tasks/local_endings/perplexity": False, "eval/tasks/local_endings/acc": True,
        "eval/tasks/local_group/acc": True,
        "eval/tasks/own/acc": False, "eval/tasks/own/cut/acc": False,
        "eval/tasks/own/acc_norm": True, "eval/tasks/own/cut/acc_norm": True,
        "eval/tasks/own/brier_score": False, "eval/tasks/own/cut/brier_score": False,
        "eval/tasks/mixed/acc": None, "eval/tasks/mixed/acc_norm": True,
        "eval/tasks/mixed/cut/acc_norm": True,
    }  # fmt: skip


def test_run_compares_metrics_as_lm_eval_does(root, lowest, capsys):
    def options(metric):
        return ["--eval.enabled=true", f"--eval.tasks={metric.split('/')[2]}", "--eval.interval=5",
                f"--eval.tasks_path={lowest}", "--early_stop.active=true",
                "--early_stop.target=2", f"--early_stop.metric={metric}"]  # fmt: skip

    config = train.parse_command_line(command(root, "low", *options("eval/tasks/own/cut/acc")))
    assert launch.fit(config) is Exit.EARLY_STOPPED
    metrics = logged(root, "low")
    assert {step for step, key in metrics if key.startswith("eval/")} == {5}
    keys = {key for _, key in metrics if key.startswith("eval/") and not key.endswith("_stderr")}
    assert keys == {
        f"eval/tasks/own/{name}{metric}"
        for name in ("", "cut/")
        for metric in ("acc", "acc_norm", "brier_score")
    }
    other = f"--checkpoint.dir={root / 'other'}"
    error = message_of(root, capsys, other, *options("eval/tasks/mixed/acc"))
    assert "the direction of this metric is unknown. Set early_stop.mode" in error
    error = message_of(root, capsys, other, *options("eval/tasks/own/accuracy"))
    assert "is not a metric of a task; did you mean" in error


def broken(root, name, **change):
    """Write a variant of the task of choices to a directory of its own."""
    task = json.loads((root / "tasks" / "local_choices.yaml").read_text()) | change
    directory = root / name
    directory.mkdir()
    (directory / f"{name}.yaml").write_text(json.dumps(task | {"task": name}))
    return [f"--eval.tasks_path={directory}", f"--eval.tasks={name}"]


def message_of(root, capsys, *options):
    """Return the message of a start that is refused before anything is trained."""
    argv = command(root, "refused", "--eval.enabled=true", *options)
    assert run_main(lambda: train.main(argv)) == 2
    assert not (root / "refused" / "metrics.jsonl").exists()
    return capsys.readouterr().err


def test_unknown_names_raise_before_run(root, capsys):
    own = f"--eval.tasks_path={root / 'tasks'}"
    error = message_of(root, capsys, "--eval.tasks=lambada_opnai", own)
    assert not (root / "refused").exists()  # before parameters are initialized
    assert '"lambada_opnai" is not a task of lm_eval' in error
    assert "did you mean lambada_openai" in error
    error = message_of(root, capsys, f"--eval.tasks={root / 'tasks' / 'local_choice.yaml'}")
    assert "does not exist; did you mean" in error
    error = message_of(root, capsys, "--eval.tasks=a.yaml", "--eval.tasks_path=nowhere")
    assert 'eval.tasks_path = "nowhere" is not a directory' in error


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("no_data", {"dataset_kwargs": {"data_files": {"test": "/nowhere/x.jsonl"}}},
         '"no_data" cannot be loaded: FileNotFoundError'),
        ("hub", {"dataset_path": "someone/not_cached", "dataset_kwargs": {}},
         "Without a network they must be in the cache of Hugging Face"),
        ("one_document", {"doc_to_text": "{{1 // (question|length - 12)}}"},
         'the requests of "one_document" cannot be built: ZeroDivisionError'),
        ("too_long", {"doc_to_choice": ["word " * 300, "b"]}, "more than the 64 that the model"),
        ("samples", {"output_type": "generate_until",
                     "generation_kwargs": {"num_beams": 2, "max_gen_toks": 4}},
         "unsupported generation arguments: num_beams"),
        ("no_room", {"output_type": "generate_until", "generation_kwargs": {"max_gen_toks": 64}},
         "max_gen_toks = 64 leaves no room for a context"),
    ],
)  # fmt: skip
def test_tasks_that_cannot_be_evaluated_raise_before_run(root, capsys, name, change, message):
    assert message in message_of(root, capsys, *broken(root, name, **change))
