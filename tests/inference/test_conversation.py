"""Conversations: inputs of the model and treatment of its answers."""

import dataclasses
import types

import pytest

from jaxforge.data.corpus.tokenizer import ByteTokenizer
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.errors import UserError
from jaxforge.inference.conversation import Dialogue, answer, talk
from tests.data.corpus.chat_files import CHATML, INSTRUCTIONS, LAST_THINKS, save_tokenizer

BYTES = ByteTokenizer()
VOCAB = 1 << 16


@pytest.fixture
def chat(tmp_path):
    def chat(template):
        save_tokenizer(tmp_path, template)
        return load_tokenizer(tmp_path)

    return chat


@pytest.mark.parametrize("template", [CHATML, LAST_THINKS])
def test_turns_are_template_messages(chat, template):
    tokenizer = chat(template)
    dialogue = Dialogue(tokenizer, room=1000, vocab_size=VOCAB)
    assert dialogue.end == "<|im_end|>"
    ids, _ = dialogue.ask("who are you?")
    begun = "<|im_start|>user\nwho are you?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, special_tokens=True) == begun
    dialogue.record_answer("a bot")
    ids, word = dialogue.ask("four")
    assert word == ""
    assert tokenizer.decode(ids, special_tokens=True) == (
        f"{begun}a bot<|im_end|>\n<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n"
    )
    dialogue.reset()
    assert dialogue.ask("who are you?")[0] == tokenizer.encode(begun)


def test_refusing_template_is_tokenizer_error(chat):
    refusing = INSTRUCTIONS.replace("['user', 'assistant']", "['user']")
    with pytest.raises(UserError, match=r"no conversation with this tokenizer: .*no such role"):
        Dialogue(chat(refusing), room=100, vocab_size=VOCAB)


def test_conversation_without_template_is_one_text():
    dialogue = Dialogue(BYTES, room=100, vocab_size=VOCAB)
    assert (dialogue.has_template, dialogue.end) == (False, "")
    assert dialogue.ask("")[0] == [BYTES.eos_id]
    dialogue.reset()
    assert bytes(dialogue.ask("once")[0]) == b"once"
    dialogue.record_answer(" upon")
    assert bytes(dialogue.ask("")[0]) == b"once upon"  # and on
    dialogue.record_answer(" a time")
    assert bytes(dialogue.ask("then")[0]) == b"once upon a time\nthen"


def test_oldest_messages_are_dropped(chat):
    tokenizer = chat(CHATML)
    sizes = Dialogue(tokenizer, room=1000, vocab_size=VOCAB)
    item = len(sizes.ask("x")[0])
    sizes.record_answer("y")
    two = len(sizes.ask("x")[0])
    dialogue = Dialogue(tokenizer, room=two, vocab_size=VOCAB)
    for word in ("", "", "oldest turns that the model does not see any more: 1"):
        ids, said = dialogue.ask("x")
        assert said == word
        dialogue.record_answer("y")
    assert len(ids) == two
    with pytest.raises(ValueError, match=f"there is room for {two}: say less, or lower --max"):
        dialogue.ask("a longer question" * 10)
    assert item < len(dialogue.ask("x")[0]) == two  # as if it had not been asked


def test_beginning_of_text_is_dropped():
    dialogue = Dialogue(BYTES, room=8, vocab_size=VOCAB)
    assert dialogue.ask("12345678") == (list(b"12345678"), "")
    dialogue.record_answer("9")
    assert dialogue.ask("") == (list(b"23456789"), "the model sees the last 8 tokens of 9")


def test_message_with_token_beyond_the_model_is_refused():
    dialogue = Dialogue(BYTES, room=100, vocab_size=ord("y"))
    dialogue.ask("abc")
    dialogue.record_answer("d")
    with pytest.raises(ValueError, match="the token 'z' has id 122, and the model has only 121 to"):
        dialogue.ask("xyz"[2:])
    assert bytes(dialogue.ask("e")[0]) == b"abcd\ne"


def printed_parts(text, end="", prompt="a"):
    tokens = iter(BYTES.encode(text))
    return list(answer(tokens, BYTES.encode(prompt), BYTES, end)), bytes(tokens)


def test_answer_streams_whole_characters():
    assert printed_parts("né!") == (["n", "é", "!", ""], b"")
    assert "".join(printed_parts("né🙂")[0]) == "né🙂"
    assert "".join(answer(iter([0xC3]), [97], BYTES, "")) == "�"  # the end came within one


def test_answer_ends_at_template_end():
    shown, unread = printed_parts("yes\nU and\nUser: more", end="\nUser:")
    assert "".join(shown) == "yes\nU and"
    assert unread == b" more"  # nothing is drawn in vain
    assert "\nU" not in shown  # it may have been the beginning of the end
    assert "".join(printed_parts("yes\nUs", end="\nUser:")[0]) == "yes\nUs"


def test_special_token_ends_answer(chat):
    tokenizer = chat(CHATML)
    tokens = iter(tokenizer.encode("a bot<|im_end|>\n<|im_start|>user"))
    assert "".join(answer(tokens, tokenizer.encode("who"), tokenizer, "<|im_end|>")) == "a bot"


@dataclasses.dataclass(frozen=True)
class Parrot:
    """Decodes what it read, backwards."""

    seed: int = 0
    max_tokens: int = 10
    stops_at: str = ""
    model = types.SimpleNamespace(config=types.SimpleNamespace(max_seq_len=100, vocab_size=VOCAB))

    def stream(self, prompts):
        for token in prompts[0][::-1][: self.max_tokens]:
            if chr(token) == self.stops_at:
                raise KeyboardInterrupt
            yield [token]
        yield [None]


def talked(*lines, **decoder):
    """Return the terminal's text after these lines; exceptions are raised instead of lines."""
    left, said = list(lines), []

    def ask(prompt):
        if not left:
            raise EOFError
        line = left.pop(0)
        said.append(f"{prompt}{line!s}\n")
        if isinstance(line, type):
            raise line
        return line

    talk(Parrot(**decoder), BYTES, ask=ask, say=said.append)
    return "".join(said).partition("\n")[2]


def test_conversation_on_terminal():
    assert talked("ab", "c", "/reset", "d") == ("> ab\nba\n> c\nc\nabba\n> /reset\n> d\nd\n\n")
    assert talked("ab", "/quit", "never") == "> ab\nba\n> /quit\n"
    assert talked("a\\", "b") == "> a\\\n. b\nb\na\n\n"
    long = "x" * 200
    assert talked(long) == (f"> {long}\n(the model sees the last 90 tokens of 200)\n{'x' * 10}\n\n")


def test_ctrl_c_stops_answer_and_records_it():
    assert talked("abc", "d", stops_at="a") == "> abc\ncb (stopped)\n> d\nd\nbccb (stopped)\n\n"
    assert "(/reset forgets" in talked(KeyboardInterrupt, "a")
    assert talked(KeyboardInterrupt, "a").endswith("> a\na\n\n")
