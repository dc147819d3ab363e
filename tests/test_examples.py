"""Scripts of examples/."""

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
from jaxforge.config.model import ModelConfig
from jaxforge.data.sources import open_training_data
from jaxforge.exit_codes import Exit
from jaxforge.model.transformer import Model, build_model
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.optim.schedule import learning_rate
from jaxforge.step.losses import build_loss
from tests.conftest import tiny_config
from tests.processes.conftest import environment

pytestmark = pytest.mark.usefixtures("two_devices")

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def examples(monkeypatch, own_names):
    """Make the modules of examples/ importable during one test."""
    monkeypatch.syspath_prepend(EXAMPLES)
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def run_script(path, arguments, monkeypatch):
    """Run a script in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    return end.value.code


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_example_without_arguments_prints_one_error(path, monkeypatch, capsys):
    assert run_script(path, [], monkeypatch) == 2
    assert re.fullmatch(r"error: .+\n", capsys.readouterr().err)


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if path.stem != "textbook"], ids=lambda path: path.stem
)
@pytest.mark.parametrize("setting", [[], ["--checkpoint.dir=elsewhere"]])
def test_example_has_its_own_default_run_directory(path, setting, monkeypatch):
    directories = []

    def start(config, callbacks=()):
        directories.append(config.known.checkpoint.dir)
        return Exit.COMPLETED

    monkeypatch.setattr("jaxforge.training.launch.fit", start)
    arguments = ["--config", str(ROOT / "configs" / "debug.toml")]
    assert run_script(path, [*arguments, *setting], monkeypatch) == 0
    assert [Path(run).name for run in directories] == ["elsewhere" if setting else path.stem]


OVERRIDES = [
    "--model.dim=32", "--train.max_steps=12", "--train.mixed_precision=fp32", "--eval.interval=4",
    "--checkpoint.interval=6", "--metrics.log_interval=1", "--optimizer.lr=3",
    "--scheduler.warmup_steps=11",
]  # fmt: skip


def lines_by_step(lines):
    return {int(line.split()[1]): line for line in lines if line.startswith("step")}


@pytest.mark.usefixtures("examples")
def test_textbook_loop_keeps_best_and_newest_checkpoint_and_resumes_exactly(tmp_path):
    import textbook

    lines: list[str] = []
    textbook.main(tmp_path, OVERRIDES, lines.append)
    assert re.fullmatch(r"step {6}0  lr 0\.00e\+00  loss 5\.\d{4}  \|g\| \d+\.\d{3}", lines[0])
    steps = lines_by_step(lines)
    assert list(steps) == list(range(12))
    scores = [float(line.split()[-1]) for line in lines if line.startswith("  val loss")]
    assert len(scores) == 3
    best = 4 * (1 + int(np.argmin(scores)))
    assert best != 12, "the rate is so large that losses rise"
    paths = {path.name for path in (tmp_path / "checkpoints").glob("step_*")}
    assert paths == {f"step_{best}", "step_12"}

    shutil.rmtree(tmp_path / "checkpoints" / "step_12")
    resumed: list[str] = []
    textbook.main(tmp_path, OVERRIDES, resumed.append)
    assert resumed == lines[lines.index(steps[best]) :]

    complete: list[str] = []
    textbook.main(tmp_path, OVERRIDES, complete.append)
    assert complete == []


def test_textbook_loop_is_short():
    assert len((EXAMPLES / "textbook.py").read_text().splitlines()) <= 150


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("cap", [None, 0.5])
def test_custom_loss_equals_cross_entropy_with_soft_labels(cap):
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
    result = loss(
        jnp.float32(head), jnp.float32(hidden), {"labels": jnp.array(labels)}, LossWeights(2.0)
    )
    assert result.loss_terms.keys() == {"smoothed_cross_entropy"}
    np.testing.assert_allclose(result.loss, expected, rtol=1e-5)


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
    """Model with the head alone."""

    logits = Model.logits

    class stack:
        stages = 1

    def __init__(self, cap):
        self.config = ModelConfig(final_logit_softcap=cap)

    def head(self, params):
        return params


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("examples")
def test_callback_and_loss_work_in_one_run(tmp_path):
    run = tmp_path / "run"
    command = [
        sys.executable, str(EXAMPLES / "custom_callback.py"), "--config", "configs/debug.toml",
        f"--checkpoint.dir={run}", "--plugins.modules=custom_loss",
        "--train.loss_fn=smoothed_cross_entropy", "--metrics.collect=params_norm",
    ]  # fmt: skip
    env = environment(1, PYTHONPATH=f"{ROOT}:{EXAMPLES}")
    output = subprocess.run(command, cwd=ROOT, env=env, check=True, text=True, capture_output=True)
    assert re.search(r"^step 10: \|g\| of layers \d\.\d{3} \d\.\d{3}$", output.stdout, re.M)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 5.4 < lines[0]["train/loss"] < 5.7
    assert lines[0]["train/params_norm"] > 1
    # Opening the run imports its plugins.
    trained = inference.open_run(run, devices=jax.devices()[:1])
    assert trained.config.train.loss_fn == "smoothed_cross_entropy"
