"""Parsing and conversion of durations."""

from fractions import Fraction

import pytest

from jaxforge.config.duration import parse_duration


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("10%", Fraction(1, 10), "run"),
        ("0.5 %", Fraction(1, 200), "run"),
        ("2ep", 2, "epochs"),
        (" 2.5 ep ", Fraction(5, 2), "epochs"),
        (".5ep", Fraction(1, 2), "epochs"),
        ("1B tok", 10**9, "tokens"),
        ("300Mtok", 3 * 10**8, "tokens"),
        ("1.5T tok", 15 * 10**11, "tokens"),
        ("2K tok", 2000, "tokens"),
        ("4_096 tok", 4096, "tokens"),
        ("500 samples", 500, "samples"),
        ("1.5M samples", 1_500_000, "samples"),
    ],
)
def test_durations_parse(text, amount, unit):
    duration = parse_duration(text)
    assert (duration.amount, duration.unit, duration.text) == (amount, unit, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "500",
        "10 percent",
        "10%%",
        "-1ep",
        "1e3 tok",
        "1G tok",
        "1B",
        "ep",
        "% 10",
        "1b tok",
        "samples",
    ],
)
def test_other_text_is_not_a_duration(text):
    assert parse_duration(text) is None


def test_share_is_rounded_down():
    assert [parse_duration("33%").share(n) for n in (100, 10, 2)] == [33, 3, 1]
    parts = [parse_duration(text).share(25) for text in ("10%", "80%", "10%")]
    assert parts == [2, 20, 2]


def test_share_is_computed_exactly():
    """29 % of 100 is less than 29 in floating point."""
    assert parse_duration("29%").share(100) == 29


def test_lengths_are_rounded_up_to_sequences():
    assert parse_duration("7 samples").sequences(seq_len=8, per_epoch=1) == 7
    assert parse_duration("0.0015K samples").sequences(seq_len=8, per_epoch=1) == 2
    assert parse_duration("1.5ep").sequences(seq_len=8, per_epoch=101) == 152
    assert parse_duration("17 tok").sequences(seq_len=8, per_epoch=1) == 3
    assert parse_duration("16 tok").sequences(seq_len=8, per_epoch=1) == 2


def test_duration_supports_no_arithmetic():
    duration = parse_duration("10%")
    for use in (
        lambda: 5 % duration,
        lambda: duration > 5,
        lambda: range(duration),
        lambda: 2 * duration,
    ):
        with pytest.raises(TypeError):
            use()
