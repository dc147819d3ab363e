"""Conversion of durations to updates, and its errors."""

import pytest

from jaxforge.config import JobConfig, load_config, load_unresolved
from jaxforge.config.duration import Duration
from jaxforge.config.reading.schema import all_keys
from jaxforge.errors import UserError

BATCH = ["--train.seq_len=100", "--train.global_batch_size=10"]
"""1,000 tokens per update."""
RAMP = (
    "--train.grad_accum_steps=5",
    "--train.batch_ramp=[{'start': 0, 'grad_accum_steps': 1}, "
    "{'start': '2K tok', 'grad_accum_steps': 2}, {'start': '6K tok', 'grad_accum_steps': 5}]",
)
"""200, 400 and 1,000 tokens per update from steps 0, 10 and 20 on."""


def unresolved(*settings, file=None):
    return load_unresolved(
        file, [*BATCH, *(f"--{setting}".replace("----", "--") for setting in settings)]
    )


def epoch_of(n):
    return lambda config, rows: n


@pytest.fixture
def error_text(tmp_path, monkeypatch):
    """Return the error message for TOML text in x.toml with settings."""
    monkeypatch.chdir(tmp_path)

    def resolve(text, *settings, n_devices=1, epoch=None):
        (tmp_path / "x.toml").write_text(text)
        with pytest.raises(UserError) as caught:
            load_unresolved("x.toml", settings).resolve(n_devices, epoch)
        return str(caught.value)

    return resolve


@pytest.mark.parametrize(
    ("text", "updates"),
    [
        ("500", 500),
        ("7%", 70),
        ("0.25%", 2),
        ("2ep", 21),
        ("0.5 ep", 6),
        ("7K tok", 7),
        ("1 tok", 1),
        ("41 samples", 5),
    ],
)
def test_units_parse_from_command_line_and_file(tmp_path, text, updates):
    path = tmp_path / "x.toml"
    path.write_text(f"[scheduler]\nwarmup_steps = '{text}'\n[train]\nmax_steps = 1000")
    for pending in (
        unresolved(f"scheduler.warmup_steps={text}", "train.max_steps=1000"),
        unresolved(file=path),
    ):
        config = pending.resolve(1, epoch_of(104))
        assert config.scheduler.warmup_steps == updates
        assert type(config.scheduler.warmup_steps) is int


def test_step_keys_accept_durations():
    keys = {key for key, node in all_keys().items() if node.get("duration")}
    assert keys == {
        "train.max_steps", "train.batch_ramp.start", "train.ema_start", "scheduler.warmup_steps",
        "scheduler.decay_steps", "scheduler.stable_steps",
        "optimizer.schedule_free_adamw.warmup_steps",
        "eval.interval", "eval.start_step", "eval.sample_interval", "eval.tasks_interval",
        "eval.datasets.interval", "eval.datasets.start_step",
        "eval.activations_interval", "checkpoint.interval",
        "checkpoint.dyn_ckpt_window.start", "checkpoint.dyn_ckpt_window.stop",
        "data.phases.start_step",
        "early_stop.patience_steps", "early_stop.max_steps",
    }  # fmt: skip


def test_keys_in_tables_and_lists_accept_durations():
    config = unresolved(
        "train.max_steps=1000",
        "data.phases=[{'start_step': '10%'}, {'start_step': 200}, {'start_step': '0.5M tok'}]",
        "checkpoint.dyn_ckpt_window={'start': '1%', 'stop': '20K tok'}",
        "eval.interval=10%",
        "checkpoint.interval=1ep",
        "early_stop={'patience_steps': '2ep', 'max_steps': '90%'}",
    ).resolve(1, epoch_of(95))
    assert [phase.start_step for phase in config.data.phases] == [100, 200, 500]
    window = config.checkpoint.dyn_ckpt_window
    assert (window.start, window.stop) == (10, 20)
    assert (config.eval.interval, config.checkpoint.interval) == (100, 10)
    assert (config.early_stop.patience_steps, config.early_stop.max_steps) == (19, 900)


def test_single_table_becomes_list_with_durations():
    config = unresolved("train.max_steps=50", "data.phases={'start_step': '10%'}").resolve(1)
    assert config.data.phases[0].start_step == 5


def test_fraction_of_epoch_is_rounded_up():
    config = unresolved("train.max_steps=2.5ep", "scheduler.warmup_steps=10%").resolve(
        1, epoch_of(100)
    )
    assert (config.train.max_steps, config.scheduler.warmup_steps) == (25, 2)


def test_length_may_exceed_one_epoch():
    assert unresolved("train.max_steps=1000").resolve(1, epoch_of(100)).train.max_steps == 1000


