"""`JobConfig`: all that a run is told, in one immutable value."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from jaxforge.cli.redaction import redacted
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.data import DataConfig
from jaxforge.config.distributed import DistributedConfig
from jaxforge.config.early_stop import EarlyStopConfig
from jaxforge.config.eval import EvalConfig
from jaxforge.config.metrics import MetricsConfig
from jaxforge.config.model import ModelConfig
from jaxforge.config.optimizer import OptimizerConfig
from jaxforge.config.plugins import PluginsConfig
from jaxforge.config.profiling import ProfilingConfig
from jaxforge.config.scheduler import SchedulerConfig
from jaxforge.config.section import Section
from jaxforge.config.torch_only import TORCH_ONLY
from jaxforge.config.train import TrainConfig


class JobConfig(Section):
    """The sections of a configuration, as `[tables]` of one TOML file."""

    plugins: PluginsConfig = Field(default_factory=PluginsConfig)
    """Modules of yours; first, as they say which names the others may have."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """Architecture."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """Batch, length, precision and the loop."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Update rule."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    """Learning rate over the run."""
    data: DataConfig = Field(default_factory=DataConfig)
    """What to train on."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation during training."""
    early_stop: EarlyStopConfig = Field(default_factory=EarlyStopConfig)
    """Ends before the last update."""
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    """Device mesh."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Saving and loading."""
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    """Logging."""
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig)
    """Traces."""

    @model_validator(mode="after")
    def _warm_up_with_the_run(self) -> Self:
        if not self.is_set("scheduler.warmup_steps"):
            values = {
                **dict(self.scheduler),
                "warmup_steps": self.usual_warmup(self.train.max_steps),
            }
            known = SchedulerConfig.model_construct(self.scheduler.model_fields_set, **values)
            object.__setattr__(self, "scheduler", known)  # which is frozen for others
        return self

    @property
    def skips_idle_experts(self) -> bool:
        """True if updates skip experts without tokens."""
        return self.model.is_moe and bool(self.optimizer.skip_idle_experts)

    def skipping_idle_experts(self) -> "JobConfig":
        """Return the config with updates that skip experts without tokens."""
        optimizer = self.optimizer.model_copy(update={"skip_idle_experts": True})
        return self.model_copy(update={"optimizer": optimizer})

    def usual_warmup(self, max_steps: int) -> int:
        """`scheduler.warmup_steps` where nobody says it.

        It is KempnerForge's, but a tenth of the run at most; in its own files, just KempnerForge's.

        Args:
            max_steps: of the run.
        """
        usual = SchedulerConfig.model_fields["warmup_steps"].default
        return usual if self.is_from_kempnerforge else min(usual, max_steps // 10)

    @property
    def is_from_kempnerforge(self) -> bool:
        """True if the config was written for KempnerForge, or asks for its behavior.

        No key says so. The marks are a key that only PyTorch has, and KempnerForge's data order.
        """
        return self.data.order == "torch" or any(map(self.is_set, TORCH_ONLY))

    def is_set(self, key: str) -> bool:
        """Return whether the user set `key`, a section and a name as in "train.batch_size"."""
        section, _, name = key.partition(".")
        return name in getattr(self, section).model_fields_set

    @property
    def settings(self) -> dict[str, Any]:
        """All settings in the order of the file, by key as in "train.batch_size"."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {f"{name}.{key}": x for name, section in sections.items() for key, x in section}

    def to_toml(self) -> str:
        """The resolved configuration as TOML that loads back equal.

        Keys that are not set, and keys without effect that nobody wrote, are comments.
        """
        return "\n".join(line for name in type(self).model_fields for line in self._table(name))

    def _table(self, section: str) -> Iterator[str]:
        yield f"[{section}]"
        for name, value in getattr(self, section):
            if value is None:
                yield f"# {name} is not set"
            elif self._is_moot(f"{section}.{name}"):
                yield f"# {name} = {toml(value)}"
            else:
                yield f"{name} = {toml(value)}"
        yield ""

    def _is_moot(self, key: str) -> bool:
        """Return whether a written-out `key` would be a setting that the user did not make."""
        follows = key == "train.batch_size" and self.train.global_batch_size is not None
        return (follows or key in TORCH_ONLY) and not self.is_set(key)


def toml(value: object) -> str:
    """One value in TOML's notation, tables inline; None within a table is left out."""
    match value:
        case Section():
            return toml(dict(value))
        case Mapping():
            items = [f"{_key(k)} = {toml(v)}" for k, v in value.items() if v is not None]
            return "{" + ", ".join(items) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(toml, value)) + "]"
        case bool():
            return "true" if value else "false"
        case str():  # JSON escapes all that TOML wants escaped, but for DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return repr(value)


def shown(value: object) -> str:
    """One value as `toml` writes it, without secrets, cut to fit into a message."""
    return textwrap.shorten(redacted(toml(value)), width=60, placeholder=" ...")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)
