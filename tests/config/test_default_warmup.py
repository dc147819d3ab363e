"""The warm-up that nobody asked for: of the run's length, and KempnerForge's in its files."""

import pytest

from jaxforge.config import JobConfig, answers, load_config, load_unresolved
from jaxforge.config.torch_only import TORCH_ONLY
from torch_compat.checkpoint.checkpoints import CheckpointRef
from torch_compat.formats.files import Directory


def warmup(*settings):
    return load_config(None, [f"--{setting}" for setting in settings]).scheduler.warmup_steps


@pytest.mark.parametrize(
    ("max_steps", "steps"), [(100_000, 2000), (20_000, 2000), (5000, 500), (100, 10), (7, 0)]
)
def test_warmup_is_a_tenth_of_the_run_at_most_kempnerforges(max_steps, steps):
    assert warmup(f"train.max_steps={max_steps}") == steps
    assert warmup(f"train.max_steps={max_steps}", "scheduler.warmup_steps=2000") == 2000


@pytest.mark.parametrize("key", [*TORCH_ONLY, "data.order"])
def test_its_files_warm_up_as_there(key):
    section, name = key.split(".")
    value = "torch" if key == "data.order" else getattr(getattr(JobConfig(), section), name)
    assert warmup("train.max_steps=100", f"{key}={value}") == 2000


def test_config_of_a_run_holds_the_number_for_good(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(load_config(None, ["--train.max_steps=100"]).to_toml())
    assert load_config(path, ["--train.max_steps=50"]).scheduler.warmup_steps == 10


def test_warmup_follows_a_length_in_tokens():
    config = load_unresolved(
        None,
        ["--train.batch_size=1", "--train.seq_len=10", "--train.max_steps=1K tok",
         "--train.batch_ramp=[{'grad_accum_steps': 1}, {'start': 8, 'grad_accum_steps': 2}]",
         "--train.grad_accum_steps=2", "--scheduler.decay_steps=200 tok"],
    ).resolve(1)  # fmt: skip
    assert config.train.max_steps == 54
    assert config.scheduler.warmup_steps == 5
    assert config.scheduler.decay_steps == 12  # the first three are small


@pytest.mark.parametrize(("format", "steps"), [("dcp", 2000), ("hf", 10)])
def test_config_beside_a_checkpoint_of_pytorchs_is_kempnerforges(tmp_path, format, steps):
    path = tmp_path / "theirs.toml"
    path.write_text("[train]\nmax_steps = 100")
    checkpoint = CheckpointRef(format, Directory(str(tmp_path)))
    assert checkpoint.config(path).scheduler.warmup_steps == steps
    said = checkpoint.config(path, ["--scheduler.warmup_steps=7"])
    assert said.scheduler.warmup_steps == 7


def test_start_says_what_it_is_and_what_it_would_be():
    (line,) = answers(load_config(None, ["--train.max_steps=100"]))
    assert line == (
        "scheduler.warmup_steps is not set: 10 updates, a tenth of the run (in KempnerForge 2,000)"
    )
    assert not answers(load_config(None, ["--train.max_steps=100", "--scheduler.name=none"]))


def test_nobody_said_it():
    config = load_config(None, ["--train.max_steps=100", "--scheduler.name=linear"])
    assert not config.is_set("scheduler.warmup_steps")
    assert config.is_set("scheduler.name")


@pytest.mark.parametrize(("share", "steps"), [("10%", 2), ("1%", 1), ("0%", 0)])
def test_share_of_a_short_run_is_one_update_at_least(share, steps):
    assert warmup("train.max_steps=20", f"scheduler.warmup_steps={share}") == steps