def test_lengths_follow_ramp_from_their_start():
    config = unresolved(
        *RAMP, "train.max_steps=16K tok", "scheduler.name=wsd", "scheduler.warmup_steps=1K tok",
        "scheduler.stable_steps=2K tok", "scheduler.decay_steps=4K tok",
        "data.anneal_start_step=7K tok", "eval.interval=2K tok",
        "eval.sample_interval=4K tok",
    ).resolve(1)  # fmt: skip
    assert [stage.start for stage in config.train.stages()] == [0, 10, 20]
    assert config.train.max_steps == 30
    scheduler = config.scheduler
    assert scheduler.warmup_steps == 5
    assert scheduler.stable_steps == 5 + 3  # 1,000 tokens at 200 per update, the others at 400
    assert scheduler.decay_steps == 7 + 2  # 7 * 400, then 2 * 1,000
    assert config.data.phases[0].start_step == 21
    assert (config.eval.interval, config.eval.sample_interval) == (2, 4)  # with the full batch


def test_samples_follow_ramp():
    """Two, four and ten sequences per update."""
    stages = [{"grad_accum_steps": 1}, {"start": "19 samples", "grad_accum_steps": 2},
              {"start": "60 samples", "grad_accum_steps": 5}]  # fmt: skip
    config = unresolved(
        "train.grad_accum_steps=5", f"train.batch_ramp={stages}", "train.max_steps=81 samples",
        "eval.interval=25 samples",
    ).resolve(1)  # fmt: skip
    assert [stage.start for stage in config.train.stages()] == [0, 10, 20]
    assert (config.train.max_steps, config.eval.interval) == (23, 3)


def test_plateau_applies_to_wsd_only():
    config = unresolved(
        *RAMP,
        "scheduler.warmup_steps=0",
        "scheduler.stable_steps=20",
        "scheduler.decay_steps=2K tok",
    ).resolve(1)
    assert config.scheduler.decay_steps == 10


def test_ramp_accepts_shares_of_run():
    ramp = "train.batch_ramp=[{'grad_accum_steps': 1}, {'start': '10%', 'grad_accum_steps': 5}]"
    config = unresolved("train.grad_accum_steps=5", ramp, "train.max_steps=50").resolve(1)
    assert config.train.batch_ramp[1].start == 5


@pytest.mark.parametrize("n_devices", [1, 4])
def test_batch_depends_on_mesh(n_devices):
    settings = ["--train.seq_len=100", "--train.batch_size=5", "--train.grad_accum_steps=2"]
    config = load_unresolved(None, [*settings, "--train.max_steps=8K tok"]).resolve(n_devices)
    assert config.train.max_steps == 8 // n_devices


def test_config_without_durations_resolves_without_data():
    config = unresolved().resolve(None, lambda config, rows: pytest.fail("opened the data"))
    assert config == load_config(None, BATCH)


def test_data_are_opened_only_for_epochs():
    opened = []
    pending = unresolved("train.max_steps=1M tok", "eval.interval=5%")
    pending.resolve(1, lambda config, rows: opened.append(config))
    assert opened == []


def test_epoch_length_callback_gets_durations_not_numbers():
    seen = []

    def epoch_length(config, rows):
        seen.append((config, rows))
        return 100

    settings = ("train.max_steps=2ep", "eval.interval=10%", "data.phases={'start_step': '50%'}",
                "checkpoint.dyn_ckpt_window.stop=1ep")  # fmt: skip
    unresolved(*RAMP, *settings).resolve(1, epoch_length)
    [(config, rows)] = seen  # opened once
    assert rows == 2
    assert config.train.seq_len == 100
    for value in (config.train.max_steps, config.eval.interval, config.data.phases,
                  config.checkpoint.dyn_ckpt_window, config.train.batch_ramp):  # fmt: skip
        assert isinstance(value, Duration)


def test_resolved_file_contains_numbers(tmp_path):
    config = unresolved(
        *RAMP, "train.max_steps=3ep", "eval.interval=5%", "optimizer.lr_scale_rule=linear",
        "optimizer.lr_base_batch=5",
    ).resolve(1, epoch_of(100))  # fmt: skip
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "config.toml") == config
    assert JobConfig.model_validate(config.model_dump(mode="json")) == config


def test_invalid_mesh_is_reported_by_rules():
    settings = ["train.max_steps=50", "eval.interval=10%", "distributed.tp=3"]
    assert unresolved(*settings).resolve(2).eval.interval == 5
    accum = unresolved("train.grad_accum_steps=20", "train.max_steps=20K tok").resolve(1)
    assert accum.train.max_steps == 10  # 10 sequences cannot form 20 microbatches


def test_durations_without_data_or_devices_resolve_anywhere():
    settings = ["--train.max_steps=100K tok", "--scheduler.warmup_steps=10%"]
    assert load_config(None, [*BATCH, *settings]).scheduler.warmup_steps == 10
    mesh = ["--train.seq_len=100", "--train.batch_size=5", "--distributed.dp_shard=2"]
    assert load_config(None, [*mesh, *settings]).train.max_steps == 100


