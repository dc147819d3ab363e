"""CORE of DataComp-LM (arXiv:2406.11794): the mean centered accuracy over 22 tasks.

A task's accuracy is centered so that chance is 0 and perfection 1: (acc - chance) / (1 - chance).
The files are those of DCLM's evaluation bundle, and describe shots and chance levels themselves:

    core.yaml            icl_tasks: label, icl_task_type, dataset_uri, num_fewshot, and optionally
                         continuation_delimiter
    eval_meta_data.csv   columns "Eval Task" and "Random baseline", in percent
    eval_data/           the dataset_uri of each task: JSON Lines

Prompts, few-shot examples and truncation are those of nanochat, so that its results compare. Three
types of tasks, where | separates the tokens that are scored:

    multiple_choice      query delimiter | choice      the choice with the highest mean
                                                       log-probability per token
    schema               option delimiter | ending     the same, of the option before it
    language_modeling    context delimiter | ending    correct if all tokens are the likeliest
"""

import csv
import dataclasses
import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jaxforge.cli.suggestions import path_hint
from jaxforge.errors import UserError
from jaxforge.model.likelihood import Continuation, Likelihood
from jaxforge.tasks.task import Directions, Results, TextModel

log = logging.getLogger(__name__)

CORE_TASKS = (
    "agi_eval_lsat_ar", "arc_challenge", "arc_easy", "bigbench_cs_algorithms",
    "bigbench_dyck_languages", "bigbench_language_identification", "bigbench_operators",
    "bigbench_qa_wikidata", "bigbench_repeat_copy_logic", "boolq", "commonsense_qa", "copa", "coqa",
    "hellaswag", "hellaswag_zeroshot", "jeopardy", "lambada_openai", "openbook_qa", "piqa", "squad",
    "winograd", "winogrande",
)  # fmt: skip
"""Labels of the tasks of CORE."""

_SUBJECT = "core/"
_ORDER_SEED = 1337  # of the documents, so that a limit takes a sample
_SHOTS_SEED = 1234  # of the few-shot examples, plus the number of the document
_BATCHES = 64  # batches whose tokens are in host memory at once

Document = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Description:
    """A task as the bundle describes it.

    Attributes:
        label: name of the task.
        kind: type of the task, a key of `_KINDS`.
        file: documents, as JSON Lines.
        n_shots: examples before each question.
        delimiter: text between a question and its answer.
        chance: accuracy of a random answer, from 0 to 1.
    """

    label: str
    kind: str
    file: Path
    n_shots: int
    delimiter: str
    chance: float


@dataclasses.dataclass(frozen=True)
class CoreBundle:
    """The tasks of CORE whose data are present."""

    descriptions: tuple[Description, ...]

    @classmethod
    def open(cls, directory: str) -> "CoreBundle":
        """Read the descriptions of the tasks; a warning names those that are missing.

        Raises:
            UserError: the bundle cannot be read, or has no task of CORE.
        """
        path = Path(directory)
        entries, chances = _read_entries(path / "core.yaml"), _read_chances(path)
        present, missing = [], []
        for label in CORE_TASKS:
            entry = entries.get(label)
            if entry is None:
                missing.append(f"{label} (not in core.yaml)")
            elif label not in chances:
                missing.append(f"{label} (not in eval_meta_data.csv)")
            elif not (path / "eval_data" / entry["dataset_uri"]).is_file():
                missing.append(f"{label} (no file eval_data/{entry['dataset_uri']})")
            else:
                present.append(_description(entry, path, chances[label]))
        if not present:
            raise UserError(f'eval.tasks_core = "{directory}" has no task of CORE with its data')
        if missing:
            log.warning(
                "eval/tasks/core is not logged, because %d of %d tasks of CORE are missing in %s: "
                "%s. The others are evaluated",
                len(missing), len(CORE_TASKS), directory, ", ".join(missing),
            )  # fmt: skip
        return cls(tuple(present))

    def tasks(self, text: TextModel, limit: int | None) -> list["CoreTask"]:
        """Read the documents of all tasks.

        Raises:
            UserError: a file cannot be read.
        """
        return [CoreTask(description, text, limit) for description in self.descriptions]

    def aggregate(self, results: Mapping[str, Results]) -> dict[str, float]:
        """Return CORE and its standard error; nothing if results of a task are missing."""
        by_label = {label: results.get(_SUBJECT + label) for label in CORE_TASKS}
        complete = {label: result for label, result in by_label.items() if result}
        if len(complete) < len(CORE_TASKS):
            return {}
        chances = {description.label: description.chance for description in self.descriptions}
        metrics = {label: result[_SUBJECT + label] for label, result in complete.items()}
        # Centering scales an error like its accuracy; tasks are independent, so variances add.
        errors = [m["acc_stderr"] / (1 - chances[label]) for label, m in metrics.items()]
        n = len(CORE_TASKS)
        return {
            "core": math.fsum(m["centered_acc"] for m in metrics.values()) / n,
            "core_stderr": math.sqrt(math.fsum(error**2 for error in errors)) / n,
        }

    def aggregate_directions(self) -> dict[str, bool | None]:
        """Return that higher values of CORE are better; nothing if a task is missing."""
        is_complete = len(self.descriptions) == len(CORE_TASKS)
        return {"core": True} if is_complete else {}


