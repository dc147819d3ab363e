"""Limits of TOML documents, which bound the cost of untrusted configs."""

import pytest

from jaxforge.config.reading import toml
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a" + ".a" * 20_000 + " = 1", ":1: names or brackets nested more than 32 deep"),
        ("[a" + ' . "a"' * 20_000 + "]", ":1: names or brackets nested more than 32 deep"),
        ("\nx = " + "[" * 3000 + "]" * 3000, ":2: names or brackets nested more than"),
        ("x = " + "{a = " * 40 + "1" + "}" * 40, ":1: names or brackets nested more than"),
        ("\n\nx = " + "9" * 5000, ":3: a number or key of 5,000 characters, more than 100"),
        ("x" * 5000 + " = 1", ":1: a number or key of 5,000 characters"),
        ("[[a]]\n" * 100_000, ":10001: more than 10,000 lines or 200,000 names and values"),
        ("x = [" + "1," * 150_000 + "]", ":1: more than 10,000 lines or 200,000 names and values"),
        ("# " + "x" * (1 << 20), ": 1,048,578 characters; a config has at most 1,048,576"),
        ("x = 1\ny = 2024-13-45", ":2:9: not valid TOML"),
    ],
)
def test_oversized_toml_is_refused(tmp_path, text, message):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(tmp_path / "x.toml")
    assert str(caught.value).startswith(f"{tmp_path / 'x.toml'}{message}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ['\\"""x"', '"\\"', "'''x'", '"""\\""'])
def test_unterminated_strings_are_scanned_once(text):
    """Otherwise each of 100,000 quotes would be scanned to the end of the file."""
    with pytest.raises(UserError, match=r"not valid TOML|more than 10,000 lines"):
        toml.parse(text * 100_000, "x.toml")


def test_strings_and_comments_accept_any_text():
    dots, brackets = "." * 1000, "[" * 1000
    text = f'# {brackets}\n[a.b]\nx = "{dots}"\ny = """{brackets}\n\\""" """\nz = [0.1, [0.25]]\n'
    inner = {"x": dots, "y": f'{brackets}\n""" ', "z": [0.1, [0.25]]}
    assert toml.parse(text, "x.toml") == {"a": {"b": inner}}


def test_number_of_reported_problems_is_limited():
    text = "\n".join(f"k{i} = 1" for i in range(9000))
    with pytest.raises(UserError) as caught:
        _load(text)
    lines = str(caught.value).splitlines()
    assert len(lines) == 31
    assert lines[0].startswith("x.toml:2: unknown key model.k0")
    assert lines[29].startswith("x.toml:31: unknown key model.k29")
    assert lines[30] == "and 8,970 more problems"


def _load(text):
    from jaxforge.config.reading.explain import Sources
    from jaxforge.config.reading.toml import key_lines
    from jaxforge.config.reading.unresolved import UnresolvedConfig

    text = f"[model]\n{text}\n"
    return UnresolvedConfig(toml.parse(text, "x.toml"), Sources("x.toml", key_lines(text), []))
