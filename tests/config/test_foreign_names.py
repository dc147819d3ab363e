"""Suggestions for names of keys in other frameworks, and refusal of files in other formats."""

import pytest

from jaxforge.config import load_config
from jaxforge.config.reading import foreign_names
from jaxforge.config.reading.kempnerforge import RETIRED
from jaxforge.config.reading.load import make_config
from jaxforge.config.reading.schema import all_keys
from jaxforge.errors import UserError


def message_of(path, *settings):
    with pytest.raises(UserError) as caught:
        load_config(path, settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("train.max_grad_norm", "train.grad_clip_norm"),  # Trainer; a key of [early_stop] too
        ("model.hidden_size", "model.dim"),  # config.json
        ("model.num_attention_heads", "model.n_heads"),
        ("train.train_iters", "train.max_steps"),  # Megatron
        ("train.tensor_model_parallel_size", "distributed.tp"),
        ("checkpoint.save", "checkpoint.dir"),
        ("train.save_steps", "checkpoint.interval"),
        ("trainer.gradient_clip_val", "train.grad_clip_norm"),  # NeMo
        ("training.steps", "train.max_steps"),  # torchtitan
        ("training.seq_len", "train.seq_len"),
        ("validation.steps", "eval.steps"),
        ("block_size", "train.seq_len"),  # nanoGPT
        ("micro-batch-size", "train.batch_size"),
        ("LR_SCHEDULER.BASE_LR", "optimizer.lr"),  # linnaeus
        ("TRAIN.EARLY_STOP.PATIENCE_STEPS", "early_stop.patience_steps"),
        ("OPTIMIZER.WEIGHT_DECAY", "optimizer.weight_decay"),
        ("gradient_clipping", "train.grad_clip_norm"),  # accelerate
    ],
)
def test_name_in_other_framework_suggests_the_key(name, key):
    setting = f"--{name}=1"
    assert message_of(None, setting) == f"{setting}: unknown key {name}; did you mean {key}?"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("train.dtype", "train.mixed_precision"),
        ("train.min_lr", "scheduler.min_lr_ratio"),
        ("num_train_epochs", '"3ep"'),
        ("fsdp_config.fsdp_offload_params", "distributed.dp_shard"),
        ("LOSS.GRADNORM_ENABLED", "GradNorm is not part of jaxforge"),
        ("model.alibi_max_bias", "retired with ALiBi"),
    ],
)
def test_name_without_equal_key_is_explained(name, part):
    message = message_of(None, f"--{name}=1")
    assert part in message
    assert "did you mean" not in message


@pytest.mark.parametrize("name", ["generate", "checkpoint.sav", "train.colour"])
def test_name_without_likeness_gets_no_suggestion(name):
    assert message_of(None, f"--{name}=1").endswith(f"unknown key {name}")


def test_tables_of_other_frameworks_are_explained_by_key(tmp_path):
    (tmp_path / "x.toml").write_text("[lr_scheduler]\nwarmup_steps = 3\n[job]\nfolder = 'x'\n")
    assert message_of(tmp_path / "x.toml").splitlines() == [
        f"{tmp_path}/x.toml:2: unknown key lr_scheduler.warmup_steps; did you mean "
        "scheduler.warmup_steps?",
        f"{tmp_path}/x.toml:4: unknown key job.folder",
    ]


def test_suggested_keys_exist_and_names_are_unique():
    keys = all_keys()
    names = [name for group in foreign_names.NAMES.values() for name in group]
    names += [name for group in foreign_names.NOTES for name in group.split()]
    assert set(foreign_names.NAMES) <= keys.keys()
    assert len(names) == len(set(names))
    assert not keys.keys() & set(names)


def test_yaml_is_refused_with_its_settings_in_toml(tmp_path):
    (tmp_path / "x.yaml").write_text(
        "model: {hidden_size: 64}\nlearning_rate: 3e-4\ntraining:\n  bf16: true\n  colour: red\n"
    )
    first, *toml = message_of(tmp_path / "x.yaml").splitlines()
    assert first == f"{tmp_path}/x.yaml: a config is a TOML file; in TOML, its settings are:"
    (tmp_path / "x.toml").write_text("\n".join(toml))
    config = load_config(tmp_path / "x.toml")
    assert (config.model.dim, config.optimizer.lr) == (64, 3e-4)
    assert toml[-2].startswith("# training.bf16: train.mixed_precision")
    assert toml[-1] == "# training.colour has no key of the same meaning"


@pytest.mark.parametrize(("name", "text"), [("x.yml", "a: ["), ("x.json", "{}"), ("x.YAML", "a")])
def test_unreadable_yaml_and_json_are_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    expected = f"{tmp_path / name}: a config is a TOML file; see docs/configs.md"
    assert message_of(tmp_path / name) == expected


def test_retired_keys_of_stored_configs_are_ignored_at_their_defaults():
    stored: dict[str, dict[str, object]] = {}
    for name, (default, _) in RETIRED.items():
        section, key = name.split(".")
        stored.setdefault(section, {})[key] = default
    assert make_config(stored) == make_config({})
    for name, (_, note) in RETIRED.items():
        section, key = name.split(".")
        with pytest.raises(UserError, match=rf"^a run: unknown key {name}: {note}"):
            make_config({**stored, section: {**stored[section], key: "another"}}, source="a run")
