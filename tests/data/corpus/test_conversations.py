"""Records of every form as conversations, and conversations in windows."""

import json

import numpy as np
import pytest

from jaxforge.data.corpus.conversations import Conversations, encode_conversations
from jaxforge.data.corpus.manifest import FIRST, ID, UNLEARNED
from jaxforge.data.corpus.tokenizer import ByteTokenizer, HFTokenizer
from jaxforge.data.packing import IGNORE, Packed, best_fit, fill_window, split_entries
from jaxforge.errors import UserError
from tests.data.corpus.chat_files import TOOLS, bpe_file

TEMPLATE = """\
{{ start }}{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}\
{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% if m.tool_calls is defined %}!{% endif %}\
|{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"""


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def of_record(record):
    """The text of a record, what is learned between brackets."""
    tokenizer = HFTokenizer(bpe_file(), None, {"chat_template": TEMPLATE})
    document = json.loads(Conversations(tokenizer).document(record))
    text = document["text"]
    for start, end in reversed(document["learned"]):
        text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
    return text + "$" * document["eos"]


def turn(role, text):
    return {"from": role, "value": text}


FORMS = {
    "messages": ({"messages": [user("hi"), said("ho")], "id": 3}, "<u>hi|<a>[ho|]"),
    "both": ({"messages": [user("a"), said("b")], "prompt": "a"}, "<u>a|<a>[b|]"),
    "several turns": (
        {"messages": [user("1"), said("2"), user("3"), said("4")]},
        "<u>1|<a>[2|]<u>3|<a>[4|]",
    ),
    "ShareGPT": (
        {"conversations": [turn("system", "s"), turn("human", "1"), turn("gpt", "2")]},
        "<s>s|<u>1|<a>[2|]",
    ),
    "conversations with roles": ({"conversations": [user("1"), said("2")]}, "<u>1|<a>[2|]"),
    "texts": ({"prompt": "one, ", "completion": "two"}, "one, [two]$"),
    "no prompt": ({"prompt": "", "completion": "two"}, "[two]$"),
    "lists": (
        {"prompt": [user("1"), said("2"), user("3")], "completion": [said("4")]},
        "<u>1|<a>2|<u>3|<a>[4|]",
    ),
    "a list and a text": ({"prompt": [user("1")], "completion": "2"}, "<u>1|<a>[2|]"),
    "a completion with a tool": (
        {"prompt": [user("1")], "completion": [said("2"), {"role": "tool", "content": "3"}]},
        "<u>1|<a>[2|]<t>3|",
    ),
    "Alpaca": ({"instruction": "add", "input": "1 1", "output": "2"}, "<u>add\n\n1 1|<a>[2|]"),
    "Alpaca alone": ({"instruction": "add", "input": "", "output": "2"}, "<u>add|<a>[2|]"),
    "nulls of a table": (
        {"messages": [{**user("1"), "tool_calls": None}, said("2")], "prompt": None},
        "<u>1|<a>[2|]",
    ),
    "a call": (
        {"messages": [user("1"), {"role": "assistant", "content": None, "tool_calls": [{}]}],
         "tools": TOOLS},
        "(add)<u>1|<a>[!|]",
    ),
    "tools as JSON": (
        {"messages": [user("1"), said("2")], "tools": json.dumps(TOOLS)},
        "(add)<u>1|<a>[2|]",
    ),
    "variables": (
        {"prompt": [user("1")], "completion": "2", "chat_template_kwargs": {"start": "^"}},
        "^<u>1|<a>[2|]",
    ),
    "parts": (
        {"messages": [user([{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]),
                      said("3")]},
        "<u>12|<a>[3|]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_all_record_forms_are_converted(name):
    record, expected = FORMS[name]
    assert of_record(record) == expected


BAD = {
    "no form": ({"text": "x"}, r"expected messages, .* \(it has: text\)"),
    "no completion": ({"prompt": "x", "completion": None}, r"expected messages"),
    "nothing said": ({"messages": [user("x")]}, "nothing to learn"),
    "an empty completion": ({"prompt": "x", "completion": ""}, "nothing to learn"),
    "no list": ({"messages": "x"}, "expected a list of messages, not 'x'"),
    "no role": ({"messages": [{"content": "x"}]}, 'expected messages with "role"'),
    "no content": ({"messages": [{"role": "user"}, said("x")]}, 'expected messages with "role"'),
    "an image": ({"messages": [user([{"type": "image"}]), said("x")]}, "parts of text only"),
    "a weight": ({"messages": [user("x"), {**said("y"), "weight": 0}]}, "not supported"),
    "a mark": ({"messages": [user("\ufdd0"), said("x")]}, r"U\+FDD0"),
    "an odd request": ({"instruction": 5, "output": "x"}, "expected a text as content, not 5"),
    "odd variables": ({"prompt": [user("x")], "completion": "y", "chat_template_kwargs": "z"},
                      "expected an object as chat_template_kwargs"),
    "broken tools": ({"messages": [user("x"), said("y")], "tools": "{"}, "Expecting"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_non_conversations_are_reported(name):
    record, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        of_record(record)


def test_conversations_need_template_plain_completions_do_not():
    chats = Conversations(ByteTokenizer())
    with pytest.raises(UserError, match=r"no chat template .* chat_template\.jinja"):
        chats.document({"messages": [user("x"), said("y")]})
    text = chats.document({"prompt": "ü🙂", "completion": "ö🙂"})
    entries = encode_conversations(ByteTokenizer(), [("train", text, True)], "uint32")["train"]
    ids = [*"ü🙂ö🙂".encode(), 256]
    assert entries.tolist() == [
        i | (UNLEARNED if at < 6 else 0) | (0 if at else FIRST) for at, i in enumerate(ids)
    ]


def test_packing_assigns_each_conversation_once():
    rng = np.random.default_rng(0)
    for width in (1, 7, 100):
        lengths = np.minimum(rng.geometric(min(1, 4 / width), 300), width).astype(np.uint32)
        members, ends = best_fit(lengths, width)
        windows = np.split(members, ends[:-1])
        assert sorted(members.tolist()) == list(range(300))
        assert all(0 < lengths[window].sum() <= width for window in windows)
        assert all((np.diff(window) > 0).all() for window in windows)
        firsts = [window[0] for window in windows]
        assert firsts == sorted(firsts)
        # Best fit decreasing: at most 11/9 of the best and one more; the best has at least this.
        assert len(windows) <= 11 / 9 * -(-int(lengths.sum()) // width) + 1


def test_packing_is_best_fit():
    members, ends = best_fit(np.array([2, 6, 5, 3, 4]), 10)
    assert (members.tolist(), ends.tolist()) == ([0, 2, 3, 1, 4], [3, 5])


def test_overlong_conversations_are_cut_or_dropped_and_counted():
    lengths = np.array([3, 11, 2, 30])
    cut, dropped = (Packed(lengths, 10, how) for how in ("truncate", "drop"))
    assert [cut[i] for i in range(len(cut))] == [[0, 2], [1], [3]]
    assert cut.lengths.tolist() == [3, 10, 2, 10]
    assert [dropped[i] for i in range(len(dropped))] == [[0, 2]]
    assert (cut.overlong, dropped.overlong, cut.fill) == (2, 2, 25 / 30)
    assert "2 of 4 conversations are longer than the 10 tokens of a sequence and cut" in cut.summary
    assert "left out" in dropped.summary
    assert len(Packed(lengths, 1, "drop")) == 0


def test_windows_match_definition():
    rng = np.random.default_rng(1)
    for _ in range(30):
        parts = [rng.integers(0, 50, rng.integers(1, 9)) for _ in range(4)]
        masks = [rng.random(len(part)) < 0.5 for part in parts]
        chats = [np.where(m, p, p | UNLEARNED) for p, m in zip(parts, masks, strict=True)]
        for chat in chats:
            chat[0] |= FIRST
        width = sum(map(len, chats)) + int(rng.integers(0, 3))
        batch = split_entries(np.stack([fill_window(chats, width)] * 2))
        assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
        owner = [(n, i) for n, part in enumerate(parts) for i in range(len(part))]
        for at in range(width - 1):
            number, i = owner[at] if at < len(owner) else (4, 0)
            assert batch["segment_ids"][1, at] == number
            assert batch["input_ids"][1, at] == (parts[number][i] if number < 4 else 0)
            has_next = number < 4 and i + 1 < len(parts[number]) and masks[number][i + 1]
            assert batch["labels"][1, at] == (parts[number][i + 1] if has_next else IGNORE)
    assert ID & (FIRST | UNLEARNED) == 0
