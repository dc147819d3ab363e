"""Tasks and groups of lm_eval, loaded and checked before a run begins.

Each evaluation makes the same requests: few-shot examples are drawn with lm_eval's default seed.
The state of Python's and NumPy's global random generators is restored afterwards.
"""

import contextlib
import difflib
import functools
import importlib.metadata
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval.api.metrics
import lm_eval.api.task
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from jaxforge.cli.suggestions import path_hint
from jaxforge.config.eval import EvalConfig
from jaxforge.errors import UserError
from jaxforge.tasks.lm_eval_model import LmEvalModel
from jaxforge.tasks.task import Directions, Results

log = logging.getLogger(__name__)

_BOOTSTRAPS = 200  # samples for standard errors without a formula, such as that of a perplexity
_NEAR = 3  # suggested names
_REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


class LmEvalTask:
    """A task or group of lm_eval.

    Args:
        name: name in the config.
        loaded: result of `TaskManager.load`.
        model: the model.
        limit: documents per task; None for all.
    """

    def __init__(
        self, name: str, loaded: dict[str, Any], model: LmEvalModel, limit: int | None
    ) -> None:
        self.name, self._loaded, self._model, self._limit = name, loaded, model, limit

    def evaluate(self) -> Results:
        """Return the metrics of the group if it has any, otherwise those of each of its tasks."""
        for task in self._loaded["tasks"].values():
            # Again, as the generator of a task has advanced in the evaluation before.
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        with _same_random_numbers(), _quiet():
            results = evaluate(
                self._model,
                self._loaded,
                limit=self._limit,
                bootstrap_iters=_BOOTSTRAPS,
                log_samples=False,
            )
        self._release_requests()
        groups = results.get("groups", {})
        subjects = groups if self.name in groups else results["results"]
        names = [self.name] if self.name in groups else self._loaded["tasks"]
        return {name: _numbers(subjects[name]) for name in names}

    def directions(self) -> Directions:
        """Return the directions that lm_eval states; None where tasks of a group disagree.

        Metrics whose names are known only after an evaluation are missing: a function of a task may
        return several values by name.
        """
        tasks, group = self._loaded["tasks"], self._loaded.get("groups", {}).get(self.name)
        if group is None or not group.has_aggregation:
            return {
                name: {_logged_name(*key): value for key, value in _task_directions(task).items()}
                for name, task in tasks.items()
            }
        common: dict[tuple[str, str], bool | None] = {}
        for task in tasks.values():
            for key, value in _task_directions(task).items():
                common[key] = value if common.get(key, value) == value else None
        aggregated = {
            _logged_name(metric, filter_name): value
            for (metric, filter_name), value in common.items()
            for entry in group.aggregate_metric_list
            if metric == entry.metric and filter_name in (entry.filter_list or [filter_name])
        }
        return {self.name: aggregated}

    def check(self) -> None:
        """Make all requests once, so that a fault of a task is noticed before the run.

        Raises:
            UserError: the model cannot answer a request.
        """
        for name, task in self._loaded["tasks"].items():
            try:
                if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                    raise UserError("it runs generated code or reads images")
                with _same_random_numbers(), _quiet():
                    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
                    task.build_all_requests(limit=self._limit, rank=0, world_size=1)
                for request in task.instances:
                    self._check_request(request)
            except UserError as error:
                raise UserError(f'eval.tasks: "{name}" cannot be evaluated: {error}') from error
            except Exception as error:  # templates and functions of tasks raise anything
                raise UserError(
                    f'eval.tasks: the requests of "{name}" cannot be built: '
                    f"{type(error).__name__}: {error}"
                ) from error
        self._release_requests()

    def _check_request(self, request: Instance) -> None:
        if request.request_type not in _REQUESTS:
            raise UserError(f"requests of type {request.request_type} are not supported")
        argument = request.args[-1]
        if request.request_type == "generate_until":
            self._model.generation_settings(argument)
        elif request.request_type == "loglikelihood" and (
            len(argument.encode()) > self._model.max_length  # a token has at least one byte
        ):
            n_tokens = len(self._model.tok_encode(argument, add_special_tokens=False))
            self._model.check_continuation(argument, n_tokens)

    def _release_requests(self) -> None:
        """Free the requests, which are made anew by each evaluation."""
        for task in self._loaded["tasks"].values():
            task._instances = None


def load_tasks(section: EvalConfig, model: LmEvalModel) -> list[LmEvalTask]:
    """Load and check the tasks of `eval.tasks`.

    Raises:
        UserError: a task does not exist, cannot be loaded, or cannot be evaluated.
    """
    manager = _manager(section)
    tasks = []
    for entry in section.tasks:
        loaded = _load(manager, entry, section)
        name = _name(entry, loaded)
        tasks.append(LmEvalTask(name, loaded, model, section.tasks_limit))
    for task in tasks:
        task.check()
    return tasks


