"""Content of schedule_summary.txt."""

import pytest

from jaxforge.errors import UserError
from jaxforge.optim.schedule import register_scheduler
from jaxforge.state.progress import Progress
from jaxforge.training.summary import epoch_rounding, schedule_summary, write_summary
from jaxforge.training.training_data import open_data, record_data
from tests.conftest import tiny_config

FULL = tiny_config(
    train={
        "batch_size": 4, "seq_len": 32, "max_steps": 1000, "grad_accum_steps": 4,
        "batch_ramp": [{"grad_accum_steps": 1}, {"start": 100, "grad_accum_steps": 4}],
    },
    optimizer={"lr": 1e-3, "lr_base_batch": 32},
    scheduler={"name": "wsd", "warmup_steps": 50, "stable_steps": 750, "decay_steps": 200},
    data={"phases": [
        {"start_step": 800, "lr_scale": 0.5, "dataset_weights": {"code": 2}},
        {"start_step": 900},
    ]},
    eval={"enabled": True, "datasets": {"dataset_path": "x"}, "interval": 300, "start_step": 301,
          "steps": 7},
    checkpoint={"interval": 400, "dyn_ckpt_window": {"stop": 64}},
    early_stop={"patience_steps": 600, "max_loss": 11},
)  # fmt: skip


def test_summary_of_run_with_every_setting():
    assert schedule_summary(FULL, dp=2, sequences_per_epoch=10_000) == (
        """\
length
  1,000 updates
  947,200 tokens
  29,600 sequences of 32 tokens
  2.96 epochs of 10,000 sequences

batch
  step 0            8 sequences, 256 tokens: 1 microbatch(es) of 8 sequences
  step 100          32 sequences, 1,024 tokens: 4 microbatch(es) of 8 sequences

learning rate
  wsd, peak 0.001, for updates of 32 sequences
  step 0            0           first update
  step 50           0.001       warm-up ends
  step 800          0.001       decay begins
  step 1,000        0.0001      decay ends, end of the run

phases
  step 800          learning rate x 0.5, weights {code = 2.0}
  step 900          learning rate x 1

evaluation
  every 300 updates from step 301 on, 7 batches of each set
  2 in all: 600, 900

samples
  none

activations
  none

checkpoints
  every 400 updates, and the last
  steps 0 to 64: a window of its own, kept for good
  12 in all: 0, 1, 2, 4, 8, 16, 32, 64, ...

early stopping
  metric = "eval/loss"
  mode = "auto"
  patience_steps = 600
  min_delta = 0.0
  max_loss = 11.0
"""
    )


def section(text, name):
    return text.split(f"{name}\n", 1)[1].split("\n\n")[0].splitlines()


def test_summary_of_run_with_defaults():
    text = schedule_summary(tiny_config(), dp=1)
    assert section(text, "length")[-1] == "  no epochs: the length of the data is not known"
    assert section(text, "phases") == section(text, "evaluation") == ["  none"]
    assert section(text, "checkpoints") == ["  every 1,000 updates, and the last", "  1 in all: 20"]
    assert text.endswith("early stopping\n  none\n")
    both = tiny_config(checkpoint={"epoch_interval": 2})
    assert section(schedule_summary(both, dp=1), "checkpoints")[1] == (
        "  at the end of every 2 epochs of the data, not counted below"
    )


def test_epochs_of_small_data_name_the_update_that_rounds_them():
    assert epoch_rounding(per_epoch=40, per_update=2) == ""
    config = tiny_config(train={"max_steps": 1, "batch_size": 40})
    assert section(schedule_summary(config, dp=1, sequences_per_epoch=10), "length")[-1] == (
        "  4 epochs of 10 sequences, in whole updates of 40 sequences"
    )


@pytest.mark.parametrize(
    ("scheduler", "optimizer", "turns"),
    [
        ({"name": "none"}, {}, {0: "first update", 20: "end of the run"}),
        (
            {"name": "constant"},
            {},
            {0: "first update", 4: "warm-up ends", 20: "end of the run"},
        ),
        (
            {"decay_steps": 30},
            {},
            {0: "first update", 4: "warm-up ends, decay begins", 20: "end of the run",
             34: "decay ends"},
        ),
        (
            {"name": "none"},
            {"name": "schedule_free_adamw", "schedule_free_adamw": {"warmup_steps": 3}},
            {0: "first update", 3: "warm-up ends", 20: "end of the run"},
        ),
    ],
)  # fmt: skip
def test_summary_lists_turns_of_learning_rate(scheduler, optimizer, turns):
    config = tiny_config(scheduler=scheduler, optimizer=optimizer)
    lines = section(schedule_summary(config, dp=1), "learning rate")[1:]
    words = {int(line.split()[1]): line.split("  ")[-1].strip() for line in lines}
    assert words == turns


def test_summary_counts_steps_without_listing_them():
    """The steps are counted and not listed: there would be 400 million of them."""
    config = tiny_config(
        train={"max_steps": 2_000_000_000},
        checkpoint={"interval": 5},
        eval={
            "enabled": True,
            "datasets": {"dataset_path": "x"},
            "interval": 5,
            "start_step": 12,
        },
    )
    text = schedule_summary(config, dp=1)
    assert "399,999,998 in all: 15, 20, 25, 30, 35, 40, 45, 50, ..." in text
    assert "400,000,000 in all: 5, 10, 15, 20, 25, 30, 35, 40, ..." in text
    assert "decay ends, end of the run" in text


def test_summary_file_is_replaced_on_restart(tmp_path):
    write_summary(tmp_path, "first")
    write_summary(tmp_path, "second")
    assert [path.name for path in tmp_path.iterdir()] == ["schedule_summary.txt"]
    assert (tmp_path / "schedule_summary.txt").read_text() == "second"


def test_unwritable_directory_raises(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        write_summary(tmp_path / "missing", "text")


@pytest.mark.usefixtures("own_names")
def test_registered_schedule_shows_only_its_ends():
    register_scheduler("half")(lambda config, max_steps, stages: lambda n: 0.5)
    scheduler = {"name": "half", "warmup_steps": 5}
    text = schedule_summary(tiny_config(scheduler=scheduler, optimizer={"lr": 0.5}), dp=1)
    assert (
        """\
learning rate
  half, peak 0.5
  step 0            0.25        first update
  step 20           0.25        end of the run
"""
        in text
    )


def test_saves_at_epochs_require_data_with_epochs():
    config = tiny_config(checkpoint={"epoch_interval": 1}, data={"dataset_type": "synthetic"})
    data_sets = open_data(config)
    with pytest.raises(UserError, match=r"epoch_interval = 1: .* no epochs\. Remove it and set"):
        record_data(config, Progress(), data_sets, rows=2, has_begun=False)
