"""Settings that are read in one form and stored in another.

KempnerForge's files, configs of older runs and short forms of the command line have keys that no
section has. They are rewritten here, before values are validated: all other code knows only the
stored form. A value on the command line overrides the other form in the file, and at the same place
two forms of one setting exclude each other.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from jaxforge.config.batch_ramp import SampleRamp
from jaxforge.config.metrics import WRITERS
from jaxforge.config.model import ATTENTION, ModelConfig, every_nth, scaled_expert, scaled_width
from jaxforge.config.optimizer import CONDITIONS
from jaxforge.config.reading.explain import Sources, explain_value
from jaxforge.config.reading.kempnerforge import STORED_AS
from jaxforge.config.reading.schema import dotted, expected_of
from jaxforge.config.reading.toml import Path
from jaxforge.config.section import MOST_LAYERS
from jaxforge.errors import UserError

_MOST_STAGES = 10_000
"""Stages of a ramp, a bound on the time to read a file."""


class Reading:
    """Values of a config while they are rewritten, with the place of each."""

    def __init__(self, values: dict[Any, Any], sources: Sources) -> None:
        self.values = values
        self._lines, self._settings = dict(sources.lines), list(sources.settings)
        self._file, self._written = sources.file, dict[Path, Path]()

    @property
    def sources(self) -> Sources:
        """Sources of the values; a stored key has the line or argument of the key read for it."""
        return Sources(self._file, self._lines, self._settings, self._written)

    def get(self, path: Path) -> Any:  # noqa: ANN401 (a value of any key)
        """Return the value of a key; None if it is not set."""
        table: Any = self.values
        for part in path:
            table = table.get(part) if isinstance(table, Mapping) else None
        return table

    def tables(self, path: Path) -> list[Any]:
        """Return the tables of a list, which may be given as a single table."""
        value = self.get(path)
        return list(value) if isinstance(value, list | tuple) else [value] if value else []

    def take(self, path: Path) -> Any:  # noqa: ANN401
        """Remove a key and return its value; None if it is not set."""
        *tables, name = path
        table = self.get(tuple(tables))
        return table.pop(name, None) if isinstance(table, dict) else None

    def put(self, path: Path, value: object, read: Path) -> None:
        """Store a value that was read from the key `read`."""
        table: Any = self.values
        for part in path[:-1]:
            table = table[part] if isinstance(part, int) else table.setdefault(part, {})
        table[path[-1]] = value
        self.note(path, read)

    def note(self, path: Path, read: Path) -> None:
        """Note that a stored value was read from another key."""
        self._written[path] = read
        if read in self._lines:
            self._lines[path] = self._lines[read]
        self._settings += [each._replace(path=path) for each in self._settings if each.path == read]

    def is_on_command_line(self, path: Path) -> bool:
        """Return whether an argument sets a key, or a part of it."""
        return any(each.path[: len(path)] == path for each in self._settings)

    def overrides(self, path: Path, other: Path) -> bool:
        """Return whether a key is on the command line, and another is not."""
        return self.is_on_command_line(path) and not self.is_on_command_line(other)

    def checked(self, path: Path, value: object, kind: Any) -> Any:  # noqa: ANN401
        """Return a value of a type.

        Raises:
            UserError: The value has another type.
        """
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        try:
            if not isinstance(value, bool) or kind is bool:  # pydantic reads True as 1
                return adapter.validate_python(value)
        except ValidationError:
            pass
        raise self.refusal(path, value, f"expected {expected_of(adapter.json_schema())}")

    def refusal(self, path: Path, value: object, text: str) -> UserError:
        """Return the error for a value."""
        return UserError(explain_value(path, value, text, self.sources))


class Form(NamedTuple):
    """A key that is read, and stored as another key (`kempnerforge.STORED_AS`).

    Attributes:
        kind: Type of the value.
        neutral: Value that is the same as no value.
        convert: (value, values of the config) -> stored value.
        yields: Whether the stored key takes precedence if the file has both.
    """

    kind: Any
    neutral: object
    convert: Callable[[Any, Reading], object]
    yields: bool = False


def rewrite(reading: Reading) -> None:
    """Rewrite all settings into their stored form.

    Raises:
        UserError: A value that is read is invalid, or two forms of one setting exclude each other.
    """
    for path, form in FORMS.items():
        _rewrite(reading, path, form)
    for rewrite_group in (
        _mixture, _annealing, _evaluation_set, _writers, _stragglers, _early_stop, _window,
    ):  # fmt: skip
        rewrite_group(reading)


def _rewrite(reading: Reading, path: Path, form: Form) -> None:
    if (written := reading.take(path)) is None:
        return
    value, stored = reading.checked(path, written, form.kind), STORED_AS[path]
    # KempnerForge's files write defaults, which must not count as settings.
    if value == form.neutral and not reading.overrides(path, stored):
        return
    # Two forms at one place: neither can be meant to win, unless KempnerForge says which.
    if reading.get(stored) and not reading.overrides(path, stored):
        if form.yields or reading.overrides(stored, path):
            return
        raise _exclude(reading, path, written, stored)
    reading.put(stored, form.convert(value, reading), path)


def _exclude(reading: Reading, path: Path, value: object, other: Path) -> UserError:
    text = f"{dotted(other)} is another form of this setting: remove one of them"
    return reading.refusal(path, value, text)


def _feed_forwards(every: int, reading: Reading) -> list[str]:
    if not reading.get(("model", "num_experts")):
        return []
    if not every:
        text = "must be at least 1 when num_experts > 0"
        raise reading.refusal(("model", "moe_frequency"), 0, text)
    return list(every_nth(every))


def _width(multiplier: float, reading: Reading) -> int | None:
    """Return the width of a feed-forward; None if the usual width is meant."""
    dim = reading.get(("model", "dim"))
    dim = ModelConfig.model_fields["dim"].default if dim is None else dim
    return scaled_width(dim, multiplier) if multiplier != 1 and isinstance(dim, int) else None


def _expert_width(multiplier: float, reading: Reading) -> int | None:
    """Return the width of an expert; None if the usual width is meant."""
    dim, width = reading.get(("model", "dim")), reading.get(("model", "ffn_hidden_dim"))
    dim = ModelConfig.model_fields["dim"].default if dim is None else dim
    if width is None and isinstance(dim, int):
        width = scaled_width(dim)
    return scaled_expert(width, multiplier) if multiplier != 1 and isinstance(width, int) else None


def _stages(sizes: tuple[int, int, int], reading: Reading) -> list[dict[str, int]]:
    """Return the stages of Megatron-LM's ramp (first batch, increment, length in sequences)."""
    path, ramp = ("train", "rampup_batch_size"), SampleRamp(*sizes)
    whole = reading.get(("train", "global_batch_size"))
    if not isinstance(whole, int):
        text = "the batch grows to train.global_batch_size, which is not set: set it"
        raise reading.refusal(path, list(sizes), text)
    if ramp.start >= whole or (whole - ramp.start) % ramp.increment:
        text = (
            f"must reach train.global_batch_size = {whole} from {ramp.start} by increments of "
            f"{ramp.increment}: change one of them"
        )
        raise reading.refusal(path, list(sizes), text)
    if (whole - ramp.start) // ramp.increment > _MOST_STAGES:
        text = f"has more than {_MOST_STAGES:,} increments: make them larger"
        raise reading.refusal(path, list(sizes), text)
    return [{"start": step, "global_batch_size": size} for step, size in ramp.stages(whole)]


