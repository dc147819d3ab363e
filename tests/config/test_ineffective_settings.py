"""Warnings about ineffective settings."""

from pathlib import Path

import pytest

from jaxforge.config import JobConfig, load_config, load_unresolved
from jaxforge.config.ineffective_settings import ineffective_settings

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.toml"))
ON_CPU = ("debug", "moe", "quickstart")
USUAL = {
    "train": {"max_steps": 50, "mixed_precision": "fp32"},
    "scheduler": {"warmup_steps": 5},
    "checkpoint": {"interval": 10},
    "data": {"dataset_path": "data/web/train"},
    "eval": {
        "enabled": True,
        "datasets": {"dataset_path": "data/web/validation"},
        "interval": 10,
    },
}


def warnings_of(sections, platform="cpu"):
    merged = {name: {**USUAL.get(name, {}), **sections.get(name, {})}
              for name in (*USUAL, *(sections.keys() - USUAL.keys()))}  # fmt: skip
    return ineffective_settings(JobConfig.model_validate(merged), platform)


def test_effective_settings_give_no_warning():
    assert warnings_of({}) == []


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"scheduler": {"warmup_steps": 50}},
            "scheduler.warmup_steps = 50 is not less than train.max_steps = 50, so the "
            "learning rate never reaches optimizer.lr: lower scheduler.warmup_steps",
        ),
        ({"scheduler": {"name": "wsd", "stable_steps": 45}}, "never decays"),
        ({"scheduler": {"name": "wsd"}}, "decays from the end of the warm-up"),
        ({"data": {"phases": [{"start_step": 60, "lr_scale": 0.5}]}}, "the phase never begins"),
        ({"checkpoint": {"interval": 1000}}, "checkpoint.interval = 1,000 exceeds"),
        (
            {"eval": {"interval": 51}},
            "eval.interval = 51 exceeds train.max_steps = 50, so evaluation never runs: lower "
            "eval.interval",
        ),
        (
            {"eval": {"datasets": [
                {"name": "a", "dataset_path": "a"},
                {"name": "b", "dataset_path": "b", "interval": 51},
            ]}},
            "eval.datasets[1].interval = 51 exceeds train.max_steps = 50, so evaluation never "
            "runs: lower eval.datasets[1].interval",
        ),
        (
            {"eval": {"datasets": [
                {"name": "a", "dataset_path": "a", "interval": 30},
                {"name": "b", "dataset_path": "b", "interval": 20},
            ]}, "checkpoint": {"keep_best_n": 1}},
            'checkpoint.best_metric = "eval/loss" is never logged, because no step up to '
            "train.max_steps = 50 evaluates all sets: name the metric of one set, such as "
            "eval/a/loss",
        ),
        (
            {"eval": {"start_step": 45, "interval": 40}},
            "eval.start_step = 45 leaves no multiple of eval.interval = 40 up to train.max_steps",
        ),
        (
            {"optimizer": {"skip_idle_experts": True}},
            "optimizer.skip_idle_experts = true has no effect with model.num_experts = 0: remove",
        ),
        (
            {"dpo": {"beta": 0.2}},
            'dpo.beta = 0.2 has no effect with train.objective = "next_token": remove it, or set '
            'train.objective to "dpo"',
        ),
        (
            {"train": {"ema_interval": 10}},
            "train.ema_interval = 10 has no effect with train.ema_decay = 0.0: remove it, or set "
            "train.ema_decay",
        ),
        (
            {"train": {"mtp_loss_weight": 0.5}},
            "train.mtp_loss_weight = 0.5 has no effect with model.mtp_depth = 0",
        ),
        (
            {"profiling": {"start_step": 3}},
            "profiling.start_step = 3 has no effect with profiling.enable = false",
        ),
        ({"lora": {"alpha": 32}}, "lora.alpha = 32.0 has no effect with lora.rank = 0"),
        (
            {"optimizer": {"muon": {"ns_steps": 7}}},
            'optimizer.muon.ns_steps = 7 has no effect with optimizer.name = "adamw": remove it, '
            'or set optimizer.name to "muon"',
        ),
        (
            {"train": {"ema_decay": 0.9, "ema_interval": 30, "ema_start": 30}},
            "leave no update of the average up to train.max_steps = 50: change train.ema_interval",
        ),
        (
            {"train": {"ema_decay": 0.999, "ema_dtype": "bfloat16"}},
            'train.ema_dtype = "bfloat16" adds a random error of about 9 in the last digit',
        ),
        ({"data": {"dataset_path": ""}}, "no data are set, so tokens are random"),
        (
            {"train": {"mixed_precision": "bf16"}},
            'train.mixed_precision = "bf16" is slow on CPUs, which compute in float32: change '
            'train.mixed_precision to "fp32"',
        ),
        (
            {"eval": {"datasets": {"dataset_path": "data/web/../web/train/"}}},
            'eval.datasets[0].dataset_path = "data/web/../web/train/" is also the training data',
        ),
        (
            {
                "data": {"datasets": [{"path": "a", "name": "a"}, {"path": "gs://x/b"}]},
                "eval": {
                    "datasets": [{"name": "c", "dataset_path": "c"},
                                 {"name": "b", "dataset_path": "gs://x/b/"}],
                },
            },
            'eval.datasets[1].dataset_path = "gs://x/b/" is also the training data',
        ),
        (
            {
                "data": {"dataset_path": "", "hf_dataset_name": "wikitext"},
                "eval": {
                    "datasets": [{"hf_dataset_name": "wikitext", "hf_dataset_split": "train"}],
                },
            },
            'eval.datasets[0].hf_dataset_split = "train" is also the training data',
        ),
        (
            {"train": {"exit_interval": 60}},
            "train.exit_interval = 60 exceeds train.max_steps = 50, so it has no effect: "
            "lower it",
        ),
        (
            {"metrics": {"straggler_report_interval": 100}},
            "metrics.straggler_report_interval = 100 exceeds",
        ),
        ({"profiling": {"enable": True, "start_step": 60, "end_step": 70}}, "profiling.start_step"),
        (
            {"early_stop": {"metric": "train/loss", "patience_steps": 99}},
            "early_stop.patience_steps = 99 exceeds",
        ),
        ({"checkpoint": {"export_interval": 6}}, "exceeds the 5 checkpoints of the run"),
    ],
)  # fmt: skip
def test_ineffective_setting_is_reported(sections, expected):
    (warning,) = warnings_of(sections)
    assert expected in warning


def test_config_that_contains_all_keys_gives_no_warning(tmp_path):
    config = JobConfig.model_validate(USUAL)
    (tmp_path / "config.toml").write_text(config.to_toml())
    loaded = load_config(tmp_path / "config.toml")
    assert loaded.is_set("train.ema_interval")
    assert loaded.is_set("dpo.beta")
    assert ineffective_settings(loaded, "cpu") == []


def test_disabled_features_give_no_warning():
    off = {"enabled": False, "interval": 1000, "datasets": {"dataset_path": "data/web/train"}}
    assert warnings_of({"eval": off, "metrics": {"straggler_report_interval": 0}}) == []
    assert warnings_of({"train": {"mixed_precision": "bf16"}}, "gpu") == []
    short = {"ema_decay": 0.9, "ema_dtype": "bfloat16"}
    assert warnings_of({"train": short}) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_give_no_warning(path):
    config = load_unresolved(path).resolve(None, lambda *_: 10_000)
    warnings = ineffective_settings(config, "cpu" if path.stem in ON_CPU else "gpu")
    on_random_tokens = path.stem == "debug"
    assert len(warnings) == on_random_tokens, warnings
    assert all("tokens are random" in warning for warning in warnings)
