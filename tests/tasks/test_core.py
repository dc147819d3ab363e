"""CORE: accuracies equal plain formulas on any mesh, and the aggregate needs all tasks."""

import json
import logging
import math

import jax
import numpy as np
import pytest

from jaxforge.data.corpus.tokenizer import ByteTokenizer, train_bpe
from jaxforge.errors import UserError
from jaxforge.tasks.core import CORE_TASKS, CoreBundle
from jaxforge.tasks.opening import open_tasks
from tests.conftest import tiny_config
from tests.helpers import drawn, setup
from tests.tasks import core_bundle

N = 5  # documents of each task


def config(bundle, **sections):
    evaluation = {"enabled": True, "tasks_core": str(bundle), "tasks_batch_size": 16}
    return tiny_config(
        model={"vocab_size": 264},
        train={"grad_accum_steps": 2},
        eval={**evaluation, **sections.pop("eval", {})},
        **sections,
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return core_bundle.write_bundle(tmp_path_factory.mktemp("bundle"), n=N)


def evaluate(job, tokenizer=None, stop=lambda: False):
    """Return the metrics of all tasks for random parameters."""
    program = setup(job)
    tasks = open_tasks(job, program.mesh, program.model, tokenizer or ByteTokenizer())
    with program.context():
        params = program.state(sharp_parameters(job)).variables
        results = {name: tasks.evaluate(name, params, stop) for name in tasks.names}
    return tasks.metrics(results)


def sharp_parameters(job):
    """Return random parameters of large scale, whose answers differ and are not near ties."""
    return jax.tree.map(lambda leaf: 4 * leaf if leaf.ndim > 1 else leaf, drawn(job))


@pytest.fixture(scope="module")
def reference(bundle):
    """Return the hits of each task by plain formulas, on one device."""
    job = config(bundle)
    program, longest = setup(job), job.model.max_seq_len
    params = jax.device_put(sharp_parameters(job))

    @jax.jit
    def forward(ids):
        hidden, _ = program.model.forward(params, {"input_ids": ids[None]})
        return jax.nn.log_softmax(program.model.logits(params, hidden)[0])

    def log_probabilities(ids):
        with program.context():
            return np.asarray(forward(np.pad(ids, (0, longest - len(ids)))))

    def hits(label, limit=None, tokenizer=None):
        return core_bundle.hits(
            label, N, log_probabilities, tokenizer or ByteTokenizer(), longest, limit
        )

    return hits


MESHES = [
    pytest.param({}, marks=pytest.mark.slow),
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    pytest.param({"pp": 2, "dp_shard": 2}, marks=pytest.mark.slow),
    pytest.param({"cp": 2, "ep": 2, "dp_shard": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_core_equals_plain_formulas_on_any_mesh(bundle, reference, mesh):
    metrics = evaluate(config(bundle, distributed=mesh))
    centered, errors = [], []
    for label in CORE_TASKS:
        hits = np.array(reference(label), float)
        chance = core_bundle.CHANCE.get(label, 0) / 100
        error = hits.std(ddof=1) / math.sqrt(N)
        assert metrics[f"eval/tasks/core/{label}/acc"] == pytest.approx(hits.mean()), label
        assert metrics[f"eval/tasks/core/{label}/acc_stderr"] == pytest.approx(error), label
        centered.append((hits.mean() - chance) / (1 - chance))
        errors.append(error / (1 - chance))
        assert metrics[f"eval/tasks/core/{label}/centered_acc"] == pytest.approx(centered[-1])
    assert metrics["eval/tasks/core"] == pytest.approx(np.mean(centered))
    assert metrics["eval/tasks/core_stderr"] == pytest.approx(np.linalg.norm(errors) / 22)
    accuracies = {metrics[f"eval/tasks/core/{label}/acc"] for label in CORE_TASKS}
    assert len(accuracies) > 3


def test_common_tokens_of_choices_are_those_of_the_tokenizer(bundle, reference):
    """Words begin with their space, so that common texts and common tokens end elsewhere."""
    words = " ".join((*core_bundle.WORDS, "quick", "ran.", *"ate"))
    bpe = train_bpe([f"{words}{core_bundle.DELIMITER}{words} " * 4], 264)
    metrics = evaluate(config(bundle), bpe)
    for label in CORE_TASKS:
        hits = reference(label, tokenizer=bpe)
        assert metrics[f"eval/tasks/core/{label}/acc"] == pytest.approx(np.mean(hits)), label


def test_limit_takes_first_documents_of_shuffled_order(bundle, reference):
    metrics = evaluate(config(bundle, eval={"tasks_limit": 2}))
    for label in CORE_TASKS:
        hits = reference(label, limit=2)
        assert metrics[f"eval/tasks/core/{label}/acc"] == pytest.approx(np.mean(hits)), label


def test_parts_of_task_share_programs_and_results(bundle, monkeypatch):
    whole = evaluate(config(bundle))
    monkeypatch.setattr("jaxforge.tasks.core._BATCHES", 1)
    assert evaluate(config(bundle, eval={"tasks_batch_size": 2})) == whole


def test_stop_between_batches_gives_no_result(bundle):
    job = config(bundle)
    program = setup(job)
    tasks = open_tasks(job, program.mesh, program.model, ByteTokenizer())
    with program.context():
        params = program.state().variables
        assert tasks.evaluate("core/copa", params, lambda: True) is None
        assert tasks.evaluate("core/copa", params, lambda: False) is not None


def test_missing_tasks_are_named_and_core_is_not_logged(tmp_path, caplog):
    path = core_bundle.write_bundle(tmp_path, n=2, labels=["copa", "piqa", "boolq"])
    (path / "eval_data" / "some" / "piqa.jsonl").unlink()
    with caplog.at_level(logging.WARNING):
        bundle = CoreBundle.open(str(path))
    assert [description.label for description in bundle.descriptions] == ["boolq", "copa"]
    assert "20 of 22 tasks of CORE are missing" in caplog.text
    assert "piqa (no file eval_data/some/piqa.jsonl)" in caplog.text
    assert "squad (not in core.yaml)" in caplog.text
    results = {f"core/{x}": {f"core/{x}": {"acc": 1.0}} for x in ("boolq", "copa")}
    assert bundle.aggregate(results) == {}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("core.yaml", "icl_tasks: [{label: copa}]", r"core.yaml is not a list of tasks"),
        ("core.yaml", "a: [", r"core.yaml is not a list of tasks"),
        ("eval_meta_data.csv", "Task,Chance\ncopa,50\n", r'must have the columns "Eval Task"'),
        ("eval_data/some/copa.jsonl", '{"query": "x"}\n',
         r"copa.jsonl:1 is not a document of a multiple_choice task"),
        ("eval_data/some/copa.jsonl", json.dumps({"query": "", "choices": ["a"], "gold": 1}),
         r"copa.jsonl:1 is not a document"),
        ("eval_data/some/copa.jsonl", "\n", r"copa.jsonl has 0 documents, too few"),
    ],
)  # fmt: skip
def test_broken_bundle_raises_before_run(tmp_path, file, content, message):
    path = core_bundle.write_bundle(tmp_path, n=2, labels=["copa"])
    (path / file).write_text(content)
    with pytest.raises(UserError, match=message):
        CoreBundle.open(str(path)).tasks(None, None)


def test_missing_directory_and_tokenizer_raise(bundle, tmp_path):
    with pytest.raises(UserError, match=r"core.yaml cannot be read: .*; did you mean"):
        CoreBundle.open(str(bundle).replace("bundle", "bumdle"))
    with pytest.raises(UserError, match=r"eval.tasks_core needs a tokenizer. Set data.tokenizer"):
        open_tasks(config(bundle), None, None, None)
