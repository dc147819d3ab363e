"""Defaults, derived values, immutability and the rules within each section."""

import copy
import pickle

import pytest
from pydantic import ValidationError

from jaxforge.config import (
    BatchStage,
    CheckpointConfig,
    DataConfig,
    DatasetSource,
    DistributedConfig,
    DynCkptWindow,
    EarlyStopConfig,
    EvalConfig,
    EvalDataset,
    JobConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ProfilingConfig,
    RopeScaling,
    SchedulerConfig,
    TrainConfig,
    TrainingPhase,
)
from jaxforge.config.metrics import MetricsWriter
from jaxforge.config.optimizer import MuonConfig, ScheduleFreeAdamWConfig

MOE = {"num_experts": 4}
SEQUENCES = {"key": "global_batch_size", "global_batch_size": 8}
UNNAMED, WANDB = {"dataset_path": "path"}, {"name": "wandb"}
EVAL_A, EVAL_B = ({"name": name, "dataset_path": "path"} for name in "ab")


def ramp(*stages, key="grad_accum_steps", **train):
    """Return keys of [train] with 4 microbatches and stages of (start, size)."""
    tables = [{"start": start, key: size} for start, size in stages]
    return {"grad_accum_steps": 4, "batch_ramp": tables, **train}


@pytest.mark.parametrize(
    ("section", "good", "bad"),
    [
        (ModelConfig, {"dim": 64, "n_heads": 4}, {"dim": 65, "n_heads": 4}),
        (ModelConfig, {"n_heads": 32, "n_kv_heads": 8}, {"n_heads": 32, "n_kv_heads": 5}),
        (ModelConfig, {"dim": 8, "n_heads": 4}, {"dim": 12, "n_heads": 4}),
        (ModelConfig, {"dim": 65, "n_heads": 4, "head_dim": 6}, {"head_dim": 5}),
        (ModelConfig, {"qk_norm_eps": 1e-9}, {"qk_norm_eps": 0}),
        (ModelConfig, {"n_layers": 1}, {"n_layers": 0}),
        (ModelConfig, {"vocab_size": 1}, {"vocab_size": 0}),
        (ModelConfig, {"n_kv_heads": 1}, {"n_kv_heads": 0}),
        (ModelConfig, {"norm_eps": 1e-9}, {"norm_eps": 0}),
        (ModelConfig, {"rope_theta": 1}, {"rope_theta": 0}),
        (ModelConfig, {"sdpa_backend": "reference"}, {"sdpa_backend": "fast"}),
        (ModelConfig, {**MOE, "moe_top_k": 4}, {**MOE, "moe_top_k": 5}),
        (ModelConfig, {"moe_top_k": 0}, {**MOE, "moe_top_k": 0}),
        (ModelConfig, {}, {**MOE, "moe_sequence_aux_loss_weight": -1}),
        (ModelConfig, {}, {**MOE, "moe_router_z_loss_weight": -1}),
        (ModelConfig, {"moe_bias_schedule": "cosine_decay"}, {"moe_bias_schedule": "cosine"}),
        (RopeScaling, {"high_freq_factor": 1.5}, {"high_freq_factor": 1}),
        (TrainConfig, {"batch_size": 1}, {"batch_size": 0}),
        (TrainConfig, {"seq_len": 1}, {"seq_len": 0}),
        (TrainConfig, {"max_steps": 1}, {"max_steps": 0}),
        (TrainConfig, {"grad_accum_steps": 1}, {"grad_accum_steps": 0}),
        (TrainConfig, {"grad_clip_norm": 0.1}, {"grad_clip_norm": 0}),
        (TrainConfig, {"activation_checkpointing": "dots_saveable"}, {"loss_fn": "mse"}),
        (OptimizerConfig, {"lr": 1}, {"lr": 0}),
        (OptimizerConfig, {"lr": 1}, {"lr": float("inf")}),
        (OptimizerConfig, {"weight_decay": 0}, {"weight_decay": -0.1}),
        (OptimizerConfig, {"betas": (0, 0.9)}, {"betas": (0.9, 1)}),
        (OptimizerConfig, {"betas": (0, 0.9)}, {"betas": (0.9,)}),
        (OptimizerConfig, {"eps": 1e-20}, {"eps": 0}),
        (MuonConfig, {"momentum": 0.5}, {"momentum": 1}),
        (MuonConfig, {"ns_steps": 1}, {"ns_steps": 0}),
        (ScheduleFreeAdamWConfig, {"warmup_steps": 0}, {"warmup_steps": -1}),
        (OptimizerConfig, {"name": "muon"}, {"name": "adam"}),
        (SchedulerConfig, {"warmup_steps": 0}, {"warmup_steps": -1}),
        (SchedulerConfig, {"min_lr_ratio": 1}, {"min_lr_ratio": 1.1}),
        (SchedulerConfig, {"min_lr_ratio": 0}, {"min_lr_ratio": -0.1}),
        (SchedulerConfig, {"wsd_decay_type": "sqrt"}, {"wsd_decay_type": "step"}),
        (SchedulerConfig, {"rex_alpha": 0.5}, {"rex_alpha": 0}),
        (SchedulerConfig, {"warmup_offset": 1}, {"warmup_offset": 2}),
        (OptimizerConfig, {"lr_scale_rule": "sqrt", "lr_base_batch": 1}, {"lr_scale_rule": "sqrt"}),
        (EarlyStopConfig, {"patience_steps": 1}, {"patience_steps": 0}),
        (BatchStage, {"grad_accum_steps": 1}, {}),
        (BatchStage, {"global_batch_size": 1}, {"global_batch_size": 1, "grad_accum_steps": 1}),
        (TrainConfig, ramp((0, 1), (5, 4)), ramp((1, 1), (5, 4))),
        (TrainConfig, ramp((0, 1), (5, 2), (6, 4)), ramp((0, 1), (5, 2), (5, 4))),
        (TrainConfig, ramp((0, 1), (5, 4)), ramp((0, 2), (5, 2), (9, 4))),
        (TrainConfig, ramp((0, 4)), ramp((0, 1), (5, 2))),
        (TrainConfig, ramp((0, 2), (9, 8), **SEQUENCES), ramp((0, 3), (9, 8), **SEQUENCES)),
        (TrainConfig, {"hang_timeout": 10}, {"hang_timeout": 9.9}),
        (TrainConfig, {"hang_timeout": 0}, {"hang_timeout": -1}),
        (TrainConfig, ramp((0, 8), **SEQUENCES), ramp((0, 4), key="global_batch_size")),
        (
            TrainConfig,
            {"batch_ramp": [{"grad_accum_steps": 1}]},
            {
                "batch_ramp": [{"grad_accum_steps": 1}, {"start": 2, "global_batch_size": 8}],
                "global_batch_size": 8,
            },
        ),
        (DataConfig, {"num_workers": 0}, {"num_workers": -1}),
        (DataConfig, {"prefetch_factor": 1}, {"prefetch_factor": 0}),
        (DataConfig, {"mix_temperature": 0.1}, {"mix_temperature": 0}),
        (
            DataConfig,
            {"phases": [{"start_step": 1}, {"start_step": 2}]},
            {"phases": [{"start_step": 1}, {"start_step": 1}]},
        ),
        (
            DataConfig,
            {"datasets": [{"path": "a"}, {"path": "a", "name": "again"}]},
            {"datasets": [{"path": "a"}, {"hf_name": "b", "name": "a"}]},
        ),
        (
            DataConfig,
            {"datasets": [{"path": "a"}], "order": "torch"},
            {"datasets": [{"path": "a"}], "order": "torch", "shuffle": False},
        ),
        (DataConfig, {"torch_ranks": 1}, {"torch_ranks": 0}),
        (DatasetSource, {"path": "a"}, {}),
        (DatasetSource, {"hf_name": "a"}, {"name": "a"}),
        (DatasetSource, {"path": "a", "weight": 0.1}, {"path": "a", "weight": 0}),
        (EvalDataset, {"name": "a", "dataset_path": "b"}, {"name": "a"}),
        (EvalDataset, {"hf_dataset_name": "b"}, {"hf_dataset_split": "b"}),
        (
            EvalDataset,
            {"name": "a-1.b_", "dataset_path": "b"},
            {"name": "a/b", "dataset_path": "b"},
        ),
        (EvalConfig, {"datasets": [UNNAMED]}, {"datasets": [EVAL_A, UNNAMED]}),
        (MetricsConfig, {"writers": [WANDB]}, {"writers": [WANDB, WANDB]}),
        (MetricsWriter, {"name": "mlflow", "location": "x"}, {"name": "wandb", "location": "x"}),
        (EvalConfig, {"datasets": [EVAL_A, EVAL_B]}, {"datasets": [EVAL_A, EVAL_A]}),
        (TrainingPhase, {"start_step": 0}, {"start_step": -1}),
        (TrainingPhase, {"lr_scale": 0.1}, {"lr_scale": 0}),
        (TrainingPhase, {"dataset_weights": {"a": 0}}, {"dataset_weights": {"a": -1}}),
        (DistributedConfig, {"dp_shard": -1}, {"dp_shard": 0}),
        (DistributedConfig, {"dp_shard": 1}, {"dp_shard": -2}),
        (DistributedConfig, {"tp": 1}, {"tp": 0}),
        (CheckpointConfig, {"interval": 1}, {"interval": 0}),
        (CheckpointConfig, {"keep_last_n": 0}, {"keep_best_n": -1}),
        (CheckpointConfig, {"exclude_from_loading": ["progress"]}, {"exclude_from_loading": ["x"]}),
        (DynCkptWindow, {"start": 3, "stop": 3}, {"start": 4, "stop": 3}),
        (DynCkptWindow, {"start": 0}, {"start": -1}),
        (ProfilingConfig, {"start_step": 1, "end_step": 2}, {"start_step": 2, "end_step": 2}),
    ],
)
def test_rule_refuses_bad_and_accepts_good_section(section, good, bad):
    section(**good)
    with pytest.raises(ValidationError):
        section(**bad)


