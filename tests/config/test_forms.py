"""Keys that are read and stored as other keys: KempnerForge's, and those of older runs."""

import pytest

from jaxforge.config import load_config, load_unresolved
from jaxforge.config.reading.kempnerforge import STORED_AS
from jaxforge.config.reading.schema import all_keys
from jaxforge.errors import UserError

EXPERTS = "model.num_experts=4"


def load(*settings, file=None, tmp_path=None):
    path = None
    if file is not None:
        path = tmp_path / "x.toml"
        path.write_text(file)
    return load_config(path, [f"--{setting}" for setting in settings])


@pytest.mark.parametrize(
    ("read", "stored"),
    [
        (["model.mixer=mamba2"], ["model.mixer_pattern=['mamba2']"]),
        (
            [EXPERTS, "model.moe_frequency=3"],
            [EXPERTS, "model.feed_forward_pattern=['dense','dense','experts']"],
        ),
        (["model.moe_frequency=3"], []),  # without experts
        (["model.ffn_dim_multiplier=1.3"], ["model.ffn_hidden_dim=14336"]),
        (["model.ffn_dim_multiplier=1.3", "model.ffn_hidden_dim=9"], ["model.ffn_hidden_dim=9"]),
        (
            ["model.moe_expert_ffn_multiplier=0.5", "model.ffn_hidden_dim=72"],
            ["model.moe_expert_dim=32", "model.ffn_hidden_dim=72"],
        ),
        (["model.moe_expert_ffn_multiplier=0.5"], ["model.moe_expert_dim=5504"]),
        (
            ["data.anneal_start_step=5", "data.anneal_weights.a=1"],
            ["data.phases={'start_step': 5, 'dataset_weights': {'a': 1}}"],
        ),
        (["data.anneal_weights.a=1"], []),
        (
            ["eval.dataset_path=a", "eval.file_pattern=*.bin"],
            ["eval.datasets={'dataset_path': 'a', 'file_pattern': '*.bin'}"],
        ),
        (["eval.hf_dataset_name=a"], ["eval.datasets={'hf_dataset_name': 'a'}"]),
        (["eval.file_pattern=a"], []),
        (
            ["metrics.enable_wandb", "metrics.wandb_run_id=1e3", "metrics.enable_mlflow=true",
             "metrics.mlflow_tracking_uri=x", "metrics.mlflow_experiment=y",
             "metrics.wandb_project=None", "metrics.enable_trackio=false"],
            ["metrics.writers=[{'name': 'wandb', 'run_id': '1e3'},"
             "{'name': 'mlflow', 'location': 'x', 'project': 'y'}]"],
        ),
        (["metrics.wandb_project=a"], []),
        (["metrics.log_straggler"], ["metrics.straggler_report_interval=100"]),
        (["metrics.log_straggler=false"], []),
        (
            ["early_stop.active", "early_stop.max_loss=3"],
            ["early_stop.max_loss=3"],
        ),
        (["checkpoint.dyn_ckpt_window.strategy=power2"], ["checkpoint.dyn_ckpt_window={}"]),
        (
            ["train.rampup_batch_size=[1,1,4]", "train.global_batch_size=2",
             "train.grad_accum_steps=2"],
            ["train.batch_ramp=[{'start':0,'global_batch_size':1},"
             "{'start':4,'global_batch_size':2}]",
             "train.global_batch_size=2", "train.grad_accum_steps=2"],
        ),
    ],
)  # fmt: skip
def test_read_form_equals_stored_form(read, stored):
    assert load(*read) == load(*stored)


@pytest.mark.parametrize(
    ("file", "setting", "key", "value"),
    [
        ("[model]\nnum_experts = 4\nfeed_forward_pattern = ['dense', 'experts']",
         "model.moe_frequency=1", "model.feed_forward_pattern", ()),
        ("[model]\nnum_experts = 4\nmoe_frequency = 3",
         "model.feed_forward_pattern=['experts','dense']", "model.feed_forward_pattern",
         ("experts", "dense")),
        ("[model]\nffn_hidden_dim = 64\n", "model.ffn_dim_multiplier=1.0", "model.ffn_hidden_dim",
         None),
        ("[[metrics.writers]]\nname = 'wandb'", "metrics.enable_wandb=false", "metrics.writers",
         ()),
        ("[metrics]\nenable_wandb = true", "metrics.writers=[]", "metrics.writers", ()),
        ("[early_stop]\nmax_loss = 3", "early_stop.active=false", "early_stop.max_loss", None),
        ("[early_stop]\nactive = false\nmax_steps = 1", "early_stop.max_loss=3",
         "early_stop.max_loss", 3.0),
        ("[early_stop]\nactive = false\nmax_steps = 1", "early_stop.max_loss=3",
         "early_stop.max_steps", None),
        ("[eval]\ndatasets = {dataset_path = 'a'}", "eval.dataset_path=", "eval.datasets", ()),
        ("[eval]\ndataset_path = 'a'", "eval.datasets=[]", "eval.datasets", ()),
        ("[data]\nphases = {start_step = 9}", "data.anneal_start_step=5",
         "data.phases.0.start_step", 5),
        ("[metrics]\nlog_straggler = false\n", "metrics.straggler_report_interval=7",
         "metrics.straggler_report_interval", 7),
    ],
)  # fmt: skip
def test_command_line_overrides_other_form_in_file(tmp_path, file, setting, key, value):
    config = load(setting, file=file, tmp_path=tmp_path)
    for part in key.split("."):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    assert config == value


