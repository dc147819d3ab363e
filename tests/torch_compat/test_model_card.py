"""Model card of an export: its contents, and what it must not reveal."""

import json

import pytest
import yaml

from jaxforge.state.progress import Progress
from jaxforge.telemetry.numbers import human
from tests.conftest import tiny_config
from torch_compat.convert.model_card import Logged, model_card, read_logged

LINES = [
    {"step": 10, "train/loss": 3.5},
    {"step": 10, "eval/loss": 3.6, "eval/perplexity": 36.6, "eval/code/loss": 2.0, "time": 1.0},
    {"step": 20, "train/loss": 3.25},
    {"step": 20, "checkpoint/save_sec": 1.0},
    {"step": 30, "train/loss": 2.0},
    {"step": 30, "eval/loss": 1.0},
]


def card(logged=Logged({}, {}, 0), has_tokenizer=True, **sections):  # noqa: B008 (a tuple)
    progress = Progress(step=20, tokens=1_234_567)
    return model_card("ours", tiny_config(**sections), progress, 5_300_000, "llama", logged,
                      has_tokenizer=has_tokenizer)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    lines = [json.dumps(line) for line in LINES]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:3], '{"step": 1', *lines[3:]]))
    return tmp_path


def test_card_uses_logs_up_to_the_step(run):
    logged = read_logged(run, 20)
    assert logged.train["train/loss"] == 3.25
    assert (logged.evaluation["eval/loss"], logged.evaluated) == (3.6, 10)
    text = card(logged)
    assert "| last loss | 3.2500 |" in text
    assert text.endswith(
        "| evaluation of step 10 | loss |\n|---|---|\n| all | 3.6000 |\n| code | 2.0000 |\n"
    )


def test_run_without_logs_has_a_card(tmp_path):
    text = card(read_logged(tmp_path, 20))
    assert "evaluation" not in text
    assert "last loss" not in text
    assert "| steps | 20 of 20 |\n| tokens | 1,234,567 |" in text
    assert "null" not in card(Logged({"train/loss": None}, {"eval/loss": None}, 5))


def test_front_matter_is_yaml():
    data = {"hf_dataset_name": "me/texts:\x7fall", "tokenizer_path": "byte"}
    _, front, body = card(data=data).split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["jaxforge", "llama"], "datasets": ["me/texts: all"],
    }  # fmt: skip
    assert body.startswith("\n# ours\n\nA decoder language model with 5.3M parameters, trained for")
    assert "datasets" not in card().split("---\n", 2)[1]


def test_card_lists_data_without_local_paths(tmp_path):
    path = tmp_path / "secret" / "web"
    text = card(data={"datasets": [
        {"path": str(path), "weight": 3}, {"hf_name": "me/code"},
    ], "tokenizer_path": "byte"})  # fmt: skip
    assert "| data | web, me/code |" in text
    assert 'datasets:\n- "me/code"\n---' in text
    assert str(tmp_path) not in text
    assert "| data | random tokens |" in card()


HOSTILE = ["web\n# Owned\n<script>alert(1)</script>", "a | b", "- x", "1. x", "# x", "**x**",
           "[x](http://x.y)", "![x](y)", "`x`", "x\r\n---\r\n", "x\u2028# y", "<img src=x>",
           "&amp;", "~~x~~", "\\", "\x1b[2J", "$x$", "x\x00y"]  # fmt: skip


def named(name):
    """Return the body of a card in which a dataset, an evaluation and the run have this name."""
    data = {"datasets": [{"hf_name": name}], "tokenizer_path": "byte"}
    logged = Logged({}, {"eval/loss": 1.0, f"eval/{name}/loss": 2.0}, 5)
    text = model_card(name, tiny_config(data=data), None, 1, "llama", logged, has_tokenizer=False)
    return text.split("---\n", 2)[2]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_config_text_is_escaped(name):
    """Text is escaped in headings, lists and tables of CommonMark and GitHub."""
    parse = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table").parse
    plain, tokens = parse(named("web")), parse(named(name))
    assert [token.type for token in tokens] == [token.type for token in plain]
    inline = [token.children for token in tokens if token.type == "inline"]
    assert {child.type for children in inline for child in children} <= {"text", "text_special"}
    shown = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    texts = ["".join(child.content for child in children) for children in inline]
    assert texts.count(shown) == 3


def test_card_loads_only_existing_tokenizer():
    assert "AutoTokenizer.from_pretrained" in card()
    assert "AutoTokenizer.from_pretrained" not in card(has_tokenizer=False)


def test_human_formats_counts():
    assert [human(n) for n in (7, 999, 1500, 5_300_000, 70e9)] == [
        "7",
        "999",
        "1.5K",
        "5.3M",
        "70B",
    ]
