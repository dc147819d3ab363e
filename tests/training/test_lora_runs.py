"""Runs that train LoRA adapters: what they save, how they resume, and what opens them."""

import json

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jaxforge as jf
from jaxforge.config.fine_tuning import is_adapter
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.inference.trained import open_run
from jaxforge.training import launch
from tests.conftest import tiny_config

pytestmark = pytest.mark.usefixtures("one_device")

LORA = {"rank": 2, "targets": ["attention", "down_proj"], "dropout": 0.1}
ADAPTED = [*(f"attention.{m}_proj" for m in "qkvo"), "mlp.down_proj"]
NO_LORA = {"rank": 0, "dropout": 0.0}


def config(path, name, **sections):
    checkpoint = {"dir": str(path / name), "interval": 2, **sections.pop("checkpoint", {})}
    steps = {"max_steps": 4, **sections.pop("train", {})}
    return tiny_config(checkpoint=checkpoint, train=steps, **sections)


def adapted(path, name, **sections):
    checkpoint = {"load_path": str(path / "base"), **sections.pop("checkpoint", {})}
    return config(
        path, name, lora=LORA | sections.pop("lora", {}), checkpoint=checkpoint, **sections
    )


def parameters(run, step=None, weights="raw"):
    with open_run(run, step=step, weights=weights).in_use() as params:
        return flatten_dict(jax.device_get(params), sep=".")


