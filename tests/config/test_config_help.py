"""Key reference printed by `--help`."""

from io import StringIO

import pytest
from rich.console import Console

from jaxforge.config.reading.help import contents, topic
from jaxforge.config.reading.schema import all_keys, expected, node_at, short_type
from jaxforge.errors import UserError


def help_text(width):
    """Return the reference of all keys as plain text."""
    console = Console(file=StringIO(), width=width, color_system=None)
    with console.capture() as text:
        console.print(topic("all"))
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def test_help_lists_keys_under_their_table():
    listed, table, folded = [], "", False
    for line in help_text(200).splitlines():
        if line.startswith("["):
            table = line.split("  ")[0].strip("[]")
            listed += [] if "." in table else [table]
        elif line.startswith("  ") and line[2:3].strip():
            name = line.split()[0]
            if folded:  # a long name continues on the next line
                listed[-1] += name
            else:
                listed.append(f"{table}.{name}")
            folded = not folded and len(name) == 34
    assert sorted(listed) == sorted(all_keys())


def test_keys_have_descriptions():
    assert [key for key, node in all_keys().items() if not node.get("description")] == []


def test_help_row_has_default_type_and_description():
    [row] = [line for line in help_text(200).splitlines() if line.startswith("  seq_len ")]
    assert row.split("  ")[1] == "seq_len = 2048"
    assert row.split()[3:] == ["int", "Tokens", "per", "sequence."]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_help_lines_fit_width_without_truncation(width):
    text = help_text(width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_nested_tables_have_headings():
    text = help_text(100)
    assert "[model.rope_scaling]" in text
    assert "[[data.datasets]]" in text


def help_of(name, width=100):
    console = Console(width=width, color_system=None)
    with console.capture() as text:
        console.print(topic(name))
    return text.get()


def test_section_help_includes_its_tables():
    text = help_of("data")
    assert text.startswith("[data] ")
    assert "[[data.datasets]] " in text
    assert "[eval]" not in text
    assert help_of("data.datasets").startswith("[[data.datasets]] ")


def test_key_help_has_type_default_and_usage():
    assert help_of("optimizer.lr") == help_of("--optimizer.lr")
    assert help_of("lr").startswith(help_of("optimizer.lr").rstrip())
    assert help_of("lr").splitlines()[2:6] == [
        "  expected: a number greater than 0",
        "  default: 0.0003",
        "  in the config: [optimizer] lr = 0.0003",
        "  command line: --optimizer.lr=0.0003",
    ]


def test_help_explains_all_keys_of_a_name():
    assert [line for line in help_of("interval").splitlines() if line and line[0] != " "] == [
        "eval.interval",
        "eval.datasets.interval",
        "checkpoint.interval",
        "metrics.writers.interval",
    ]


def test_unknown_topic_gets_a_suggestion():
    with pytest.raises(UserError, match=r"--help optimzer: .*; did you mean optimizer\?"):
        topic("optimzer")
    with pytest.raises(UserError, match=r"no such section or key; did you mean train.max_steps\?"):
        topic("train.max_step")
    with pytest.raises(UserError, match="jaxforge trains text models only"):
        topic("vlm")
    with pytest.raises(UserError, match="no such section or key: XLA fuses the update"):
        topic("fused")
    with pytest.raises(UserError, match=r"did you mean model.feed_forward_pattern\?"):
        topic("moe_frequency")
    with pytest.raises(UserError, match=r"no such section or key; did you mean model.dim\?"):
        topic("hidden_size")


def test_contents_list_all_sections():
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
        (("data", "shuffle"), "bool", "true or false"),
        (("data", "datasets"), "[table]", "a list"),
        (("optimizer", "lr_patterns"), "table", "a table"),
        (("optimizer", "lr_patterns", "x"), "float", "a number of at least 0"),
        (
            ("checkpoint", "dyn_ckpt_window"),
            "table",
            "a table of start, stop",
        ),
        (("checkpoint", "load_path"), "str", "text"),
    ],
)
def test_types_are_described(path, short, long):
    assert (short_type(node_at(path)), expected(node_at(path))) == (short, long)


@pytest.mark.parametrize("path", [("nope",), ("train", "x"), ("train", 0), ("train", "seed", "x")])
def test_invalid_path_has_no_schema(path):
    assert node_at(path) is None
