"""Configuration of a run: one TOML file, settings from the command line, one frozen value.

Names and defaults are those of PyTorch's KempnerForge, whose files for text models load unchanged.
`load_unresolved` reads and validates, and `UnresolvedConfig.resolve` converts durations to updates.
`load_config` does both. `check` refuses a config that cannot run on the given number of devices.
`answers` explains the keys that have an effect only in PyTorch.
"""

from jaxforge.config.axes import AXES
from jaxforge.config.checkpoint import CheckpointConfig, DynCkptWindow
from jaxforge.config.data import DataConfig, DatasetSource, TrainingPhase
from jaxforge.config.distributed import DistributedConfig
from jaxforge.config.eval import EvalConfig, EvalDataset
from jaxforge.config.fine_tuning import DistillationConfig, DpoConfig, LoraConfig
from jaxforge.config.ineffective_settings import answers
from jaxforge.config.job import JobConfig, PluginsConfig
from jaxforge.config.metrics import MetricsConfig, ProfilingConfig
from jaxforge.config.model import ModelConfig, RopeScaling
from jaxforge.config.optimizer import EarlyStopConfig, OptimizerConfig, SchedulerConfig
from jaxforge.config.reading.load import load_config, load_unresolved
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.config.rules import check, mesh_shape
from jaxforge.config.train import BatchStage, TrainConfig

__all__ = [
    "AXES",
    "BatchStage",
    "CheckpointConfig",
    "DataConfig",
    "DatasetSource",
    "DistillationConfig",
    "DistributedConfig",
    "DpoConfig",
    "DynCkptWindow",
    "EarlyStopConfig",
    "EvalConfig",
    "EvalDataset",
    "JobConfig",
    "LoraConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PluginsConfig",
    "ProfilingConfig",
    "RopeScaling",
    "SchedulerConfig",
    "TrainConfig",
    "TrainingPhase",
    "UnresolvedConfig",
    "answers",
    "check",
    "load_config",
    "load_unresolved",
    "mesh_shape",
]