class CoreTask:
    """A task of CORE.

    Args:
        description: the task.
        text: the model.
        limit: documents to evaluate; None for all.

    Raises:
        UserError: the documents cannot be read.
    """

    def __init__(self, description: Description, text: TextModel, limit: int | None) -> None:
        self.name = _SUBJECT + description.label
        self._task, self._text = description, text
        self._documents = _read_documents(description)
        random.Random(_ORDER_SEED).shuffle(self._documents)
        self._n = min(limit or len(self._documents), len(self._documents))

    def evaluate(self) -> Results:
        """Return accuracy, its standard error, and the centered accuracy."""
        hits = [hit for part in self._parts() for hit in self._hits(part)]
        accuracy, chance = sum(hits) / len(hits), self._task.chance
        # Of the mean of n outcomes that are 0 or 1, by the sample variance.
        variance = accuracy * (1 - accuracy) / max(1, len(hits) - 1)
        metrics = {
            "acc": accuracy,
            "acc_stderr": math.sqrt(variance),
            "centered_acc": (accuracy - chance) / (1 - chance),
        }
        return {self.name: metrics}

    def directions(self) -> Directions:
        """Return that higher accuracies are better."""
        return {self.name: {"acc": True, "centered_acc": True}}

    def _parts(self) -> Iterator[range]:
        """Yield the numbers of documents, in parts that limit the host's memory."""
        size = _BATCHES * self._text.rows
        for first in range(0, self._n, size):
            yield range(first, min(first + size, self._n))

    def _hits(self, numbers: range) -> list[bool]:
        """Return for each document whether the model's answer is correct."""
        kind = _KINDS[self._task.kind]
        documents = [self._documents[i] for i in numbers]
        prompts = [self._prompts(i) for i in numbers]
        texts = [text for texts in prompts for text in texts]
        encoded = iter(self._text.tokenizer.encode_batch(texts))
        # [documents][texts][tokens]
        tokens = [[[self._text.prefix, *next(encoded)] for _ in texts] for texts in prompts]
        scored = [kind.continuations(sequences, self._text.max_length) for sequences in tokens]
        likelihoods = iter(
            self._text.score(
                [continuation for answers in scored for continuation in answers],
                # Parts have different sizes: full batches share one program.
                has_full_batches=self._n > len(numbers),
            )
        )
        return [
            kind.is_hit(answers, [next(likelihoods) for _ in answers], document)
            for answers, document in zip(scored, documents, strict=True)
        ]

    def _prompts(self, number: int) -> list[str]:
        """Return the texts of a document, after the examples before it."""
        kind, n_candidates = _KINDS[self._task.kind], len(self._documents) - 1
        drawn = random.Random(_SHOTS_SEED + number).sample(range(n_candidates), self._task.n_shots)
        # Numbers from the document on move up by one, so that it is not its own example.
        shots = [self._documents[i + (i >= number)] for i in drawn]
        delimiter = self._task.delimiter
        before = "".join(kind.example(shot, delimiter) + "\n\n" for shot in shots)
        return kind.texts(self._documents[number], before, delimiter)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A type of tasks.

    Attributes:
        fields: required fields of a document.
        example: (document, delimiter) -> text of a solved document.
        texts: (document, text before it, delimiter) -> the texts to compare.
        continuations: (tokens of the texts, longest sequence) -> what is scored.
        is_hit: (continuations, likelihoods, document) -> whether the answer is correct.
    """

    fields: tuple[str, ...]
    example: Callable[[Document, str], str]
    texts: Callable[[Document, str, str], list[str]]
    continuations: Callable[[Sequence[list[int]], int], list[Continuation]]
    is_hit: Callable[[Sequence[Continuation], Sequence[Likelihood], Document], bool]


def _choice_texts(document: Document, before: str, delimiter: str) -> list[str]:
    return [f"{before}{document['query']}{delimiter}{choice}" for choice in document["choices"]]


def _schema_texts(document: Document, before: str, delimiter: str) -> list[str]:
    ending = document["continuation"]
    return [f"{before}{option}{delimiter}{ending}" for option in document["context_options"]]


def _ending_texts(document: Document, before: str, delimiter: str) -> list[str]:
    """Return the text without its ending, and the whole text.

    White space at the end of the first would belong to the first token of the ending.
    """
    context = f"{before}{document['context'].strip()}{delimiter}"
    return [context.strip(), context + document["continuation"]]


def _after_common_prefix(sequences: Sequence[list[int]], longest: int) -> list[Continuation]:
    first = _common_length(sequences)
    return [_split(sequence, first, longest) for sequence in sequences]


def _common_suffix(sequences: Sequence[list[int]], longest: int) -> list[Continuation]:
    length = _common_length([sequence[::-1] for sequence in sequences])
    return [_split(sequence, len(sequence) - length, longest) for sequence in sequences]


def _ending(sequences: Sequence[list[int]], longest: int) -> list[Continuation]:
    return [_split(sequences[1], _common_length(sequences), longest)]


def _common_length(sequences: Sequence[list[int]]) -> int:
    """Return the length of the common start of sequences."""
    columns = zip(*sequences, strict=False)
    return next(
        (i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, sequences))
    )


def _split(sequence: list[int], first: int, longest: int) -> Continuation:
    """Split a sequence before position `first`, and keep its last `longest` tokens.

    At least one token is on each side.
    """
    readable = sequence[-longest:]
    # Tokens that truncation removes from the start move the border to the left.
    at = min(max(first - (len(sequence) - len(readable)), 1), len(readable) - 1)
    return Continuation(readable[:at], readable[at:])


def _is_best(
    answers: Sequence[Continuation], likelihoods: Sequence[Likelihood], document: Document
) -> bool:
    """Return whether the correct answer has the highest mean log-probability per token."""
    means = [
        likelihood.log_probability / len(answer.tokens)
        for answer, likelihood in zip(answers, likelihoods, strict=True)
    ]
    return int(np.argmax(means)) == document["gold"]


def _is_likeliest(
    answers: Sequence[Continuation], likelihoods: Sequence[Likelihood], document: Document
) -> bool:
    return likelihoods[0].is_greedy


_KINDS: Mapping[str, _Kind] = {
    "multiple_choice": _Kind(
        ("query", "choices", "gold"),
        lambda shot, delimiter: f"{shot['query']}{delimiter}{shot['choices'][shot['gold']]}",
        _choice_texts, _after_common_prefix, _is_best,
    ),
    "schema": _Kind(
        ("context_options", "continuation", "gold"),
        lambda shot, delimiter: (
            f"{shot['context_options'][shot['gold']]}{delimiter}{shot['continuation']}"
        ),
        _schema_texts, _common_suffix, _is_best,
    ),
    "language_modeling": _Kind(
        ("context", "continuation"),
        lambda shot, delimiter: f"{shot['context'].strip()}{delimiter}{shot['continuation']}",
        _ending_texts, _ending, _is_likeliest,
    ),
}  # fmt: skip


def _read_entries(file: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of core.yaml by label.

    Raises:
        UserError: the file cannot be read, or an entry lacks a key.
    """
    content = _read_text(file)
    try:
        entries = {entry["label"]: entry for entry in yaml.safe_load(content)["icl_tasks"]}
        for entry in entries.values():
            _ = entry["dataset_uri"], entry["icl_task_type"], int(entry["num_fewshot"][0])
    except (yaml.YAMLError, KeyError, TypeError, IndexError, ValueError) as error:
        raise UserError(
            f"{file} is not a list of tasks: {type(error).__name__}: {error}. It must have "
            "icl_tasks with label, icl_task_type, dataset_uri and num_fewshot = [N]"
        ) from error
    return entries


