"""Opening of the tasks of a run, with messages for all that they lack."""

import importlib.util

from jax.sharding import Mesh

from jaxforge.config.eval import EvalConfig
from jaxforge.config.job import JobConfig
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model
from jaxforge.tasks.core import CORE_TASKS, CoreBundle
from jaxforge.tasks.task import Aggregate, Task, Tasks, TextModel, prefix_token


def open_tasks(
    config: JobConfig, mesh: Mesh, model: Model, tokenizer: Tokenizer | None
) -> Tasks | None:
    """Open the tasks of `[eval]`; return None if it names none.

    Raises:
        UserError: a task cannot be evaluated.
    """
    section = config.eval
    if not section.has_tasks:
        return None
    key = "eval.tasks" if section.tasks else "eval.tasks_core"
    if tokenizer is None:
        raise UserError(f"{key} needs a tokenizer. Set data.tokenizer_path, or remove {key}")
    text = TextModel(
        model, mesh, tokenizer, section.tasks_batch_size, config.model.max_seq_len,
        prefix_token(tokenizer),
    )  # fmt: skip
    tasks: list[Task] = []
    aggregates: list[Aggregate] = []
    if section.tasks:
        tasks += _lm_eval_tasks(config, text)
    if section.tasks_core:
        bundle = CoreBundle.open(section.tasks_core)
        tasks += bundle.tasks(text, section.tasks_limit)
        aggregates.append(bundle)
    return Tasks(text, tasks, aggregates, is_average=section.tasks_weights == "ema")


def check_task_names(section: EvalConfig) -> None:
    """Check the names of `eval.tasks`, before parameters are initialized or restored.

    Raises:
        UserError: a task does not exist, or lm_eval is not installed.
    """
    if section.enabled and section.tasks:
        _require_lm_eval()
        from jaxforge.tasks.lm_eval_tasks import check_names

        check_names(section)


def describe_tasks(section: EvalConfig) -> list[str]:
    """Describe the tasks for a dry run, which checks their names but does not read their data.

    Raises:
        UserError: a task does not exist, or lm_eval is not installed.
    """
    rows = []
    if section.tasks:
        check_task_names(section)
        rows.append(f"tasks: {', '.join(section.tasks)}; a start reads their data")
    if section.tasks_core:
        bundle = CoreBundle.open(section.tasks_core)
        rows.append(f"tasks: {len(bundle.descriptions)} of {len(CORE_TASKS)} of CORE")
    return rows


def _lm_eval_tasks(config: JobConfig, text: TextModel) -> list[Task]:
    _require_lm_eval()
    from jaxforge.tasks.lm_eval_model import LmEvalModel
    from jaxforge.tasks.lm_eval_tasks import load_tasks

    model = LmEvalModel(text, seed=config.train.seed, shows_progress=False)
    return [*load_tasks(config.eval, model)]


def _require_lm_eval() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "eval.tasks needs lm_eval, which is not installed: pip install 'jaxforge[lm-eval]'"
        )