FORMS: dict[Path, Form] = {
    ("model", "mixer"): Form(str, ATTENTION, lambda mixer, reading: [mixer]),
    ("model", "moe_frequency"): Form(
        Annotated[int, Field(ge=0, le=MOST_LAYERS)], 1, _feed_forwards
    ),
    ("model", "ffn_dim_multiplier"): Form(PositiveFloat, 1.0, _width, yields=True),
    ("model", "moe_expert_ffn_multiplier"): Form(PositiveFloat, 1.0, _expert_width, yields=True),
    ("train", "rampup_batch_size"): Form(tuple[PositiveInt, PositiveInt, PositiveInt], (), _stages),
}
"""Keys whose value alone is converted."""


def _mixture(reading: Reading) -> None:
    """Replace `data.mixture_file` by the datasets and phases of the file."""
    path: Path = ("data", "mixture_file")
    if not (file := reading.take(path)):
        return
    from jaxforge.config.reading.mixture import tables  # few configs need YAML and its schema

    data = reading.values["data"]
    for key in ("datasets", "phases", "anneal_start_step", "anneal_weights"):
        other: Path = ("data", key)
        if reading.overrides(path, other):
            data.pop(key, None)
        elif data.get(key):
            raise _exclude(reading, path, file, other)
    data.update(tables(str(file), data.get("mix_temperature", 1)))


