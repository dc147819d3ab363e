"""Messages of errors."""

import pytest

from jaxforge.errors import LONGEST_MESSAGE, UserError, shortened


@pytest.mark.parametrize("text", ["x" * 10**6, "name, " * 10**5 + "end. Remove it"])
def test_long_message_of_a_mistake_is_shortened(text):
    message = str(UserError(text))
    assert len(message) <= LONGEST_MESSAGE
    assert message.startswith(text[:1000])
    assert message.endswith(text[-200:])
    assert "characters left out" in message


def test_short_message_is_unchanged():
    text = "a b " * (LONGEST_MESSAGE // 4)
    assert str(UserError(text)) == shortened(text) == text
    assert len(shortened(text, 200)) <= 200
