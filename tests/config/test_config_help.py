"""The reference of keys that `--help` prints."""

import pytest
from rich.console import Console

from jaxforge.config.reading.help import contents, help_text, topic
from jaxforge.config.reading.schema import all_keys, expected, node_at, short_type
from jaxforge.errors import UserError


def test_every_key_is_listed_under_its_table():
    listed, table, folded = [], "", False
    for line in help_text(200).splitlines():
        if line.startswith("["):
            table = line.split("  ")[0].strip("[]")
            listed += [] if "." in table else [table]
        elif line.startswith("  ") and line[2:3].strip():
            name = line.split()[0]
            if folded:  # a long name goes on in the next line
                listed[-1] += name
            else:
                listed.append(f"{table}.{name}")
            folded = not folded and len(name) == 34
    assert sorted(listed) == sorted(all_keys())


def test_every_key_is_described():
    assert [key for key, node in all_keys().items() if not node.get("description")] == []


def test_row_has_default_type_and_meaning():
    [row] = [line for line in help_text(200).splitlines() if line.startswith("  seq_len ")]
    assert row.split("  ")[1] == "seq_len = 2048"
    assert row.split()[3:] == ["int", "Tokens", "per", "sequence."]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_fit_the_width_and_cut_nothing_off(width):
    text = help_text(width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_nested_tables_have_headings():
    text = help_text(100)
    assert "[model.rope_scaling]" in text
    assert "[[data.datasets]]" in text


def said(name, width=100):
    console = Console(width=width, color_system=None)
    with console.capture() as text:
        console.print(topic(name))
    return text.get()


def test_section_comes_with_its_tables():
    text = said("data")
    assert text.startswith("[data] ")
    assert "[[data.datasets]] " in text
    assert "[eval]" not in text
    assert said("data.datasets").startswith("[[data.datasets]] ")


def test_key_says_what_it_takes_and_where_it_stands():
    assert said("optimizer.lr") == said("lr") == said("--optimizer.lr")
    assert said("lr").splitlines()[2:6] == [
        "  expected: a number greater than 0",
        "  default: 0.0003",
        "  in the config: [optimizer] lr = 0.0003",
        "  command line: --optimizer.lr=0.0003",
    ]
    assert "no effect: XLA fuses the update of all parameters" in said("fused")


def test_every_key_of_a_name_is_explained():
    assert [line for line in said("interval").splitlines() if line and line[0] != " "] == [
        "eval.interval",
        "checkpoint.interval",
    ]


def test_unknown_topic_gets_a_suggestion():
    with pytest.raises(UserError, match=r"--help optimzer: .*; did you mean optimizer\?"):
        topic("optimzer")
    with pytest.raises(UserError, match=r"no such section or key; did you mean train.max_steps\?"):
        topic("train.max_step")
    with pytest.raises(UserError, match="jaxforge trains text models only"):
        topic("vlm")


def test_contents_name_every_section():
    sections = [key for key, node in all_keys().items() if "." not in key]
    assert [line.split()[0] for line in contents().splitlines()[1:-2]] == sections


@pytest.mark.parametrize(
    ("path", "short", "long"),
    [
        (("train", "seq_len"), "int", "an integer greater than 0"),
        (
            ("train", "max_steps"),
            "int | duration",
            'an integer greater than 0, or a duration like "10%", "2ep", "1B tok"',
        ),
        (("train", "global_batch_size"), "int", "an integer greater than 0"),
        (
            ("train", "grad_sync"),
            "auto | update | microbatch",
            "one of auto, update, microbatch",
        ),
        (("optimizer", "betas"), "[float, float]", "a list of 2 values"),
        (("optimizer", "betas", 0), "float", "a number of at least 0 and less than 1"),
        (("optimizer", "fused"), "bool", "true or false"),
        (("data", "datasets"), "[table]", "a list"),
        (("data", "anneal_weights"), "table", "a table"),
        (("data", "anneal_weights", "x"), "float", "a number of at least 0"),
        (
            ("checkpoint", "dyn_ckpt_window"),
            "table",
            "a table of start, stop, strategy",
        ),
        (("checkpoint", "load_path"), "str", "text"),
        (("checkpoint", "dyn_ckpt_window", "strategy"), "power2", "one of power2"),
    ],
)
def test_types_in_words(path, short, long):
    assert (short_type(node_at(path)), expected(node_at(path))) == (short, long)


@pytest.mark.parametrize("path", [("nope",), ("train", "x"), ("train", 0), ("train", "seed", "x")])
def test_no_value_can_be_there(path):
    assert node_at(path) is None
