"""`jaxforge evaluate`: the numbers of the training run, on any devices."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxforge.commands.evaluate import main
from jaxforge.errors import UserError
from jaxforge.inference.evaluation import evaluate, report
from jaxforge.training.evaluation import summary
from tests.helpers import devices_here
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT, Run, environment
from tests.processes.launching import free_port


def tokens(rng, n):
    return np.where(rng.random(n) < 0.05, 256, rng.integers(97, 123, n)).astype(np.uint16)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trained on two devices for eight steps, evaluated every four: on two sets of 21 and 5."""
    path, rng = tmp_path_factory.mktemp("evaluate"), np.random.default_rng(0)
    for name, n in (("train", 100), ("a", 21), ("b", 5)):
        (path / name).mkdir()
        np.save(path / name / "a.npy", tokens(rng, n * 33))
    run = Run(path, "run")
    sets = [{"name": name, "dataset_path": str(path / name)} for name in "ab"]
    with devices_here(2):
        run.finish_here(
            f"--data.dataset_path={path / 'train'}", "--data.tokenizer_path=byte",
            "--data.pack_sequences=true", "--model.vocab_size=264", "--train.max_steps=8",
            "--checkpoint.interval=4", "--eval.enabled=true", f"--eval.datasets={sets}",
            "--eval.interval=4", "--eval.steps=100",
            "--checkpoint.best_metric=eval/b/bits_per_byte", "--checkpoint.keep_best_n=1",
        )  # fmt: skip
    return run


def logged(run, step):
    return next(
        {name: value for name, value in line.items() if name.startswith("eval/")}
        for line in run.lines()
        if line["step"] == step and "eval/loss" in line
    )


def command(*arguments, code=0, devices=1):
    result = subprocess.run(
        [sys.executable, "-m", "jaxforge.evaluate", *map(str, arguments)],
        cwd=ROOT, env=environment(devices), text=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    return result


def test_command_gives_what_training_logged(run, tmp_path):
    result = command(run.directory, "--json", tmp_path / "out.json", "--distributed.tp=2",
                     devices=4)  # fmt: skip
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["metrics"] == pytest.approx(logged(run, 8), rel=1e-5)
    assert set(values["metrics"]) == set(logged(run, 8))
    assert (values["step"], values["mesh"]) == (8, {"dp_shard": 2, "tp": 2})
    assert [(value["name"], value["tokens"]) for value in values["sets"]] == [
        (name, sums.tokens) for name, sums in evaluate(run.directory)[1].items()
    ]
    assert "bits/byte" in result.stdout
    assert f"{values['sets'][0]['loss']:.4f}" in result.stdout


def test_json_has_stdout_to_itself(run):
    result = command(run.directory / "checkpoints" / "step_4", "--json", "-")
    assert json.loads(result.stdout)["metrics"] == pytest.approx(logged(run, 4), rel=1e-5)
    assert "bits/byte" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "overrides"),
    [
        (1, []),
        (2, ["--distributed.tp=2"]),
        (6, []),  # which do not divide the width
        (8, []),
        (8, ["--distributed.cp=2", "--distributed.cp_strategy=ring"]),
    ],
    ids=str,
)
def test_devices_do_not_matter(run, devices, overrides):
    given = jax.devices()[:devices]
    _, sums = evaluate(run.directory, overrides, step=8, devices=given)
    assert summary(sums) == pytest.approx(logged(run, 8), rel=1e-5)


def test_parameters_are_restored_in_shares(run, monkeypatch):
    from jaxforge import inference

    trained = inference.open_run(run.directory, ["--distributed.tp=2"])
    with trained.in_use() as params:
        weight = params["layers"]["attention"]["q_proj"]["weight"]
    assert weight.shape == (2, 64, 64)
    assert {shard.data.shape for shard in weight.addressable_shards} == {(2, 32, 16)}


def test_other_sets_and_parts_of_them(run):
    location = f"x={run.directory.parent / 'b'}"
    trained, sums = evaluate(run.directory, sets=[location], devices=jax.devices()[:1])
    metrics = report(trained, sums)["metrics"]
    assert metrics["eval/x/loss"] == pytest.approx(logged(run, 8)["eval/b/loss"], rel=1e-5)
    assert metrics["eval/loss"] == metrics["eval/x/loss"]
    _, pattern = evaluate(run.directory, sets=[f"{location}/*.npy"], devices=jax.devices()[:1])
    assert pattern == sums
    _, few = evaluate(run.directory, sets=[location], steps=1, batch_size=8)
    _, by_two = evaluate(
        run.directory, sets=[location], steps=2, batch_size=2, devices=jax.devices()[:2]
    )
    assert few["x"].tokens == sums["x"].tokens  # all five sequences
    assert by_two["x"].tokens < sums["x"].tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 7}, "no checkpoint at .*step_7: .*the newest of .* is step 8"),
        ({"sets": ["a"]}, "--set a: expected NAME=DIR"),
        ({"sets": ["a/b=x"]}, r'\[eval\.datasets\[0\]\] name = "a/b" must consist of letters'),
        ({"sets": ["x=/nowhere"]}, "/nowhere"),
        ({"batch_size": 3}, "--batch-size 3 must be a multiple of the 8 .* change it to 8"),
        ({"overrides": ["--eval.datasets=[]"]}, "has no .eval. to evaluate on: give --set"),
        ({"overrides": ["--model.dim=128"]}, r"does not fit \[model\]"),
        ({"overrides": ["--stpes=1"]}, "unknown key stpes"),
    ],
)
def test_mistakes_are_explained(run, options, message):
    with pytest.raises(UserError, match=message):
        evaluate(run.directory, **options)


def test_exit_codes(tmp_path):
    with pytest.raises(UserError, match="--steps 0: must be at least 1"):
        main([str(tmp_path), "--steps", "0"])
    assert "no checkpoint at" in command(tmp_path, code=2).stderr


def test_unknown_best_metric_stops_training_before_it_starts(run, new_run):
    other = new_run("refused")
    data = run.directory.parent / "a"
    with pytest.raises(UserError, match='best_metric = "eval/bits_per_byte"'):
        other.finish_here(
            f"--eval.dataset_path={data}",
            "--eval.enabled=true",
            "--model.vocab_size=264",
            "--checkpoint.best_metric=eval/bits_per_byte",
        )
    assert not other.steps()


@pytest.mark.slow
def test_two_processes_evaluate_together(run, tmp_path):
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxforge.evaluate", run.directory, "--distributed.tp=2",
             "--json", tmp_path / "out.json"],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(2, JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
                            JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index)),
        )
        for index in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["mesh"] == {"dp_shard": 2, "tp": 2}
    assert values["metrics"] == pytest.approx(logged(run, 8), rel=1e-5)
    assert ["bits/byte" in stdout for stdout, _ in outputs] == [True, False]