def test_set_without_name_keeps_its_other_keys(tmp_path):
    file = "[eval]\ndatasets = {dataset_path = 'a', steps = 3}"
    (dataset,) = load("eval.dataset_path=b", file=file, tmp_path=tmp_path).eval.datasets
    assert (dataset.dataset_path, dataset.steps) == ("b", 3)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("[model]\nnum_experts = 4\nmoe_frequency = 'two'",
         'x.toml:3: model.moe_frequency = "two": expected an integer of at least 0'),
        ("[model]\nnum_experts = 4\nmoe_frequency = 0", "x.toml:3: model.moe_frequency = 0: must"),
        ("[model]\nnum_experts = 4\nmoe_frequency = 2\nfeed_forward_pattern = ['experts']",
         "x.toml:3: model.moe_frequency = 2: model.feed_forward_pattern is another form of this"),
        ("[model]\nmixer = 'mamba3'", 'x.toml:2: model.mixer = "mamba3": expected one of'),
        ("[model]\nffn_dim_multiplier = true", "model.ffn_dim_multiplier = true: expected a num"),
        ("[data]\nanneal_start_step = -1", "x.toml:2: data.anneal_start_step = -1: expected an"),
        ("[data]\nanneal_start_step = 1\nphases = {start_step = 2}",
         "x.toml:2: data.anneal_start_step = 1: data.phases is another form"),
        ("[eval]\ndataset_path = {a = 1}", "x.toml:2: eval.dataset_path = {a = 1}: expected te"),
        ("[eval]\ndataset_path = 'a'\ndatasets = {dataset_path = 'b'}",
         'x.toml:2: eval.dataset_path = "a": eval.datasets is another form of this setting'),
        ("[metrics]\nenable_wandb = 'maybe'", "x.toml:2: metrics.enable_wandb = "),
        ("[metrics]\nenable_wandb = true\nwandb_interval = -1",
         "x.toml:3: metrics.wandb_interval = -1: expected an integer greater than 0"),
        ("[early_stop]\nactive = true", "x.toml:2: early_stop.active = true: requires one of"),
        ("[checkpoint.dyn_ckpt_window]\nstrategy = 'power3'",
         'x.toml:2: checkpoint.dyn_ckpt_window.strategy = "power3": expected one of power2'),
        ("[train]\nrampup_batch_size = [2, 2]", "x.toml:2: train.rampup_batch_size = [2, 2]: exp"),
        ("[train]\nrampup_batch_size = [16, 16, 100]", "train.global_batch_size, which is not"),
        ("[train]\nrampup_batch_size = [16, 16, 100]\nglobal_batch_size = 56", "must reach train"),
        ("[train]\nrampup_batch_size = [16, 16, 100]\nglobal_batch_size = 16", "must reach train"),
        ("[train]\nrampup_batch_size = [1, 1, 100]\nglobal_batch_size = 20000", "increments"),
        ("[train]\nrampup_batch_size = [16, 16, 100]\nglobal_batch_size = 48\n"
         "grad_accum_steps = 2", "must be a multiple of a microbatch"),
    ],
)  # fmt: skip
def test_messages_name_the_key_that_was_written(tmp_path, file, message):
    with pytest.raises(UserError) as caught:
        load(file=file, tmp_path=tmp_path)
    assert message in str(caught.value)


def test_config_of_an_older_run_is_read(tmp_path):
    """Its file has all keys, most with their default."""
    file = """
[model]
mixer = "attention"
mixer_pattern = []
feed_forward_pattern = []
ffn_dim_multiplier = 1.0
ffn_hidden_dim = 128
moe_frequency = 1
moe_expert_ffn_multiplier = 1.0
[train]
batch_ramp = []
[data]
mixture_file = ""
phases = []
anneal_start_step = 0
anneal_weights = {}
[eval]
dataset_path = ""
file_pattern = "*.npy"
hf_dataset_split = "validation"
datasets = [{dataset_path = "a", file_pattern = "*.npy", name = "a"}]
[early_stop]
active = false
[checkpoint]
dyn_ckpt_window = {start = 0, stop = 8, strategy = "power2"}
[metrics]
enable_wandb = false
wandb_project = "jaxforge"
wandb_run_id = ""
tensorboard_dir = "tb_logs"
log_straggler = false
straggler_report_interval = 100
"""
    stored = """
[model]
ffn_hidden_dim = 128
[eval]
datasets = [{dataset_path = "a", name = "a"}]
[checkpoint]
dyn_ckpt_window = {stop = 8}
"""
    older = load(file=file, tmp_path=tmp_path)
    assert older == load(file=stored, tmp_path=tmp_path)
    assert load(file=older.to_toml(), tmp_path=tmp_path) == older


def test_stored_keys_exist_and_read_keys_do_not():
    keys = all_keys()
    for read, stored in STORED_AS.items():
        assert ".".join(read) not in keys
        assert ".".join(part for part in stored if isinstance(part, str)) in keys


def test_reference_of_durations_in_read_form():
    config = load_unresolved(
        None,
        ["--train.max_steps=100", "--data.anneal_start_step=90%", "--data.anneal_weights.a=1",
         "--data.datasets=[{path='x',name='a'},{path='y',name='b'}]"],
    ).resolve(1)  # fmt: skip
    assert config.data.phases[0].start_step == 90
