"""Banner of a run."""

import io
import re

import jax
from rich.console import Console

from jaxforge.parallel.device_memory import bytes_per_device, gigabytes
from jaxforge.state.progress import Progress
from jaxforge.telemetry.console import banner
from jaxforge.telemetry.numbers import human
from jaxforge.training.banner import rows
from tests.conftest import tiny_config
from tests.helpers import setup


def banner_rows(progress, derived=(), **sections):
    s = setup(tiny_config(distributed={"dp_shard": 2}, **sections))
    return rows(s, s.abstract_state(), progress, derived=derived)


def test_banner_shows_totals():
    train = {"max_steps": 1000, "seed": 7, "data_seed": 8}
    reported = banner_rows(
        Progress(sequences_per_epoch=4000), train=train, data={"dataset_path": "texts"}
    )
    assert reported["length"] == "1,000 steps, 512K tokens, 4 epochs"
    assert reported["data"] == "texts: 128K tokens"
    assert reported["seed"] == "7, of the data 8"
    assert f"jax {jax.__version__}, Python 3." in reported["versions"]
    assert reported["memory"].startswith("about ")
    assert reported["memory"].endswith(
        " per device, for the arrays of a step; libraries, compiler, data and saves need more"
    )
    assert "on the host" not in reported


def test_banner_names_the_update_that_rounds_epochs():
    length = banner_rows(Progress(sequences_per_epoch=10), train={"max_steps": 1})["length"]
    assert re.search(r", [\d.]+ epochs, in whole updates of \d+ sequences$", length)


def test_banner_shows_average_of_parameters():
    train = {"ema_decay": 0.999, "ema_interval": 10, "ema_start": 1000}
    ours = setup(tiny_config(distributed={"dp_shard": 2}, train=train))
    size = gigabytes(bytes_per_device(ours.abstract_state().params))
    assert banner_rows(Progress(), train=train)["average"] == (
        "of the parameters, decay 0.999, every 10 updates, from update 1,001 on, in float32: "
        f"{size} per device"
    )
    assert "average" not in banner_rows(Progress())


def test_banner_shows_what_groups_send():
    train = {"outer_interval": 10, "outer_dtype": "int4"}
    ours = setup(tiny_config(distributed={"dp_replicate": 2, "dp_shard": 2}, train=train))
    values = bytes_per_device(ours.abstract_state().params) / 4
    apart, together = (human(x) for x in (values * (0.5 + 4 / 128) / 10, values * 4))
    assert rows(ours, ours.abstract_state(), Progress())["groups"] == (
        f"2 train apart for 10 updates: {apart}B per device and update between them, "
        f"{together}B if they trained together"
    )
    assert "groups" not in banner_rows(Progress())


def test_banner_without_data_shows_resumed_step():
    reported = banner_rows(Progress(step=5))
    assert reported["length"] == "20 steps, 10.2K tokens; from step 5 on"
    assert reported["data"] == "synthetic random tokens (no data)"
    assert reported["seed"] == "42"


def test_banner_shows_reasons_of_derived_values():
    lines = ['train.max_steps = 20: written as "2ep"', "optimizer.lr = 0.003: scaled"]
    assert banner_rows(Progress(), lines)["derived"].splitlines() == lines
    assert "derived" not in banner_rows(Progress())


def test_banner_fits_narrow_terminal():
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=True, color_system=None)
    banner(console, banner_rows(Progress()))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("model")