def _read_chances(directory: Path) -> dict[str, float]:
    """Return the accuracy of a random answer by label.

    Raises:
        UserError: eval_meta_data.csv cannot be read.
    """
    file = directory / "eval_meta_data.csv"
    rows = csv.DictReader(_read_text(file).splitlines())
    try:
        return {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f'{file} must have the columns "Eval Task" and "Random baseline": {error}'
        ) from error


def _description(entry: dict[str, Any], directory: Path, chance: float) -> Description:
    kind = entry["icl_task_type"]
    if kind not in _KINDS:
        raise UserError(
            f'{directory / "core.yaml"}: icl_task_type = "{kind}" of {entry["label"]} is unknown; '
            f"choose from {', '.join(_KINDS)}"
        )
    return Description(
        entry["label"], kind, directory / "eval_data" / entry["dataset_uri"],
        int(entry["num_fewshot"][0]), entry.get("continuation_delimiter", " "), chance,
    )  # fmt: skip


def _read_documents(task: Description) -> list[Document]:
    """Read the documents of a task.

    Raises:
        UserError: a line has no document of the task's type, or there are too few.
    """
    fields = _KINDS[task.kind].fields
    documents = []
    for number, line in enumerate(_read_text(task.file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            answers = document.get("choices", document.get("context_options", ()))
            assert all(field in document for field in fields)
            assert "gold" not in fields or 0 <= document["gold"] < len(answers)
        except (ValueError, TypeError, AttributeError, AssertionError) as error:
            raise UserError(
                f"{task.file}:{number} is not a document of a {task.kind} task. It must be a JSON "
                f"object with {', '.join(fields)}"
            ) from error
        documents.append(document)
    if len(documents) <= task.n_shots:
        raise UserError(
            f"{task.file} has {len(documents)} documents, too few for a question after "
            f"{task.n_shots} examples"
        )
    return documents


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"eval.tasks_core: {file} cannot be read: {error}{path_hint(file)}"
        ) from error
