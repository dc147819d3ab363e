"""A small evaluation bundle of CORE, and its accuracies by plain formulas."""

import json
import random

import yaml

from jaxforge.tasks.core import CORE_TASKS

DELIMITER = "\nA: "
WORDS = ("red", "a fox", "dog", "brown fox", "the", "lazy", "fox jumps", "over it")
SCHEMAS = {"winograd", "winogrande"}
ENDINGS = {"jeopardy", "squad", "coqa", "lambada_openai", "bigbench_operators"}
SHOTS = {"arc_easy": 2, "winogrande": 1, "jeopardy": 1}
CHANCE = {"copa": 50, "winograd": 50, "winogrande": 50, "boolq": 62}  # percent; others: 0


def kind_of(label):
    if label in SCHEMAS:
        return "schema"
    return "language_modeling" if label in ENDINGS else "multiple_choice"


def documents_of(label, n):
    rng = random.Random(label)
    documents = []
    for _ in range(n):
        options = rng.sample(WORDS, 3)
        if kind_of(label) == "schema":
            document = {
                "context_options": options,
                "continuation": "ran.",
                "gold": rng.randrange(3),
            }
        elif kind_of(label) == "language_modeling":
            document = {"context": f"{options[0]} {options[1]} ", "continuation": rng.choice("ate")}
        else:
            question = "quick " * rng.choice((1, 2, 14))  # the last is longer than the model reads
            document = {"query": question, "choices": options, "gold": rng.randrange(3)}
        documents.append(document)
    return documents


def write_bundle(path, *, n=3, labels=CORE_TASKS):
    """Write a bundle with n documents of each task."""
    data = path / "eval_data" / "some"
    data.mkdir(parents=True)
    entries = []
    for label in labels:
        lines = map(json.dumps, documents_of(label, n))
        (data / f"{label}.jsonl").write_text("\n".join(lines) + "\n")
        entry = {
            "label": label, "icl_task_type": kind_of(label), "num_fewshot": [SHOTS.get(label, 0)],
            "dataset_uri": f"some/{label}.jsonl", "has_categories": False,
        }  # fmt: skip
        if label in SHOTS:
            entry["continuation_delimiter"] = DELIMITER
        entries.append(entry)
    (path / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    rows = [f'{label},some,"a, b",{n},{CHANCE.get(label, 0)},yes' for label in labels]
    head = "Eval Task,Task Category,Description,#datapoints,Random baseline,Centered Metric?"
    (path / "eval_meta_data.csv").write_text("\n".join([head, *rows]) + "\n")
    return path


def example(document, delimiter):
    if "query" in document:
        return document["query"] + delimiter + document["choices"][document["gold"]]
    if "context_options" in document:
        option = document["context_options"][document["gold"]]
        return option + delimiter + document["continuation"]
    return document["context"].strip() + delimiter + document["continuation"]


def hits(label, n, log_probabilities, tokenizer, longest, limit=None):
    """Return which documents are answered correctly, by nanochat's rules.

    Args:
        label: the task.
        n: documents of the bundle.
        log_probabilities: token ids -> log-probabilities of the next token at each position.
        tokenizer: the tokenizer, whose end-of-text token is before each text.
        longest: maximum number of tokens.
        limit: documents that count.
    """
    documents = documents_of(label, n)
    random.Random(1337).shuffle(documents)
    delimiter = DELIMITER if label in SHOTS else " "
    correct = []
    for i, document in enumerate(documents[:limit]):
        candidates = [other for j, other in enumerate(documents) if j != i]
        shots = random.Random(1234 + i).sample(candidates, SHOTS.get(label, 0))
        before = "".join(example(shot, delimiter) + "\n\n" for shot in shots)

        def encode(text, before=before):
            return [tokenizer.eos_id, *tokenizer.encode(before + text)]

        def scores(ids, n_scored):
            ids = ids[-longest:]
            table = log_probabilities(ids)
            return [(table[at - 1][ids[at]], table[at - 1].max())
                    for at in range(max(1, len(ids) - n_scored), len(ids))]  # fmt: skip

        if kind_of(label) == "language_modeling":
            whole = document["context"].strip() + delimiter + document["continuation"]
            start = (document["context"].strip() + delimiter).strip()
            ids, n_start = encode(whole), len(encode(start))
            assert ids[:n_start] == encode(start)
            correct.append(all(p == best for p, best in scores(ids, len(ids) - n_start)))
            continue
        if kind_of(label) == "schema":
            texts = [
                f"{x}{delimiter}{document['continuation']}" for x in document["context_options"]
            ]
        else:
            texts = [f"{document['query']}{delimiter}{x}" for x in document["choices"]]
        encoded = [encode(text) for text in texts]
        same = shared(encoded) if kind_of(label) == "multiple_choice" else None
        ends = shared([ids[::-1] for ids in encoded])
        means = []
        for ids in encoded:
            values = scores(ids, len(ids) - same if same is not None else ends)
            means.append(sum(p for p, _ in values) / len(values))
        correct.append(means.index(max(means)) == document["gold"])
    return correct


def shared(sequences):
    """Return the length of the common start of sequences."""
    n = 0
    while all(n < len(ids) and ids[n] == sequences[0][n] for ids in sequences):
        n += 1
    return n
