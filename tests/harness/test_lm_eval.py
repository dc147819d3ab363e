"""A run's answers to tasks of lm_eval are those of its export under lm_eval's own backend "hf"."""

import functools
import json
import shutil

import pytest
import tokenizers

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[lm-eval]'")
pytest.importorskip("accelerate", reason="lm_eval's hf is not installed: pip install 'lm_eval[hf]'")
pytest.importorskip("torch")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from jaxforge.commands import lm_eval as command
from jaxforge.commands import train
from jaxforge.errors import UserError
from jaxforge.tools.lm_eval import JaxforgeLM
from tests.harness.conftest import SENTENCE, train_command
from tests.helpers import cli

CHOICES = [
    *({"question": f"Is it {color}?", "choices": ["no", "yes"], "answer": int(color == "brown")}
      for color in ("red", "brown", "green")),
    {"question": "the quick brown", "choices": [" fox jumps", " dog", "."], "answer": 0},
    {"question": "over the ", "choices": ["lazy dog", "quick"], "answer": 0},  # whose is the space?
    {"question": SENTENCE * 6, "choices": ["the", "Is"], "answer": 0},  # longer than the model goes
    {"question": "", "choices": ["the quick", "e"], "answer": 0},
]  # fmt: skip
PROMPTS = [
    {"question": "the quick", "answer": " brown fox "},
    {"question": "Is it red?", "answer": " no"},
    {"question": "lazy", "answer": " dog. Is it red? no"},
    {"question": SENTENCE * 6, "answer": ""},
]
TEXTS = [{"question": "", "answer": text} for text in (SENTENCE * 5, "Is it brown? yes", "zz é")]
TASKS = {
    "local_choices": (CHOICES, "multiple_choice", {"doc_to_choice": "{{choices}}"}, ["acc"]),
    "local_prompts": (PROMPTS, "generate_until", {
        "generation_kwargs": {"until": ["jumps", "\n"], "max_gen_toks": 40},
    }, ["exact_match"]),
    "local_texts": (TEXTS, "loglikelihood_rolling", {}, ["word_perplexity", "bits_per_byte"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A run of a BPE, trained for long enough that its answers are not all alike."""
    path = tmp_path_factory.mktemp("harness") / "run"
    settings = ["--train.max_steps=60", "--train.ema_decay=0.9"]
    assert train.main(train_command(corpus, path, *settings)) == 0
    return path


def exported(run, weights="raw"):
    """Export the run's last checkpoint for transformers, in float32; return the directory."""
    to = run.parent / f"{run.name}_hf_{weights}"
    options = ["--to", "hf", "--dtype", "float32", "--weights", weights]
    cli(["convert", str(run), str(to), *options])
    return str(to)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Register the tasks of this file with lm_eval."""
    path = tmp_path_factory.mktemp("tasks")
    for name, (documents, kind, more, metrics) in TASKS.items():
        (path / f"{name}.jsonl").write_text(
            "".join(json.dumps(document) + "\n" for document in documents)
        )
        task = {
            "task": name, "dataset_path": "json", "test_split": "test", "output_type": kind,
            "dataset_kwargs": {"data_files": {"test": str(path / f"{name}.jsonl")}},
            "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", **more,
            "metric_list": [{"metric": metric} for metric in metrics],
        }  # fmt: skip
        (path / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML, too
    return TaskManager(include_path=str(path), include_defaults=False)


def evaluated(model, tasks, **arguments):
    return lm_eval.simple_evaluate(
        model, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0, **arguments
    )


def answers(result, name):
    """Each request's, of all documents in order."""
    samples = sorted(result["samples"][name], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for (answer,) in sample["resps"]]


def test_tasks_come_to_what_they_come_to_for_the_export(run, tasks, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs = evaluated(HFLM(exported(run), device="cpu", batch_size=4), tasks)
    ours = evaluated("jaxforge", tasks, model_args=f"run={run},distributed.tp=2", batch_size=3)
    for name in TASKS:
        for metric, value in theirs["results"][name].items():
            if metric.partition(",")[0] in TASKS[name][3]:
                assert ours["results"][name][metric] == pytest.approx(value, rel=1e-5), metric
    for item, other in zip(*(answers(x, "local_choices") for x in (ours, theirs)), strict=True):
        assert item[0] == pytest.approx(other[0], rel=1e-5, abs=1e-5)
        assert item[1] == other[1]
    assert {greedy for _, greedy in answers(ours, "local_choices")} == {True, False}
    assert answers(ours, "local_prompts") == answers(theirs, "local_prompts")
    assert len(set(answers(ours, "local_prompts"))) == len(PROMPTS)
    for item, other in zip(*(answers(x, "local_texts") for x in (ours, theirs)), strict=True):
        assert item == pytest.approx(other, rel=1e-5)


def test_average_has_results_of_its_export(run, tasks, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs = evaluated(HFLM(exported(run, "ema"), device="cpu", batch_size=4), tasks)
    ours = evaluated("jaxforge", tasks, model_args=f"run={run},weights=ema", batch_size=3)
    raw = evaluated("jaxforge", tasks, model_args=f"run={run}", batch_size=3)
    name, metric = "local_texts", "word_perplexity,none"
    assert ours["results"][name][metric] == pytest.approx(theirs["results"][name][metric], rel=1e-5)
    assert ours["results"][name][metric] != pytest.approx(raw["results"][name][metric], rel=1e-3)
    for item, other in zip(*(answers(x, "local_choices") for x in (ours, theirs)), strict=True):
        assert item[0] == pytest.approx(other[0], rel=1e-5, abs=1e-5)


def test_command_evaluates_average(run, tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = ["--tasks", "local_texts", "--include_path", tasks.include_path]
    output = ["--output_path", str(tmp_path)]
    assert command.main([str(run), "--weights", "ema", *own, *output]) == 0
    (file,) = tmp_path.rglob("results_*.json")
    expected = evaluated("jaxforge", tasks, model_args=f"run={run},weights=ema", batch_size=3)
    metric = "word_perplexity,none"
    assert json.loads(file.read_text())["results"]["local_texts"][metric] == pytest.approx(
        expected["results"]["local_texts"][metric], rel=1e-5
    )


@pytest.fixture(scope="module")
def begins_texts(run):
    """The run, with a tokenizer that puts BOS before every text."""
    copy = run.parent / "with_bos"
    shutil.copytree(run, copy)
    file, settings = (copy / "tokenizer" / f"tokenizer{end}.json" for end in ("", "_config"))
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<s>"])
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    template = tokenizers.processors.TemplateProcessing("<s> $A", "<s> $A $B", [bos])
    tokenizer.post_processor = template
    tokenizer.save(str(file))
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "bos_token": "<s>"}))
    return copy, exported(copy)


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_texts_begin_as_the_exports_tokenizer_has_it(begins_texts, add_bos_token):
    run, export = begins_texts
    theirs = HFLM(export, device="cpu", add_bos_token=add_bos_token)
    ours = JaxforgeLM(str(run), add_bos_token=add_bos_token)
    texts = ["the quick", "<s>the quick", "<|endoftext|>", ""]
    for text in texts:
        for special in (None, True, False):
            assert ours.tok_encode(text, special) == theirs.tok_encode(text, special), (
                text,
                special,
            )
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.eot_token_id == theirs.eot_token_id


def ask(lm, method, *arguments):
    requests = [Instance(method, {}, each, i) for i, each in enumerate(arguments)]
    return getattr(lm, method)(requests)


@pytest.fixture(scope="module")
def lm(run):
    return JaxforgeLM(str(run), step=60, batch_size=2)


def test_stop_sequences_and_sampling(lm):
    generate = functools.partial(ask, lm, "generate_until")
    greedy, cut = generate(
        ("the quick", {"until": [], "max_gen_toks": 30}),
        ("the quick", {"until": ["fox"], "max_gen_toks": 30}),
    )
    assert cut == greedy.partition("fox")[0] != greedy
    drawn = {"do_sample": True, "temperature": 5.0, "max_gen_toks": 12}
    item, other = generate(("the quick", drawn), ("the quick", drawn))
    assert item != other  # each request draws for itself
    assert generate(("the quick", drawn), ("the quick", drawn)) == [item, other]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"max_gen_toks": 64}, "max_gen_toks = 64 leaves no room for a context"),
        ({"max_gen_toks": 4, "num_beams": 2}, "unsupported generation arguments: num_beams"),
    ],
)
def test_unsupported_generation_is_refused(lm, how, message):
    with pytest.raises(UserError, match=message):
        ask(lm, "generate_until", ("the quick", how))


def test_continuation_longer_than_the_model_goes_is_refused(lm):
    with pytest.raises(UserError, match=r"a continuation has \d+ tokens, more than"):
        ask(lm, "loglikelihood", ("the", SENTENCE * 9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 2}, "the model jaxforge has no argument tp"),
        ({"batch_size": "auto"}, "batch_size=auto: must be an integer"),
        ({"step": 7}, "the newest of .* is step 60"),
    ],
)
def test_wrong_arguments_are_named(run, arguments, message):
    with pytest.raises(UserError, match=message):
        JaxforgeLM(str(run), **arguments)