def stored(run, step):
    return json.loads((run / "checkpoints" / f"step_{step}" / "checksums" / "metadata").read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of all runs, with the run of a base model."""
    directory = tmp_path_factory.mktemp("lora")
    assert launch.fit(config(directory, "base", train={"max_steps": 2})) is Exit.COMPLETED
    return directory


@pytest.fixture(scope="module")
def whole(base):
    """A run of four steps without interruption."""
    assert launch.fit(adapted(base, "whole")) is Exit.COMPLETED
    return base / "whole"


def test_checkpoint_holds_adapters_without_the_base(base, whole):
    names = stored(whole, 4)
    params = {name.removeprefix("params.") for name in names if name.startswith("params.")}
    assert params == {
        f"layers.{layer}.{matrix}" for layer in ADAPTED for matrix in ("lora_a", "lora_b")
    }
    moments = {name for name in names if name.startswith(("optimizer.mu.", "optimizer.nu."))}
    assert moments == {f"optimizer.{m}.{name}" for m in ("mu", "nu") for name in params}


def test_opened_run_joins_adapters_and_base(base, whole):
    before, after = parameters(base / "base"), parameters(whole)
    adapters = {name for name in after if is_adapter(name)}
    assert after.keys() - adapters == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    assert all(np.abs(after[name]).max() > 0 for name in adapters)  # B began at zero


@pytest.mark.slow
def test_relative_path_of_the_base_is_opened_from_another_directory(base, tmp_path, monkeypatch):
    monkeypatch.chdir(base)
    settings = adapted(base, "relative", checkpoint={"load_path": "base"}, train={"max_steps": 1})
    assert launch.fit(settings) is Exit.COMPLETED
    monkeypatch.chdir(tmp_path)
    assert parameters(base / "relative").keys() == parameters(base / "base").keys() | {
        f"layers.{layer}.{matrix}" for layer in ADAPTED for matrix in ("lora_a", "lora_b")
    }


def test_resume_is_bit_exact(base, whole):
    assert launch.fit(adapted(base, "parts", train={"exit_interval": 2})) is Exit.INTERVAL
    assert launch.fit(adapted(base, "parts")) is Exit.COMPLETED
    assert stored(base / "parts", 4) == stored(whole, 4)


@pytest.fixture(scope="module")
def averaged(base):
    """A run with an average from the first update on, evaluations and all checkpoints."""
    np.save(base / "tokens.npy", np.arange(2000, dtype=np.uint16) % 250)
    evaluation = {
        "enabled": True,
        "interval": 4,
        "datasets": {"dataset_path": str(base)},
        "steps": 2,
    }
    settings = adapted(
        base, "averaged", train={"ema_decay": 0.5, "ema_start": 1}, eval=evaluation,
        checkpoint={"interval": 1, "keep_last_n": 0},
    )  # fmt: skip
    assert launch.fit(settings) is Exit.COMPLETED
    return base / "averaged"


@pytest.mark.slow
def test_average_is_that_of_the_adapters(base, averaged):
    names = stored(averaged, 4)
    params, ema = (
        {name.removeprefix(part) for name in names if name.startswith(part)}
        for part in ("params.", "ema.")
    )
    assert params == ema
    expected, *later = (parameters(averaged, step) for step in (1, 2, 3, 4))
    for values in later:
        expected = {name: 0.5 * x + 0.5 * values[name] for name, x in expected.items()}
    result = parameters(averaged, weights="ema")
    assert result.keys() == expected.keys()
    for name, value in result.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-7, err_msg=name)
    assert any(np.abs(result[name] - later[-1][name]).max() > 1e-4 for name in result)


def test_average_of_adapters_is_evaluated_with_the_base(averaged):
    lines = map(json.loads, (averaged / "metrics.jsonl").read_text().splitlines())
    (logged,) = (line for line in lines if "eval/loss" in line)
    for weights, name in (("raw", "loss"), ("ema", "ema_loss")):
        metrics = jf.Run(averaged, weights=weights).evaluate(steps=2)["metrics"]
        assert metrics["eval/loss"] == pytest.approx(logged[f"eval/{name}"], rel=1e-6)
    assert logged["eval/loss"] != logged["eval/ema_loss"]


@pytest.mark.slow
def test_resume_with_average_is_bit_exact(base, averaged):
    keys = {"ema_decay": 0.5, "ema_start": 1}
    assert launch.fit(adapted(base, "halves", train={**keys, "exit_interval": 2})) is Exit.INTERVAL
    assert launch.fit(adapted(base, "halves", train=keys)) is Exit.COMPLETED
    assert stored(base / "halves", 4) == stored(averaged, 4)


@pytest.mark.slow
def test_run_begins_with_the_adapter_of_another_run(base, whole):
    lora, optimizer = {"adapter": str(whole)}, {"lr": 1e-9}
    settings = adapted(base, "further", lora=lora, optimizer=optimizer, train={"max_steps": 1})
    assert launch.fit(settings) is Exit.COMPLETED
    ours, theirs = parameters(base / "further"), parameters(whole)
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], atol=1e-7, err_msg=name)


def test_changed_base_is_refused(base, whole):
    assert launch.fit(config(base, "other", train={"max_steps": 1, "seed": 1})) is Exit.COMPLETED
    other = {"load_path": str(base / "other"), "dir": str(whole)}
    with pytest.raises(UserError, match="is not the model that the adapters were trained with"):
        launch.fit(adapted(base, "whole", checkpoint=other, train={"max_steps": 5}))


@pytest.mark.parametrize(
    ("checkpoint", "lora", "message"),
    [
        ({"load_path": None}, {}, "lora.rank = 2 adapts a trained model: set checkpoint.load_path"),
        ({"load_path": "whole"}, {}, "holds adapters without the model they belong to"),
        ({"load_path": "whole"}, NO_LORA, "holds adapters without the model they belong to"),
        ({"dir": "base"}, {}, "holds a whole model, and lora.rank asks for adapters"),
        ({}, {"targets": ["attnetion"]}, '"attnetion" matches no linear layer. Linear layers are'),
        ({}, {"adapter": "base"}, "holds a whole model, and lora.rank asks for adapters"),
    ],
    ids=str,
)
def test_wrong_checkpoint_is_refused(base, whole, checkpoint, lora, message):
    paths = {key: path and str(base / path) for key, path in checkpoint.items()}
    lora = {key: str(base / x) if key == "adapter" else x for key, x in lora.items()}
    with pytest.raises(UserError, match=message):
        launch.fit(adapted(base, "refused", checkpoint=paths, lora=lora))