def _annealing(reading: Reading) -> None:
    """Replace `data.anneal_start_step` and `anneal_weights` by a phase."""
    start_path: Path = ("data", "anneal_start_step")
    weights_path: Path = ("data", "anneal_weights")
    phases: Path = ("data", "phases")
    start, weights = reading.take(start_path), reading.take(weights_path)
    if not start or reading.overrides(phases, start_path):
        return
    if reading.get(phases) and not reading.overrides(start_path, phases):
        raise _exclude(reading, start_path, start, phases)
    reading.put(phases, [{}], start_path)
    reading.put((*phases, 0, "start_step"), start, start_path)
    reading.put((*phases, 0, "dataset_weights"), weights or {}, weights_path)


_SET_KEYS = {
    "dataset_path": "",
    "file_pattern": "*.npy",
    "hf_dataset_name": "",
    "hf_dataset_config": "",
    "hf_dataset_split": "validation",
}
"""Keys of `[eval]` for a single set, and their defaults."""


def _evaluation_set(reading: Reading) -> None:
    """Move the keys of a single set in `[eval]` to a set without a name."""
    paths: dict[str, Path] = {key: ("eval", key) for key in _SET_KEYS}
    taken = {key: reading.take(path) for key, path in paths.items()}
    values = {key: value for key, value in taken.items() if value is not None}
    sets: Path = ("eval", "datasets")
    sources = [key for key in ("dataset_path", "hf_dataset_name") if values.get(key)]
    # A key on the command line changes the single set of the file.
    is_new = any(reading.overrides(paths[key], sets) for key in values)
    if not is_new and (not sources or reading.is_on_command_line(sets)):
        return
    stored = reading.tables(sets)
    is_single = len(stored) == 1 and isinstance(stored[0], dict) and not stored[0].get("name")
    if stored and not (is_new and is_single):
        if sources:
            raise _exclude(reading, paths[sources[0]], values[sources[0]], sets)
        return
    table = (stored[0] if stored else {}) | values
    if not table.get("dataset_path") and not table.get("hf_dataset_name"):
        reading.values["eval"]["datasets"] = []
        return
    table = {key: value for key, value in table.items() if value != _SET_KEYS.get(key)}
    reading.values["eval"]["datasets"] = [table]
    for key in values:
        reading.note((*sets, 0, key), paths[key])


def _writers(reading: Reading) -> None:
    """Move `metrics.enable_<writer>` and the keys of a writer to `[[metrics.writers]]`."""
    stored: Path = ("metrics", "writers")
    writers = reading.tables(stored)
    for name in WRITERS:
        switch: Path = ("metrics", f"enable_{name}")
        paths = {
            key[-1]: path for path, key in STORED_AS.items() if str(path[1]).startswith(f"{name}_")
        }
        taken = {key: reading.take(path) for key, path in paths.items()}
        values = {key: value for key, value in taken.items() if value not in (None, "")}
        is_on = reading.take(switch)
        is_on = None if is_on is None else reading.checked(switch, is_on, bool)
        named = [isinstance(each, dict) and each.get("name") == name for each in writers]
        if reading.overrides(stored, switch) or not (is_on or any(named)):
            continue
        if is_on is False:
            del writers[named.index(True)]
            continue
        if not any(named):
            writers.append({"name": name})
        index = named.index(True) if any(named) else len(writers) - 1
        writers[index] = writers[index] | values
        for key in values:
            reading.note((*stored, index, key), paths[key])
    if writers or reading.get(stored):
        reading.values["metrics"]["writers"] = writers


def _stragglers(reading: Reading) -> None:
    """Drop `metrics.log_straggler`: hosts are compared if there is an interval."""
    path: Path = ("metrics", "log_straggler")
    if (is_on := reading.take(path)) is None:
        return
    interval = STORED_AS[path]
    if reading.checked(path, is_on, bool):
        reading.put(interval, reading.get(interval) or _USUAL_REPORT_INTERVAL, path)
    elif not reading.overrides(interval, path):
        reading.take(interval)


_USUAL_REPORT_INTERVAL = 100


def _early_stop(reading: Reading) -> None:
    """Drop `early_stop.active`: the run stops early if there is a condition."""
    path: Path = ("early_stop", "active")
    if (is_active := reading.take(path)) is None:
        return
    conditions: list[Path] = [("early_stop", key) for key in CONDITIONS]
    if reading.checked(path, is_active, bool):
        if all(reading.get(each) is None for each in conditions):
            raise reading.refusal(path, True, f"requires one of {', '.join(CONDITIONS)}")
        return
    for each in conditions:
        if not reading.overrides(each, path):
            reading.take(each)


def _window(reading: Reading) -> None:
    """Drop `checkpoint.dyn_ckpt_window.strategy`, which has one value."""
    path: Path = ("checkpoint", "dyn_ckpt_window", "strategy")
    if (strategy := reading.take(path)) is not None:
        reading.checked(path, strategy, Literal["power2"])