@pytest.mark.parametrize(("dim", "ffn"), [(4096, 11008), (64, 256)])
def test_ffn_dim_rounds_up_to_256(dim, ffn):
    assert ModelConfig(dim=dim).ffn_dim == ffn


def test_derived_widths():
    model = ModelConfig(dim=64, n_heads=4, ffn_hidden_dim=99)
    assert (model.head_size, model.ffn_dim, model.kv_heads, model.is_moe) == (16, 99, 4, False)
    assert ModelConfig(dim=64, n_heads=4, head_dim=48).head_size == 48
    assert ModelConfig(num_experts=2).is_moe


def test_kv_heads_default_to_heads():
    assert ModelConfig(n_heads=4).kv_heads == 4
    assert ModelConfig(n_heads=64).kv_heads == 64
    assert ModelConfig(n_heads=4, n_kv_heads=2).kv_heads == 2


def test_microbatch_size():
    assert TrainConfig(batch_size=4, grad_accum_steps=2).microbatch_size(dp=3) == 12
    assert TrainConfig(global_batch_size=60, grad_accum_steps=2).microbatch_size(dp=3) == 30


def test_config_is_immutable():
    config = JobConfig(data=DataConfig(phases=[{"dataset_weights": {"a": 1}}]))
    with pytest.raises(ValidationError, match="frozen"):
        config.model = ModelConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.train.seed = 1
    with pytest.raises(TypeError):
        config.data.phases[0].dataset_weights["a"] = 2.0


def test_config_is_hashable_and_copies():
    weights = {"a": 1.0}
    phase = TrainingPhase(start_step=1, dataset_weights=weights)
    config = JobConfig(data=DataConfig(phases=(phase,)), model=ModelConfig(rope_scaling={}))
    weights["a"] = 9.0
    assert phase.dataset_weights == {"a": 1.0}
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert hash(twin) == hash(config)
    assert config != JobConfig()


def test_defaults_satisfy_field_constraints():
    JobConfig.model_validate_json(JobConfig().model_dump_json())
