"""Starter configs: sized configs and presets load and fit their machine."""

import math
import re
import tomllib
from pathlib import Path

import jax
import pytest

from jaxforge.commands import init
from jaxforge.config import check, load_config
from jaxforge.config.job import JobConfig
from jaxforge.data.corpus.manifest import Manifest, Shard
from jaxforge.errors import UserError
from jaxforge.model.transformer import build_model, parameter_count
from jaxforge.parallel.device_memory import bytes_per_device
from jaxforge.parallel.hardware import CHIPS
from jaxforge.parallel.mesh import abstract_mesh
from jaxforge.program import Program
from jaxforge.step.execution import USABLE, choose_execution
from jaxforge.step.memory import step_memory
from jaxforge.tools.starting.config import config_for_data
from jaxforge.tools.starting.machine import Machine
from jaxforge.tools.starting.sizes import (
    EPOCHS,
    FEWEST_UPDATES,
    PRESETS,
    SHAPES,
    TOKENS_PER_PARAMETER,
    PreparedData,
    choose_size,
)

PAGE = (Path(__file__).parents[3] / "docs" / "configs.md").read_text()
CPU = Machine(cores=2)


def manifest(tokens, vocab_size=32768, documents=None, file="shard_00000.npy"):
    documents = documents or max(1, tokens // 700)
    shards = (Shard(file, tokens, vocab_size - 1),)
    return Manifest(
        1, "uint16", tokens, documents, vocab_size - 1, 0, vocab_size, "bpe", "0", shards
    )


def prepared(tokens, held_out=0, **options):
    validation = manifest(held_out) if held_out else None
    return PreparedData(Path("/data/mine"), manifest(tokens, **options), validation)


def loaded(tmp_path, text) -> JobConfig:
    path = tmp_path / "x.toml"
    path.write_text(text, "utf-8")
    return load_config(path)


def share_of_memory(config: JobConfig, devices: int, memory: float) -> float:
    """Return the share of GPU memory that the chosen execution is estimated to need."""
    check(config, devices)
    mesh = abstract_mesh(config, devices)
    model = build_model(config, "gpu", "9.0")
    state, capacity = Program(config, mesh, model=model).abstract_state(), int(0.75 * memory)
    execution = choose_execution(config, model, state, mesh, capacity=capacity, chip=CHIPS["h100"])
    needed = step_memory(execution.applied_to(config), model, mesh, bytes_per_device(state))
    return needed.total / capacity


@pytest.mark.parametrize("words", ["cpu", "1x24GB", "1x80", "8x80GB", "6x40GB"])
@pytest.mark.parametrize("tokens", [25, 10**6, 10**12])
def test_config_fits_any_data_and_machine(tmp_path, tokens, words):
    on = Machine.parse(words)
    text, size = config_for_data(prepared(tokens, held_out=9000), on, tmp_path)
    config = loaded(tmp_path, text)
    check(config, on.devices)
    assert config.data.dataset_path == "/data/mine/train"
    assert config.eval.enabled
    assert (config.train.mixed_precision == "fp32") == on.is_cpu
    assert config.scheduler.warmup_steps == max(1, size.max_steps * 2 // 100)
    if on.memory:
        assert share_of_memory(config, on.devices, on.memory) < 0.85


def test_model_size_grows_with_data_and_machine():
    a_gpu = Machine.parse("1x80GB")
    small, middle, large = (choose_size(prepared(n), a_gpu) for n in (10**7, 10**9, 10**12))
    assert small.parameters < middle.parameters < large.parameters
    for size in (middle, large):
        assert TOKENS_PER_PARAMETER * size.parameters == pytest.approx(
            size.max_steps * size.tokens, rel=0.01
        )
    assert small.epochs == pytest.approx(EPOCHS, rel=0.01)
    assert choose_size(prepared(10**12), Machine.parse("8x80GB")).parameters > large.parameters
    assert choose_size(prepared(10**12), CPU).shape == SHAPES[1]
    assert choose_size(prepared(10**12), Machine.parse("1x2GB")).parameters < middle.parameters


def test_little_text_trains_more_epochs_with_comment(tmp_path):
    text, size = config_for_data(prepared(5000), CPU, tmp_path)
    assert size.max_steps == FEWEST_UPDATES
    assert size.epochs > EPOCHS
    assert re.search(r"max_steps = 100 .*# .* the fewest updates that show learning", text)


def test_sequence_length_follows_document_length():
    machine = Machine.parse("1x80")
    lengths = {
        mean: choose_size(prepared(10**8, documents=10**8 // mean), machine).seq_len
        for mean in (50, 700, 10**6)
    }
    assert lengths == {50: 512, 700: 1024, 10**6: 2048}
    assert choose_size(prepared(100, documents=1), CPU).seq_len == 64


def test_sequences_fit_validation_set_unless_it_is_tiny(tmp_path):
    for held_out, seq_len in ((300, 256), (200, 128), (40, 256)):
        config = loaded(tmp_path, config_for_data(prepared(10**6, held_out), CPU, tmp_path)[0])
        assert (config.train.seq_len, config.eval.enabled) == (seq_len, held_out > 64)


def test_config_has_file_pattern_of_other_formats(tmp_path):
    text, _ = config_for_data(prepared(10**6, file="shard_00000.bin"), CPU, tmp_path)
    assert loaded(tmp_path, text).data.file_pattern == "*.bin"


def test_machine_is_parsed_and_detected(monkeypatch, tmp_path):
    assert Machine.parse("8x80GB") == Machine(8, 80e9, Machine.parse("cpu").cores)
    with pytest.raises(UserError, match="--machine 8x: expected cpu, or GPUs"):
        Machine.parse("8x")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nprintf '81559\\n24564\\n'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert Machine.here()[:2] == (2, 24564 * 2**20)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert Machine.here().is_cpu


@pytest.mark.parametrize("name", PRESETS)
def test_preset_loads_and_fits_its_machine(tmp_path, name):
    preset, output = PRESETS[name], tmp_path / "x.toml"
    assert init.main(["--preset", name, "--output", str(output)]) == 0
    config = load_config(output)
    check(config, preset.devices)
    model = build_model(config, "cpu")
    leaves = jax.tree_util.tree_leaves_with_path(model.abstract)
    norms = sum(math.prod(leaf.shape) for path, leaf in leaves if "norm" in str(path))
    assert preset.parameters == parameter_count(model.abstract) - norms
    if not preset.is_on_cpu:
        memory = 24e9 if preset.devices == 1 else 80e9
        assert share_of_memory(config, preset.devices, memory) < USABLE


def test_documentation_lists_every_preset():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (\d+) \| (.*) \|$", PAGE, re.M)
    assert rows == [
        (name, item.about, item.machine, str(item.devices), f"{item.parameters / 1e6:,.0f}M")
        for name, item in PRESETS.items()
    ]


def test_preset_takes_prepared_data(tmp_path, capsys):
    directory = tmp_path / "data"
    for split, tokens in (("train", 10**6), ("validation", 5000)):
        (directory / split).mkdir(parents=True)
        manifest(tokens, vocab_size=999).write(directory / split)
    assert init.main(["--preset", "124m", "--data", str(directory), "--output", "-"]) == 0
    said = tomllib.loads(capsys.readouterr().out)
    assert said["model"]["vocab_size"] == 999
    assert said["data"]["dataset_path"] == str(directory / "train")
    assert said["eval"]["enabled"]
    assert said["train"]["max_steps"] == EPOCHS * (10**6 // 1025) // 512
    with pytest.raises(UserError, match="was not made by `jaxforge prepare`"):
        init.main(["--preset", "124m", "--data", str(tmp_path), "--output", "-"])


def test_init_does_not_overwrite_files(tmp_path):
    (tmp_path / "x.toml").write_text("mine")
    with pytest.raises(UserError, match=r"x\.toml exists; choose another --output"):
        init.main(["--preset", "tiny", "--output", str(tmp_path / "x.toml")])
    assert (tmp_path / "x.toml").read_text() == "mine"
    with pytest.raises(UserError, match="--preset NAME, --depth N or --flops C is required"):
        init.main([])
