"""Every script of examples/ does what it says."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge import inference
from jaxforge.aux_outputs import LossWeights
from jaxforge.commands.prepare import main as prepare
from jaxforge.commands.train import main
from jaxforge.config.model import ModelConfig
from jaxforge.data.sources import open_training_data
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.model.transformer import Model, build_model
from jaxforge.optim.optimizer import build_optimizer, learning_rate
from jaxforge.step.losses import build_loss
from tests.conftest import tiny_config
from tests.processes.conftest import environment

pytestmark = pytest.mark.usefixtures("two_devices")

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def examples(monkeypatch, own_names):
    """Make examples/ importable, as from a script there, for one test."""
    monkeypatch.syspath_prepend(EXAMPLES)
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


SCRIPTS = sorted(EXAMPLES.glob("*.py"))
TAKES = {"distillation": ["teacher"], "preference": ["reference", "pairs.jsonl"]}
"""Words that a script takes before its settings."""


def run_script(path, arguments, monkeypatch):
    """Run a script of examples/ in this process, and return its exit code."""
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    return end.value.code


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_example_without_arguments_answers_one_message(path, monkeypatch, capsys):
    assert run_script(path, [], monkeypatch) == 2
    assert re.fullmatch(r"error: .+\n", capsys.readouterr().err)


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if path.stem != "textbook"], ids=lambda path: path.stem
)
@pytest.mark.parametrize("setting", [[], ["--checkpoint.dir=elsewhere"]])
def test_example_has_a_run_directory_of_its_own(path, setting, monkeypatch):
    started = []

    def start(config, callbacks=()):
        started.append(config.known.checkpoint.dir)
        return Exit.COMPLETED

    monkeypatch.setattr("jaxforge.training.launch.train", start)
    monkeypatch.setenv("TEACHER_RUN", "")
    arguments = [*TAKES.get(path.stem, []), "--config", str(ROOT / "configs" / "debug.toml")]
    assert run_script(path, [*arguments, *setting], monkeypatch) == 0
    assert [Path(run).name for run in started] == ["elsewhere" if setting else path.stem]


OVERRIDES = [
    "--model.dim=32", "--train.max_steps=12", "--train.mixed_precision=fp32", "--eval.interval=4",
    "--checkpoint.interval=6", "--metrics.log_interval=1", "--optimizer.lr=3",
    "--scheduler.warmup_steps=11",
]  # fmt: skip


def of_steps(lines):
    return {int(line.split()[1]): line for line in lines if line.startswith("step")}


@pytest.mark.usefixtures("examples")
def test_textbook_loop_keeps_best_and_newest_and_goes_on_exactly(tmp_path):
    import textbook

    lines: list[str] = []
    textbook.main(tmp_path, OVERRIDES, lines.append)
    assert re.fullmatch(r"step {6}0  lr 0\.00e\+00  loss 5\.\d{4}  \|g\| \d+\.\d{3}", lines[0])
    steps = of_steps(lines)
    assert list(steps) == list(range(12))
    scores = [float(line.split()[-1]) for line in lines if line.startswith("  val loss")]
    assert len(scores) == 3
    best = 4 * (1 + int(np.argmin(scores)))
    assert best != 12, "at such a rate, losses rise"
    paths = {path.name for path in (tmp_path / "checkpoints").glob("step_*")}
    assert paths == {f"step_{best}", "step_12"}

    shutil.rmtree(tmp_path / "checkpoints" / "step_12")
    again: list[str] = []
    textbook.main(tmp_path, OVERRIDES, again.append)
    assert again == lines[lines.index(steps[best]) :]

    nothing_left: list[str] = []
    textbook.main(tmp_path, OVERRIDES, nothing_left.append)
    assert nothing_left == []


def test_textbook_loop_is_short():
    assert len((EXAMPLES / "textbook.py").read_text().splitlines()) <= 150


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("cap", [None, 0.5])
def test_custom_loss_is_cross_entropy_with_soft_labels(cap):
    import custom_loss

    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(2, 3, 4)), rng.normal(size=(5, 4))
    labels = np.array([[0, 4, -100], [2, -100, 1]])
    logits = hidden @ head.T if cap is None else cap * np.tanh(hidden @ head.T / cap)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    a = custom_loss.SMOOTHING
    targets = a / 5 + (1 - a) * np.eye(5)[np.maximum(labels, 0)]
    expected = -2.0 * (targets * log_p).sum(-1)[labels >= 0].sum()
    config = tiny_config(train={"loss_fn": "smoothed_cross_entropy"})
    loss = build_loss(config.train, _Single(cap))
    got = loss(
        jnp.float32(head), jnp.float32(hidden), {"labels": jnp.array(labels)}, LossWeights(2.0)
    )
    assert got.loss_terms.keys() == {"smoothed_cross_entropy"}
    np.testing.assert_allclose(got.loss, expected, rtol=1e-5)


@pytest.mark.usefixtures("own_names")
def test_documented_registrations_can_be_built():
    page = (ROOT / "docs" / "library.md").read_text()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "@register" in b]
    exec(block, {"__name__": "page"})
    config = tiny_config(
        optimizer={"name": "optax_adamw", "lr": 2.0}, scheduler={"name": "warmup_from_one"},
        model={"model_type": "scaled_embeddings"}, data={"dataset_type": "counting"},
    )  # fmt: skip
    assert learning_rate(config)(jnp.int32(0)) == 0.5
    model = build_model(config)
    params = jax.jit(model.init)(jax.random.key(0))
    state = build_optimizer(config, model.axes).init(params)
    assert jax.tree.structure(state[1].mu) == jax.tree.structure(params)
    tokens = jnp.zeros((1, 4), jnp.int32)
    plain = Model.embed_tokens(model, params, tokens)
    np.testing.assert_allclose(model.embed_tokens(params, tokens), 8 * plain)
    assert open_training_data(config)[7]["labels"][0] == 8


class _Single:
    """Minimal model for the loss."""

    logits, head_operands = Model.logits, Model.head_operands

    class stack:
        stages = 1

    def __init__(self, cap):
        self.config = ModelConfig(final_logit_softcap=cap)

    def head(self, params):
        return params


@pytest.mark.processes
@pytest.mark.usefixtures("examples")
def test_run_with_the_hook_and_the_loss(tmp_path):
    run = tmp_path / "run"
    command = [
        sys.executable, str(EXAMPLES / "custom_hook.py"), "--config", "configs/debug.toml",
        f"--checkpoint.dir={run}", "--plugins.modules=custom_loss",
        "--train.loss_fn=smoothed_cross_entropy", "--metrics.collect=params_norm",
    ]  # fmt: skip
    env = environment(1, PYTHONPATH=f"{ROOT}:{EXAMPLES}")
    output = subprocess.run(command, cwd=ROOT, env=env, check=True, text=True, capture_output=True)
    assert re.search(r"^step 10: \|g\| of layers \d\.\d{3} \d\.\d{3}$", output.stdout, re.M)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 5.4 < lines[0]["train/loss"] < 5.7
    assert lines[0]["train/params_norm"] > 1
    # What a run names is found again, by whoever opens it.
    trained = inference.open_run(run, devices=jax.devices()[:1])
    assert trained.config.train.loss_fn == "smoothed_cross_entropy"


TWO = [
    "--config", str(ROOT / "configs" / "debug.toml"), "--distributed.dp_shard=2",
    "--train.batch_size=4", "--train.grad_accum_steps=1", "--train.seq_len=64", "--model.dim=32",
    "--model.n_layers=1", "--model.vocab_size=260", "--train.mixed_precision=fp32",
    "--train.max_steps=3", "--metrics.log_interval=1", "--scheduler.warmup_steps=1",
]  # fmt: skip


def steps_of(run):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "train/loss" in row]


@pytest.mark.usefixtures("examples")
def test_answers_are_judged_by_capped_logits():
    import preference as example

    model = build_model(tiny_config(model={"final_logit_softcap": 0.1}))
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    batch = {"labels": tokens, "segment_ids": jnp.repeat(jnp.array([[0, 1]] * 2), 6, axis=1)}
    hidden = jax.jit(model.hidden)(params, tokens)
    products = hidden @ params["output_head"]["proj"]["weight"].T
    log_p = jax.nn.log_softmax(0.1 * jnp.tanh(products / 0.1))
    expected = jnp.take_along_axis(log_p, tokens[..., None], -1).reshape(2, 2, 6).sum(-1)
    result = example.answer_log_p(params, model, hidden, batch)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    uncapped = jnp.take_along_axis(jax.nn.log_softmax(products), tokens[..., None], -1)
    assert np.abs(uncapped.reshape(2, 2, 6).sum(-1) - expected).max() > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("examples")
def test_student_that_is_its_teacher_has_nothing_to_learn_from_it(tmp_path, monkeypatch):
    import distillation as example

    teacher = tmp_path / "teacher"
    assert main([*TWO, f"--checkpoint.dir={teacher}"]) == 0
    monkeypatch.setenv(example.TEACHER, str(teacher))
    own = ["--model.model_type=distilled", "--train.loss_fn=distillation"]
    same = [f"--checkpoint.load_path={teacher}"]
    same.append('--checkpoint.exclude_from_loading=["optimizer","progress"]')
    assert main([*TWO, *own, *same, f"--checkpoint.dir={tmp_path / 'same'}"]) == 0
    first, *others = steps_of(tmp_path / "same")
    assert abs(first["terms/teacher"]) < 1e-6
    assert first["terms/labels"] == pytest.approx(first["train/loss"])
    assert others[-1]["terms/teacher"] > 1e-5
    assert main([*TWO, *own, f"--checkpoint.dir={tmp_path / 'other'}"]) == 0
    assert all(step["terms/teacher"] > 1e-6 for step in steps_of(tmp_path / "other"))


@pytest.mark.usefixtures("examples")
def test_teacher_of_another_vocabulary_is_refused(tmp_path, monkeypatch):
    import distillation as example

    (tmp_path / "config.toml").write_text("[model]\nvocab_size = 300\n")
    config = tiny_config(model={"model_type": "distilled", "vocab_size": 256})
    monkeypatch.setenv(example.TEACHER, str(tmp_path))
    with pytest.raises(UserError, match=r"model.vocab_size = 256 differs from the 300 of the"):
        build_model(config)
    monkeypatch.delenv(example.TEACHER)
    with pytest.raises(UserError, match="the teacher is missing: name its run directory"):
        build_model(config)


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": "a"}', '{"prompt": 1}', '"prompt"'])
def test_line_that_is_no_pair_is_named(line, tmp_path):
    import preference as example

    path = tmp_path / "pairs.jsonl"
    with pytest.raises(UserError, match=r"PAIRS .*pairs.jsonl: .*No such file"):
        example.read_pairs(path)
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path.write_text(f"{json.dumps(good | {'id': 7})}\n{line}\n")
    with pytest.raises(UserError, match=r"pairs.jsonl:2: expected an object with the texts"):
        example.read_pairs(path)
    path.write_text(json.dumps(good | {"id": 7}))
    assert example.read_pairs(path) == [good]


@pytest.mark.slow
@pytest.mark.usefixtures("examples")
def test_answers_that_are_preferred_become_likelier(tmp_path):
    import preference as example

    (tmp_path / "text.txt").write_text("one two three " * 200)
    text, prepared = str(tmp_path / "text.txt"), str(tmp_path / "data")
    assert prepare([text, "--tokenizer", "byte", "--output", prepared]) == 0
    data = [f"--data.dataset_path={tmp_path / 'data' / 'train'}"]
    data.append(f"--data.tokenizer_path={tmp_path / 'data' / 'tokenizer'}")
    run, pairs = tmp_path / "run", tmp_path / "pairs.jsonl"
    assert main([*TWO, *data, f"--checkpoint.dir={run}"]) == 0
    answers = {"prompt": "Which?", "chosen": " This one.", "rejected": " None, thanks."}
    pairs.write_text("\n".join([json.dumps(answers)] * 8))
    settings = [*TWO, f"--checkpoint.dir={tmp_path / 'dpo'}", "--train.max_steps=8"]
    assert example.train_on(run, pairs, [*settings, "--optimizer.lr=3e-2"]) == 0
    first, *_, last = steps_of(tmp_path / "dpo")
    assert first["train/loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert first["model/margin"] == pytest.approx(0, abs=1e-5)
    assert last["model/right"] == 1
    assert last["train/loss"] < first["train/loss"]
