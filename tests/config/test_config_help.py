"""The reference of keys that `--help` prints."""

import pytest
from rich.console import Console

from jaxforge.config.reading.help import help_text, print_help
from jaxforge.config.reading.schema import all_keys, expected, node_at, short_type


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


def test_a_row_has_default_type_and_meaning():
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


def test_printing_is_the_same_text(capsys):
    print_help(Console(width=100, color_system=None))
    assert "[profiling]" in capsys.readouterr().out


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
        (("checkpoint", "dyn_ckpt_window"), "table", "a table"),
        (("checkpoint", "load_path"), "str", "text"),
        (("checkpoint", "dyn_ckpt_window", "strategy"), "power2", "one of power2"),
    ],
)
def test_types_in_words(path, short, long):
    assert (short_type(node_at(path)), expected(node_at(path))) == (short, long)


@pytest.mark.parametrize("path", [("nope",), ("train", "x"), ("train", 0), ("train", "seed", "x")])
def test_no_value_can_be_there(path):
    assert node_at(path) is None
