"""Default warm-up, which depends on the run length or on KempnerForge."""

import pytest

from jaxforge.config import answers, load_config, load_unresolved
from jaxforge.config.reading.kempnerforge import NO_EFFECT
from torch_compat.checkpoint.checkpoints import CheckpointRef
from torch_compat.formats.files import Directory


def warmup(*settings):
    return load_config(None, [f"--{setting}" for setting in settings]).scheduler.warmup_steps


@pytest.mark.parametrize(
    ("max_steps", "steps"), [(100_000, 2000), (20_000, 2000), (5000, 500), (100, 10), (7, 0)]
)
def test_default_warmup_is_at_most_a_tenth_of_run(max_steps, steps):
    assert warmup(f"train.max_steps={max_steps}") == steps
    assert warmup(f"train.max_steps={max_steps}", "scheduler.warmup_steps=2000") == 2000


@pytest.mark.parametrize("setting", [*(".".join(path) for path in NO_EFFECT), "data.order=torch"])
def test_kempnerforge_files_keep_its_warmup(setting):
    assert warmup("train.max_steps=100", setting) == 2000


def test_run_config_fixes_warmup(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(load_config(None, ["--train.max_steps=100"]).to_toml())
    assert load_config(path, ["--train.max_steps=50"]).scheduler.warmup_steps == 10


def test_default_warmup_follows_length_in_tokens():
    config = load_unresolved(
        None,
        ["--train.batch_size=1", "--train.seq_len=10", "--train.max_steps=1K tok",
         "--train.batch_ramp=[{'grad_accum_steps': 1}, {'start': 8, 'grad_accum_steps': 2}]",
         "--train.grad_accum_steps=2", "--scheduler.decay_steps=200 tok"],
    ).resolve(1)  # fmt: skip
    assert config.train.max_steps == 54
    assert config.scheduler.warmup_steps == 5
    assert config.scheduler.decay_steps == 12  # the first three are much shorter


@pytest.mark.parametrize(("format", "steps"), [("dcp", 2000), ("hf", 10)])
def test_config_of_pytorch_checkpoint_keeps_kempnerforge_warmup(tmp_path, format, steps):
    path = tmp_path / "theirs.toml"
    path.write_text("[train]\nmax_steps = 100")
    checkpoint = CheckpointRef(format, Directory(str(tmp_path)))
    assert checkpoint.config(path).scheduler.warmup_steps == steps
    loaded = checkpoint.config(path, ["--scheduler.warmup_steps=7"])
    assert loaded.scheduler.warmup_steps == 7


def test_start_reports_default_warmup():
    (line,) = answers(load_config(None, ["--train.max_steps=100"]))
    assert line == (
        "scheduler.warmup_steps is not set: 10 updates, a tenth of the run (in KempnerForge 2,000)"
    )
    assert not answers(load_config(None, ["--train.max_steps=100", "--scheduler.name=none"]))


def test_unset_warmup_is_not_set():
    config = load_config(None, ["--train.max_steps=100", "--scheduler.name=linear"])
    assert not config.is_set("scheduler.warmup_steps")
    assert config.is_set("scheduler.name")


@pytest.mark.parametrize(("share", "steps"), [("10%", 2), ("1%", 1), ("0%", 0)])
def test_share_of_short_run_is_at_least_one_update(share, steps):
    assert warmup("train.max_steps=20", f"scheduler.warmup_steps={share}") == steps
