"""The average of the parameters in conversions and exports."""

import json

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxforge.errors import UserError
from jaxforge.inference.trained import open_run
from jaxforge.training.callbacks.exports import Exporter
from tests.conftest import tiny_config
from tests.helpers import cli
from tests.torch_compat.runs import trained
from torch_compat.checkpoint import checkpoints, orbax_store
from torch_compat.checkpoint.dcp_state import ReadOptions

EXPERTS = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 24, "n_layers": 2}
SECTIONS = {"model": {"n_layers": 2}, "train": {"ema_decay": 0.9}}


@pytest.fixture
def run(tmp_path):
    return trained(tmp_path / "run", **SECTIONS).parent


def opened(path):
    """Return the state of a checkpoint of any format, with jaxforge's names."""
    reference = checkpoints.find(path)
    config = reference.config(None) or tiny_config(**SECTIONS)
    return reference.read(config, ReadOptions())


def assert_equal(result, expected):
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(result[name].all(), tensor.all(), err_msg=name)


@pytest.mark.parametrize(
    "model", [{}, pytest.param(EXPERTS, marks=pytest.mark.slow)], ids=["dense", "experts"]
)
def test_hugging_face_export_has_chosen_weights(tmp_path, capsys, model):
    sections = {**SECTIONS, "model": {**SECTIONS["model"], **model}}
    run = trained(tmp_path / "run", **sections).parent
    state = orbax_store.open_orbax(run)[0]
    for options, expected in (([], state.params), (["--weights=ema"], state.ema)):
        result = tmp_path / f"hf{len(options)}"
        assert cli(["convert", str(run), str(result), "--to=hf", *options]) == 0
        assert_equal(opened(result).params, expected)
        tensors = pytest.importorskip("safetensors.numpy").load_file(result / "model.safetensors")
        np.testing.assert_array_equal(tensors["model.norm.weight"], expected["norm.weight"].all())
        notes = capsys.readouterr().err
        is_noted = "left out: the average of the parameters, which --weights ema exports" in notes
        assert is_noted == (not options)
        card = (result / "README.md").read_text()
        assert ("exponential moving average of the trained weights (decay 0.9)" in card) == (
            not is_noted
        )


def test_average_is_exported_with_frozen_parameters(tmp_path):
    optimizer = {"freeze_patterns": ["token_embedding.*"]}
    run = trained(tmp_path / "run", **SECTIONS, optimizer=optimizer).parent
    state = orbax_store.open_orbax(run)[0]
    assert state.params.keys() - state.ema.keys() == {"token_embedding.embedding.weight"}
    expected = {**state.params, **state.ema}
    assert cli(["convert", str(run), str(tmp_path / "hf"), "--to=hf", "--weights=ema"]) == 0
    assert_equal(opened(tmp_path / "hf").params, expected)
    with open_run(run, weights="ema").in_use() as params:
        for name in ("token_embedding.embedding.weight", "norm.weight"):
            values = flatten_dict(params, sep=".")[name]
            np.testing.assert_array_equal(values, expected[name].all())


def test_model_card_has_metrics_of_exported_weights(run, tmp_path):
    line = {"step": 2, "time": 1.0, "eval/loss": 5.0, "eval/ema_loss": 4.5, "eval/a/ema_loss": 4.25}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    rows = {}
    for weights in ("raw", "ema"):
        cli(["convert", str(run), str(tmp_path / weights), "--to=hf", f"--weights={weights}"])
        card = (tmp_path / weights / "README.md").read_text()
        rows[weights] = [row for row in card.splitlines() if row.startswith(("| all", "| a "))]
    assert rows == {"raw": ["| all | 5.0000 |"], "ema": ["| all | 4.5000 |", "| a | 4.2500 |"]}


def test_dcp_export_leaves_average_out_or_has_it_alone(run, tmp_path, capsys):
    state = orbax_store.open_orbax(run)[0]
    assert cli(["convert", str(run), str(tmp_path / "a"), "--to=dcp"]) == 0
    assert "left out: the average of the parameters" in capsys.readouterr().err
    raw = opened(tmp_path / "a")
    assert_equal(raw.params, state.params)
    assert raw.moments is not None
    assert cli(["convert", str(run), str(tmp_path / "b"), "--to=dcp", "--weights=ema"]) == 0
    assert "left out: optimizer state, which belongs to the param" in capsys.readouterr().err
    average = opened(tmp_path / "b")
    assert_equal(average.params, state.ema)
    assert average.moments is None
    assert cli(["verify", str(run), str(tmp_path / "a"), f"--config={run}/config.toml"]) == 0
    assert "only one checkpoint has an average of the parameters" in capsys.readouterr().out


def test_conversion_to_run_keeps_average(run, tmp_path, capsys):
    assert cli(["convert", str(run), str(tmp_path / "copy"), "--to=jaxforge"]) == 0
    state = orbax_store.open_orbax(run)[0]
    assert_equal(dict(opened(tmp_path / "copy").tensors()), dict(state.tensors()))
    assert cli(["verify", str(run), str(tmp_path / "copy")]) == 0
    assert cli(["inspect", str(run)]) == 0
    assert "ema.layers.1.mlp.up_proj.weight" in capsys.readouterr().out
    options = ["--to=jaxforge", "--weights=ema"]
    assert cli(["convert", str(run), str(tmp_path / "average"), *options]) == 0
    result = opened(tmp_path / "average")
    assert_equal(result.params, state.ema)
    assert (result.moments, dict(result.ema), result.progress.step) == (None, {}, 0)


def test_import_for_run_with_average_starts_without_one(run, tmp_path):
    cli(["convert", str(run), str(tmp_path / "dcp"), "--to=dcp"])
    config = ["--config", str(run / "config.toml")]
    assert (
        cli(["convert", "--to=jaxforge", str(tmp_path / "dcp"), str(tmp_path / "new"), *config])
        == 0
    )
    assert not opened(tmp_path / "new").ema


def test_absent_average_is_refused(run, tmp_path):
    other = trained(tmp_path / "other", model={"n_layers": 2}).parent
    with pytest.raises(UserError, match=r"step_2 has no average of the parameters, which a run"):
        cli(["convert", str(other), str(tmp_path / "hf"), "--to=hf", "--weights=ema"])
    cli(["convert", str(run), str(tmp_path / "hf"), "--to=hf"])
    with pytest.raises(UserError, match=r"--weights ema: .*hf is not a run of jaxforge"):
        cli(["convert", str(tmp_path / "hf"), str(tmp_path / "x"), "--to=dcp", "--weights=ema"])


def test_run_exports_average_of_last_checkpoint(run):
    section = tiny_config(
        checkpoint={"export_last": True, "export_weights": "ema", "export_dtype": "float32",
                    "dir": str(run)},
    ).checkpoint  # fmt: skip
    Exporter(section).on_train_end(2, 0, None)
    assert_equal(opened(run / "exports/step_2").params, orbax_store.open_orbax(run)[0].ema)
