"""`JobConfig`: the complete configuration of a run as one immutable value; and `[plugins]`."""

import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, model_validator

from jaxforge.cli.redaction import redacted
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.data import DataConfig
from jaxforge.config.distributed import DistributedConfig
from jaxforge.config.eval import EvalConfig
from jaxforge.config.fine_tuning import DistillationConfig, DpoConfig, LoraConfig
from jaxforge.config.metrics import MetricsConfig, ProfilingConfig
from jaxforge.config.model import ModelConfig
from jaxforge.config.optimizer import EarlyStopConfig, OptimizerConfig, SchedulerConfig
from jaxforge.config.outer_optimizer import OuterOptimizerConfig
from jaxforge.config.section import Flag, Needs, Section
from jaxforge.config.train import TrainConfig
from jaxforge.errors import UserError, reason_and_line
from jaxforge.storage import trust

_KEYS = ("modules", "callbacks")


class PluginsConfig(Section):
    """User modules, imported before the other sections are read."""

    modules: tuple[str, ...] = ()
    """Importable modules that register losses, optimizers and other components."""

    callbacks: tuple[str, ...] = ()
    """Classes such as my_module.MyCallback, constructed without arguments."""

    @property
    def names(self) -> trust.PluginNames:
        """Names of all plugins, for trust decisions."""
        return trust.PluginNames(self.modules, self.callbacks)

    @model_validator(mode="after")
    def _import(self, info: ValidationInfo) -> Self:
        """Import all plugins, or only those on the command line, depending on the context.

        `reading.unresolved` passes the validation context. If plugins are not imported, other
        sections may contain unregistered names (`Registry`).
        """
        context = {} if info.context is None else info.context
        trusts = context.get("trusts", trust.always)
        named = _KEYS if trusts(self.names) else context.get("on_command_line", ())
        # Names of plugins that were not imported may be valid: they are checked when used.
        left_out = [key for key in _KEYS if key not in named and getattr(self, key)]
        context["may_be_unknown"] = trusts is trust.never or bool(left_out)
        if problems := list(self._import_problems(named)):
            raise ValueError("\n".join(problems))
        return self

    def _import_problems(self, keys: tuple[str, ...]) -> Iterator[str]:
        """Import the modules; yield those that do not exist, fail, or register a name twice."""
        for name in self.modules if "modules" in keys else ():
            yield from _import_problems("modules", name)
        for callback in self.callbacks if "callbacks" in keys else ():
            module, _, name = callback.rpartition(".")
            if not module:
                yield f'callbacks: "{callback}" has no module; write my_module.{callback}'
            elif problems := list(_import_problems("callbacks", module)):
                yield from problems
            elif not hasattr(sys.modules[module], name):
                yield f"callbacks: {module} has no {name}"


def _import_problems(key: str, name: str) -> Iterator[str]:
    try:
        importlib.import_module(name)
    except UserError as error:
        yield f"{key}: {name}: {error}"
    except (Exception, SystemExit) as error:
        if _is_missing(name, error):
            yield f'{key}: module "{name}" does not exist; is its directory in PYTHONPATH?'
        else:
            yield f"{key}: {name} cannot be imported: {reason_and_line(error)}"


def _is_missing(name: str, error: BaseException) -> bool:
    """Return whether the module itself, or its package, is missing, not an import inside it."""
    return isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")