def check_names(section: EvalConfig) -> None:
    """Check that the tasks of `eval.tasks` exist, without reading their data.

    Raises:
        UserError: a task does not exist.
    """
    manager = _manager(section)
    for entry in section.tasks:
        _check_exists(manager, entry)


def _name(entry: str, loaded: dict[str, Any]) -> str:
    """Return the name of a task or group; a file has the name of its outermost group or task."""
    if not _is_file(entry):
        return entry
    return next(iter(loaded.get("groups") or loaded["tasks"]))


def _is_file(entry: str) -> bool:
    return entry.endswith((".yaml", ".yml"))


@functools.lru_cache(maxsize=1)
def _manager(section: EvalConfig) -> TaskManager:
    """Return lm_eval's index of tasks; its own tasks are read only if they are needed.

    Raises:
        UserError: `eval.tasks_path` is not a directory.
    """
    folder, names = section.tasks_path, [x for x in section.tasks if not _is_file(x)]
    if folder and not Path(folder).is_dir():
        raise UserError(f'eval.tasks_path = "{folder}" is not a directory{path_hint(folder)}')
    manager = TaskManager(include_path=folder or None, include_defaults=False)
    if set(names) <= set(manager.all_tasks):
        return manager
    return TaskManager(include_path=folder or None)


def _load(manager: TaskManager, entry: str, section: EvalConfig) -> dict[str, Any]:
    """Load a task or group with the examples that the config asks for.

    Raises:
        UserError: the task does not exist, or its data cannot be read.
    """
    _check_exists(manager, entry)
    try:
        with _quiet():
            loaded = manager.load(entry)
    except Exception as error:  # of the task's code, of datasets, of the network
        raise UserError(
            f'eval.tasks: "{entry}" cannot be loaded: {type(error).__name__}: {error}\n'
            "The data of a task are read before the run begins. Without a network they must be in "
            "the cache of Hugging Face (HF_HOME), or in local files that the task's YAML names"
        ) from error
    for task in loaded["tasks"].values():
        shots = task.get_config("num_fewshot")
        # 0 is part of a task's definition, as for lm_eval's `--num_fewshot`.
        if shots is None or (section.tasks_num_fewshot is not None and shots != 0):
            task.set_config(key="num_fewshot", value=section.tasks_num_fewshot or 0)
    return loaded


def _check_exists(manager: TaskManager, entry: str) -> None:
    if _is_file(entry):
        if not Path(entry).is_file():
            raise UserError(f'eval.tasks: "{entry}" does not exist{path_hint(entry)}')
    elif entry not in manager.all_tasks:
        near = difflib.get_close_matches(entry, manager.all_tasks, n=_NEAR)
        version = importlib.metadata.version("lm_eval")
        raise UserError(
            f'eval.tasks: "{entry}" is not a task of lm_eval {version}'
            + (f"; did you mean {' or '.join(near)}?" if near else "")
            + ". Tasks of your own need eval.tasks_path, or the path of their YAML file"
        )


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers among lm_eval's metrics, without the name of the default filter."""
    numbers = {}
    for key, value in metrics.items():
        # Keys are "metric,filter"; others, such as "alias", are not metrics.
        name, comma, filter_name = key.partition(",")
        if comma and isinstance(value, int | float):
            numbers[_logged_name(name, filter_name)] = float(value)
    return numbers


def _task_directions(task: Any) -> dict[tuple[str, str], bool | None]:  # noqa: ANN401
    """Return whether higher values are better, by metric and name of a filter of a task."""
    return {
        (metric, pipeline.name): is_higher_better
        for pipeline in task._filters
        for metric, is_higher_better in task.higher_is_better().items()
    }


def _logged_name(metric: str, filter_name: str) -> str:
    return metric if filter_name == "none" else f"{filter_name}/{metric}"


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Seed the global generators as lm_eval does, and restore their states at the end."""
    states = random.getstate(), np.random.get_state()
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm_eval from writing progress bars to the console, and from forking this process.

    Its standard errors by bootstrap print a line and start a pool of processes. Forks of a process
    with JAX's threads may hang.
    """
    replaced = ((lm_eval.api.task, "tqdm", _without_bar),
                (lm_eval.api.metrics, "bootstrap_stderr", _bootstrap_stderr))  # fmt: skip
    logger = logging.getLogger("lm_eval")
    level, originals = logger.level, [getattr(module, name) for module, name, _ in replaced]
    logger.setLevel(logging.ERROR)
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        logger.setLevel(level)
        for (module, name, _), original in zip(replaced, originals, strict=True):
            setattr(module, name, original)


def _without_bar(documents: Sequence[object], **options: object) -> Sequence[object]:
    return documents


def _bootstrap_stderr(
    statistic: Callable[[Sequence[Any]], float], items: Sequence[Any], iters: int
) -> float:
    """Return the standard deviation of a statistic over samples drawn with replacement."""
    rng = random.Random(0)
    draws = [statistic(rng.choices(items, k=len(items))) for _ in range(iters)]
    return float(np.std(draws, ddof=1))