KNOWN = "[train]\nseq_len = 100\nglobal_batch_size = 10\nmax_steps = 100\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[train]\nmax_steps = '10%'",
            'x.toml:2: train.max_steps = "10%": the run cannot be a share of itself; give '
            "updates, epochs or tokens",
        ),
        (
            KNOWN + "[scheduler]\nwarmup_steps = '10 %%'",
            'x.toml:6: scheduler.warmup_steps = "10 %%": expected an integer of at least 0, or a '
            'duration like "10%", "2ep", "1B tok"',
        ),
        (
            KNOWN + "[eval]\ninterval = '0%'",
            "x.toml:6: eval.interval = 0: expected an integer greater than 0, or a duration like "
            '"10%", "2ep", "1B tok"',
        ),
        (
            KNOWN + "[scheduler]\nwarmup_steps = '2ep'\n[eval]\ninterval = '1ep'",
            'x.toml:6: scheduler.warmup_steps = "2ep": the training data are not read here: give '
            "updates, a share or tokens\n"
            'x.toml:8: eval.interval = "1ep": the training data are not read here: give updates, a '
            "share or tokens",
        ),
        (
            KNOWN + "[[data.phases]]\nstart_step = '20%'\n[[data.phases]]\nstart_step = '10%'",
            "x.toml:5: [data] start_step of phases must increase: [20, 10]",
        ),
        (
            "[train]\nmax_steps = '1B tok'\nbatch_size = 'many'\n[eval]\ninterval = '1ep'",
            'x.toml:3: train.batch_size = "many": expected an integer greater than 0',
        ),
        (
            "[train]\nmax_steps = '1M tok'\ngrad_accum_steps = 2\n[[train.batch_ramp]]\n"
            "grad_accum_steps = 1\n[[train.batch_ramp]]\nstart = '10%'\ngrad_accum_steps = 2",
            'x.toml:7: train.batch_ramp[1].start = "10%": train.max_steps depends on '
            "train.batch_ramp: give one of them in updates",
        ),
        (
            "[train]\nbatch_size = '10%'",
            'x.toml:2: train.batch_size = "10%": expected an integer greater than 0',
        ),
    ],
)
def test_unresolvable_duration_names_file_and_line(error_text, text, message):
    assert error_text(text) == message


def test_data_without_epochs_are_refused(error_text):
    text = KNOWN + "[scheduler]\nwarmup_steps = '2ep'"
    assert error_text(text, epoch=epoch_of(None)) == (
        'x.toml:6: scheduler.warmup_steps = "2ep": random tokens, streams and mixtures have no '
        'epochs: give updates, a share such as "10%", or tokens such as "1B tok"'
    )


def test_unknown_devices_are_reported(error_text):
    text = "[train]\nmax_steps = '1B tok'"
    assert error_text(text, n_devices=None) == (
        'x.toml:2: train.max_steps = "1B tok": the sequences per update are unknown here: set '
        "train.global_batch_size, or distributed.dp_shard"
    )


def test_duration_settings_are_named_in_messages(error_text):
    assert error_text(KNOWN, "--eval.interval=1ep") == (
        "--eval.interval=1ep: the training data are not read here: give updates, a share or tokens"
    )


@pytest.mark.parametrize(
    ("rule", "n_devices", "lr", "batch"), [("linear", 1, 2e-3, 40), ("sqrt", 4, 2e-3, 160)]
)
def test_learning_rate_scales_with_batch(rule, n_devices, lr, batch):
    """The batch is 4 times the base batch (linear), or 16 times (sqrt)."""
    settings = [
        "--train.batch_size=10", "--train.grad_accum_steps=4", "--optimizer.lr=5e-4",
        "--optimizer.muon.adam_lr=1e-4", f"--optimizer.lr_scale_rule={rule}",
        "--optimizer.lr_base_batch=10",
    ]  # fmt: skip
    config = load_unresolved(None, settings).resolve(n_devices)
    optimizer = config.optimizer
    assert optimizer.lr == pytest.approx(lr)
    assert optimizer.muon.adam_lr == pytest.approx(4e-4)
    assert (optimizer.lr_scale_rule, optimizer.lr_base_batch) == ("none", batch)


def test_default_learning_rate_scales_with_batch():
    config = unresolved("optimizer.lr_scale_rule=linear", "optimizer.lr_base_batch=5").resolve(1)
    assert config.optimizer.lr == pytest.approx(6e-4)


def test_learning_rate_for_unknown_batch_is_refused(error_text):
    text = "[optimizer]\nlr_scale_rule = 'linear'\nlr_base_batch = 256"
    assert error_text(text, n_devices=None) == (
        'optimizer.lr_scale_rule = "linear": the sequences per update are unknown here: set '
        "train.global_batch_size, or distributed.dp_shard"
    )
