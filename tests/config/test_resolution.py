"""A config is resolved once, and nothing changes it afterwards."""

import re
from pathlib import Path

import pytest

from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import load_unresolved
from jaxforge.config.resolution import ResolvedRun, World, resolve
from jaxforge.errors import UserError
from tests.conftest import tiny_config

ROOT = Path(__file__).parents[2]
RESOLUTION = {"config/resolution.py", "training/resolution.py", "step/execution.py"}
ON_THE_WAY = ("data", "optim", "program.py", "state", "telemetry", "training")
"""Parts of jaxforge through which the config of a run passes."""
OTHER_CONFIGS = {  # configs of something else than the run
    "data/sources.py": "each dataset of a mixture is opened alone",
    "training/callbacks/activations.py": "each group of devices captures one sequence",
}


def written(tmp_path, text):
    (tmp_path / "a.toml").write_text(text)
    return load_unresolved(str(tmp_path / "a.toml"), [])


def test_reasons_name_what_was_written(tmp_path):
    run = resolve(
        written(
            tmp_path,
            "[train]\nmax_steps = '64K tok'\nseq_len = 32\nbatch_size = 4\n"
            "[eval]\ninterval = '10%'\n"
            "[optimizer]\nlr = 1e-3\nlr_scale_rule = 'sqrt'\nlr_base_batch = 16\n",
        ),
        World(1),
    )
    assert run.config.train.max_steps == 500
    assert run.config.optimizer.lr == pytest.approx(5e-4)
    assert run.reasons["train.max_steps"] == 'written as "64K tok"'
    assert run.reasons["eval.interval"] == 'written as "10%"'
    assert run.reasons["optimizer.lr"] == 'optimizer.lr_scale_rule = "sqrt"'
    assert 'train.max_steps = 500: written as "64K tok"' in list(run.rows())


def test_config_without_lengths_is_unchanged(tmp_path):
    config = tiny_config()
    assert resolve(config, World(1)) == ResolvedRun(config)
    assert resolve(config, World(1)).config is config
    assert list(resolve(config, World(1)).rows()) == []


def test_devices_that_left_are_a_reason():
    job = {"elastic_processes": 4, "elastic_min_processes": 2, "dp_shard": 4}
    config = tiny_config(distributed=job)
    run = resolve(config, World(3, processes=3))
    assert run.config.distributed.dp_shard == 3
    reason = "3 of the 4 devices of the whole job have started"
    assert run.reasons["distributed.dp_shard"] == reason
    assert run.reasons["train.grad_accum_steps"] == reason
    assert resolve(config, World(4)).reasons == {}
    with pytest.raises(UserError, match="1 processes have started"):
        resolve(config, World(1, processes=1))


def test_values_of_a_copy_do_not_count_as_set_by_the_user():
    config = tiny_config().with_values({"train.seed": 7, "lora": JobConfig().lora})
    assert (config.train.seed, tiny_config().train.seed) == (7, 42)
    assert config.model == tiny_config().model
    assert not config.is_set("train.seed")


def test_nothing_copies_a_config_outside_its_resolution():
    calls = re.compile(r"\.(model_copy|model_construct)\(")
    package = ROOT / "jaxforge"
    for path in [*package.rglob("*.py"), *(ROOT / "torch_compat").rglob("*.py")]:
        if package / "config" not in path.parents:
            assert not calls.search(path.read_text()), path
    changed = {
        str(path.relative_to(package))
        for part in ON_THE_WAY
        for path in [package / part, *(package / part).rglob("*.py")]
        if path.is_file() and ".with_values(" in path.read_text()
    }
    assert changed - RESOLUTION == OTHER_CONFIGS.keys()