class JobConfig(Section):
    """The sections of a configuration, as `[tables]` of one TOML file."""

    plugins: PluginsConfig = Field(default_factory=PluginsConfig)
    """User modules; read first, because they register names that other sections may use."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """Model architecture."""
    lora: Annotated[LoraConfig, Needs("lora.rank")] = Field(default_factory=LoraConfig)
    """Low-rank adapters."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """Batch size, length, precision and training loop."""
    dpo: Annotated[DpoConfig, Needs("train.objective", "dpo")] = Field(default_factory=DpoConfig)
    """Direct preference optimization."""
    distillation: Annotated[DistillationConfig, Needs("train.objective", "distillation")] = Field(
        default_factory=DistillationConfig
    )
    """Distillation from a teacher."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Update rule."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    """Learning-rate schedule."""
    outer_optimizer: Annotated[OuterOptimizerConfig, Needs("train.outer_interval")] = Field(
        default_factory=OuterOptimizerConfig
    )
    """Update that joins groups which train apart."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Training data."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation during training."""
    early_stop: EarlyStopConfig = Field(default_factory=EarlyStopConfig)
    """Conditions that end a run early."""
    distributed: Annotated[DistributedConfig, Flag.NO_RESULT] = Field(
        default_factory=DistributedConfig
    )
    """Device mesh."""
    checkpoint: Annotated[CheckpointConfig, Flag.NO_RESULT] = Field(
        default_factory=CheckpointConfig
    )
    """Saving and loading of checkpoints."""
    metrics: Annotated[MetricsConfig, Flag.NO_RESULT] = Field(default_factory=MetricsConfig)
    """Logging."""
    profiling: Annotated[
        ProfilingConfig, Needs("profiling.enable", True), Flag.PER_HOST, Flag.NO_RESULT
    ] = Field(default_factory=ProfilingConfig)
    """Profiler traces."""

    @model_validator(mode="after")
    def _warm_up_with_the_run(self) -> Self:
        if not self.is_set("scheduler.warmup_steps"):
            values = {
                **dict(self.scheduler),
                "warmup_steps": self.usual_warmup(self.train.max_steps),
            }
            known = SchedulerConfig.model_construct(self.scheduler.model_fields_set, **values)
            object.__setattr__(self, "scheduler", known)  # the model is frozen
        return self

    @property
    def skips_idle_experts(self) -> bool:
        """True if updates skip experts without tokens."""
        return self.model.is_moe and bool(self.optimizer.skip_idle_experts)

    def freezes(self, name: str) -> bool:
        """Return whether a parameter is frozen, by its dotted name.

        `lora.rank`, `optimizer.freeze_patterns` and settings of mixers freeze parameters.
        """
        of_mixers = any(table.freezes(name) for table in self.model.mixer_tables.values())
        return of_mixers or self.lora.freezes(name) or self.optimizer.freezes(name)

    def eval_batch_size(self, dp: int) -> int:
        """Return the sequences of a batch of an evaluation on `dp` data-parallel ranks."""
        return self.eval.batch_size or self.train.microbatch_size(dp)

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return a copy with other values of sections or keys, as in "train.batch_size"."""
        changed: dict[str, Any] = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            before = changed.get(section, getattr(self, section))
            changed[section] = before.with_values({name: value}) if name else value
        return super().with_values(changed)

    def usual_warmup(self, max_steps: int) -> int:
        """Return the default of `scheduler.warmup_steps`.

        It is KempnerForge's default, but at most a tenth of the run. Configs that request
        KempnerForge's data order get its default unchanged.
        """
        usual = SchedulerConfig.model_fields["warmup_steps"].default
        return usual if self.data.order == "torch" else min(usual, max_steps // 10)

    def is_set(self, key: str) -> bool:
        """Return whether the user set `key`, a section and a name as in "train.batch_size"."""
        section, _, name = key.partition(".")
        return name in getattr(self, section).model_fields_set

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by dotted key, as "optimizer.muon.momentum", in the order of the file."""
        return dict(_by_key(self))

    def to_toml(self) -> str:
        """Return the resolved config as TOML that loads back to an equal config.

        Unset keys, and a batch size that follows from another key, are comments.
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
        # Reloaded as a user's setting, it would conflict on another mesh.
        follows = key == "train.batch_size" and self.train.global_batch_size is not None
        return follows and not self.is_set(key)


def _by_key(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a section and of its tables, except those that may be absent."""
    for name, value in section:
        annotation = type(section).model_fields[name].annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from _by_key(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def toml(value: object) -> str:
    """Return a value in TOML notation, with inline tables; None in a table is omitted."""
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
        case str():  # JSON escapes everything that TOML requires, except DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return repr(value)


def short_toml(value: object) -> str:
    """Return a value in TOML notation, redacted and shortened for a message."""
    text = redacted(toml(value))
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 4].rstrip()} ..."


_SHORT = 60  # characters


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)
