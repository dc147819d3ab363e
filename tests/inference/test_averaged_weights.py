"""Evaluation and generation with the average of the parameters of a run."""

import json

import jax
import numpy as np
import pytest

import jaxforge
from jaxforge import inference
from jaxforge.commands import evaluate, generate, prepare
from jaxforge.errors import UserError
from jaxforge.training import launch
from tests.conftest import tiny_config
from tests.helpers import cli
from torch_compat.checkpoint import orbax_store

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose average differs from its parameters, with a tokenizer."""
    path = tmp_path_factory.mktemp("averaged")
    for i in range(20):
        (path / f"{i:02}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 8)
    prepare.main([*map(str, sorted(path.glob("*.txt"))), "--output", str(path / "data"),
                  "--validation-fraction", "0.2"])  # fmt: skip
    job = tiny_config(
        model={"vocab_size": 264}, train={"max_steps": 8, "ema_decay": 0.9},
        distributed={"dp_shard": -1},
        data={"dataset_path": str(path / "data/train")}, checkpoint={"dir": str(path / "run")},
        eval={"enabled": True, "datasets": {"dataset_path": str(path / "data/validation")},
              "interval": 8},
    )  # fmt: skip
    assert launch.fit(job).code == 0
    return path / "run"


def logged(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if "eval/loss" in line)


@pytest.mark.slow
def test_evaluate_command_has_metrics_of_training(run, tmp_path, capsys):
    for weights, name in (("raw", "loss"), ("ema", "ema_loss")):
        file = tmp_path / f"{weights}.json"
        command = [str(run), f"--weights={weights}", f"--json={file}", "--distributed.tp=2"]
        assert evaluate.main(command) == 0
        report = json.loads(file.read_text())
        assert report["weights"] == weights
        assert report["metrics"]["eval/loss"] == pytest.approx(logged(run)[f"eval/{name}"], 1e-5)
    assert "step 8, average of the parameters" in capsys.readouterr().out
    metrics = jaxforge.Run(run, weights="ema").evaluate()["metrics"]
    assert metrics == pytest.approx(report["metrics"], rel=1e-5)


@pytest.mark.slow
def test_generate_command_uses_average(run, tmp_path, capsysbinary):
    options = ["--prompt", "the quick", "--temperature=0", "--max-tokens=12"]
    texts = []
    convert = ["convert", str(run), str(tmp_path / "average"), "--to=jaxforge", "--weights=ema"]
    assert cli(convert) == 0
    capsysbinary.readouterr()
    for command in ([run], [run, "--weights=ema"], [tmp_path / "average"]):
        assert generate.main([*map(str, command), *options]) == 0
        texts.append(capsysbinary.readouterr().out)
    assert texts[1] == texts[2] != texts[0]


def test_opened_average_has_its_bits(run):
    expected = orbax_store.open_orbax(run)[0].ema
    trained = inference.open_run(run, weights="ema", devices=jax.devices()[:1])
    with trained.in_use() as params:
        weight = jax.device_get(params["norm"]["weight"])
    np.testing.assert_array_equal(weight, expected["norm.weight"].all())


def test_run_without_average_is_refused(run, tmp_path):
    main = ["convert", str(run), str(tmp_path / "none"), "--to=jaxforge", "--weights=ema"]
    assert cli(main) == 0
    with pytest.raises(UserError, match=r"--weights ema: .*step_0 has no average of the param"):
        evaluate.main([str(tmp_path / "none"), "--weights=ema"])
    with pytest.raises(UserError, match='weights = "mean": expected one of raw, ema'):
        jaxforge.Run(run, weights="mean").generate("the")
