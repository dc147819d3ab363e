"""Chat templates against transformers' `apply_chat_template`: ids, and what the assistant says."""

import json
import sys

import numpy as np
import pytest
import transformers

from jaxforge.data.corpus.chat import ChatTemplate
from jaxforge.data.corpus.conversations import Conversations, encode_conversations
from jaxforge.data.corpus.manifest import FIRST, ID, UNLEARNED
from jaxforge.data.corpus.records import TableRow
from jaxforge.data.corpus.tokenizer import HFTokenizer
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.errors import UserError
from tests.data.corpus.chat_files import (
    CHATML,
    EVERYTHING,
    INSTRUCTIONS,
    LAST_THINKS,
    TOOLS,
    UNMARKED,
    bpe_file,
    save_tokenizer,
)

CHAT = [
    {"role": "user", "content": " who are <you>?"},
    {"role": "assistant", "content": "I am\n a bot. 🙂 "},
    {"role": "user", "content": "what is 2 + 2?\n"},
    {"role": "assistant", "content": "\nfour <|im_end|> 4"},
]


def entries_of(tokenizer, record):
    document = Conversations(tokenizer).document(record)
    return encode_conversations(tokenizer, [("train", document, True)], "uint32")["train"]


def learned(entries):
    return (entries <= ID).astype(int).tolist()


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("template", [CHATML, UNMARKED, INSTRUCTIONS])
@pytest.mark.parametrize("n", [2, 4])
def test_ids_are_those_of_transformers(tmp_path, template, n, as_file):
    theirs = save_tokenizer(tmp_path, template, save_jinja_files=as_file)
    assert (tmp_path / "chat_template.jinja").exists() == as_file
    tools = TOOLS if "tools" in template else None
    entries = entries_of(load_tokenizer(tmp_path), {"messages": CHAT[:n], "tools": tools})
    expected = theirs.apply_chat_template(CHAT[:n], tools=tools, return_dict=False)
    assert (entries & ID).tolist() == expected
    assert np.flatnonzero(entries & FIRST).tolist() == [0]


FUNCTION = {"name": "f", "arguments": {"a": 1, "b": None, "c": [None]}}
CALL = {"type": "function", "function": FUNCTION}
DEFAULTS = {"type": "object", "properties": {"a": {"default": None}, "b": {"const": None}}}
NULLS_AND_REASONS = {
    "arguments": [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
    "content": [{"role": "assistant", "content": None, "tool_calls": [CALL], "name": None}],
    "thinking": [{"role": "assistant", "content": "4", "thinking": "2 + 2"}],
    "reasoning": [{"role": "assistant", "content": "4", "reasoning": "2 + 2", "thinking": None}],
    "both": [{"role": "assistant", "content": "4", "reasoning_content": "a", "thinking": "b"}],
    "only reasons": [{"role": "assistant", "content": None, "reasoning": "2 + 2"}],
}


@pytest.mark.parametrize("name", NULLS_AND_REASONS)
def test_template_sees_messages_as_in_transformers(tmp_path, name):
    theirs = save_tokenizer(tmp_path, EVERYTHING)
    messages = [CHAT[0], *NULLS_AND_REASONS[name]]
    tools = [{"type": "function", "function": {"name": "f", "parameters": DEFAULTS}}]
    document = Conversations(load_tokenizer(tmp_path)).document(
        {"messages": messages, "tools": tools}
    )
    expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    assert json.loads(document)["text"] == expected


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("tools", [None, [], TOOLS])
def test_template_is_chosen_as_in_transformers(tmp_path, as_file, tools):
    templates = {"default": CHATML, "tool_use": CHATML.replace("<|im_start|>", "<s>"), "rag": "no"}
    theirs = save_tokenizer(tmp_path / "a", templates, save_jinja_files=as_file)
    assert (tmp_path / "a" / "additional_chat_templates").exists() == as_file
    load_tokenizer(tmp_path / "a").save(tmp_path / "b")
    expected = theirs.apply_chat_template(CHAT, tools=tools, return_dict=False)
    for name in ("a", "b"):
        entries = entries_of(load_tokenizer(tmp_path / name), {"messages": CHAT, "tools": tools})
        assert (entries & ID).tolist() == expected
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    assert saved.apply_chat_template(CHAT, tools=tools, return_dict=False) == expected


def test_nulls_of_tables_are_missing_keys():
    tokenizer = HFTokenizer(bpe_file(), None, {"chat_template": EVERYTHING})
    messages = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    text = json.loads(Conversations(tokenizer).document(TableRow(messages=messages)))["text"]
    assert '"arguments": {"a": 1, "c": [null]}' in text


def test_learned_tokens_equal_transformers_mask(tmp_path):
    theirs = save_tokenizer(tmp_path, CHATML)
    expected = theirs.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    entries = entries_of(load_tokenizer(tmp_path), {"messages": CHAT})
    assert learned(entries) == expected["assistant_masks"]
    ends = np.flatnonzero((entries & ID) == theirs.convert_tokens_to_ids("<|im_end|>"))
    assert [learned(entries)[end] for end in ends] == [0, 1, 0, 1, 1]  # one stands in the answer


@pytest.mark.parametrize("trim", [True, False])
def test_learned_spans_do_not_need_marks(tmp_path, trim):
    """Also where the tokenizer's own places leave spaces out, as those of GPT-2 and Llama do."""
    for name, template in (("marked", CHATML), ("plain", UNMARKED)):
        save_tokenizer(tmp_path / name, template, trim=trim)
    marked, plain = (load_tokenizer(tmp_path / name) for name in ("marked", "plain"))
    chats = [CHAT, CHAT[1:], CHAT[:2], [CHAT[0], CHAT[1], CHAT[1]]]
    for chat in chats:
        expected, entries = (entries_of(t, {"messages": chat}) for t in (marked, plain))
        np.testing.assert_array_equal(entries, expected)
        text = "".join(f"{m['content']}<|im_end|>\n" for m in chat if m["role"] == "assistant")
        ids = entries[entries <= ID].tolist()
        assert plain._tokenizer.decode(ids, skip_special_tokens=False) == text


def test_spaces_and_ends_of_turns_are_learned(tmp_path):
    save_tokenizer(tmp_path, INSTRUCTIONS, trim=True)
    tokenizer = load_tokenizer(tmp_path)
    chat = [CHAT[0], {"role": "assistant", "content": "4"}]
    entries = entries_of(tokenizer, {"messages": chat})
    said = tokenizer._tokenizer.decode(entries[entries <= ID].tolist(), skip_special_tokens=False)
    assert said == " 4<|im_end|>"


@pytest.mark.parametrize("trim", [True, False])
def test_last_space_is_learned_for_any_offsets(tmp_path, trim):
    said = "{% generation %}{{ messages[1].content ~ ' ' }}{% endgeneration %}"
    save_tokenizer(tmp_path, "<|im_start|>" + said + "<|im_end|>", trim=trim)
    tokenizer = load_tokenizer(tmp_path)
    entries = entries_of(tokenizer, {"messages": CHAT[:2]})
    assert tokenizer.decode(entries[entries <= ID].tolist()) == CHAT[1]["content"] + " "


def test_template_that_rewrites_history_is_refused(tmp_path):
    save_tokenizer(tmp_path, LAST_THINKS)
    chats = Conversations(load_tokenizer(tmp_path))
    assert json.loads(chats.document({"messages": CHAT[:2]}))["learned"]
    with pytest.raises(ValueError, match=r"message 2 in another way when more follows.*generation"):
        chats.document({"messages": CHAT})
    asked = chats.document({"prompt": CHAT[:3], "completion": CHAT[3:]})
    document = json.loads(asked)
    [(start, end)] = document["learned"]
    assert document["text"][start:end] == "<think></think>\nfour <|im_end|> 4<|im_end|>\n"


def test_only_completions_are_learned_with_marked_template(tmp_path):
    save_tokenizer(tmp_path, CHATML)
    chats = Conversations(load_tokenizer(tmp_path))
    document = json.loads(chats.document({"prompt": CHAT[:3], "completion": CHAT[3:]}))
    assert [document["text"][a:b] for a, b in document["learned"]] == [
        "\nfour <|im_end|> 4<|im_end|>\n"
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (INSTRUCTIONS, "cannot write it: no such role"),
        ("{{ messages[0].content + 1 }}", "cannot write it: can only concatenate str"),
        ("{{ nothing.at.all }}", "cannot write it: 'nothing' is undefined"),
        ("{{ messages.append(1) }}", "cannot write it: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "cannot write it: .*unsafe"),
        ("no one speaks", "nothing to learn"),
    ],
)
def test_record_refused_by_template_is_bad(template, message):
    tokenizer = HFTokenizer(bpe_file(), None, {"chat_template": template})
    record = {"messages": [{"role": "system", "content": "be brief"}, *CHAT]}
    with pytest.raises(ValueError, match=message):
        Conversations(tokenizer).document(record)


def test_invalid_template_raises():
    with pytest.raises(UserError, match=r"chat template, line 2: .*endfor"):
        ChatTemplate({"chat_template": "\n{% for m in messages %}"})


def test_long_refusal_of_template_is_shortened():
    template = ChatTemplate({"chat_template": "{{ raise_exception('a reason ' * 100000) }}"})
    with pytest.raises(ValueError, match=r"cannot write it: a reason .* characters left") as error:
        template.render(CHAT)
    assert len(str(error.value)) < 600


def test_template_needs_jinja(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"a chat template needs jinja2: pip install 'jaxf"):
        Conversations(HFTokenizer(bpe_file(), None, {"chat_template": CHATML}))


def test_template_date_is_fixed_unless_record_sets_it():
    day = "{{ date or strftime_now('%d %b %Y') }}"
    template = ChatTemplate({"chat_template": day + "{% generation %}x{% endgeneration %}"})
    assert template.render(CHAT) == ("26 Jul 2024x", [(11, 12)])
    assert template.render(CHAT, options={"date": "today"}) == ("todayx", [(5, 6)])


def test_template_is_kept_with_the_data(tmp_path):
    save_tokenizer(tmp_path / "a", CHATML)
    tokenizer = load_tokenizer(tmp_path / "a")
    tokenizer.save(tmp_path / "b")
    again = load_tokenizer(tmp_path / "b")
    assert (again.chat, again.eos_id) == (tokenizer.chat, tokenizer.eos_id)
    assert {"bos_token": "<s>", "chat_template": CHATML}.items() <= again.chat.items()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    assert theirs.chat_template == CHATML


def test_tokenizer_may_have_several_templates(tmp_path):
    save_tokenizer(tmp_path, CHATML, save_jinja_files=False)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": CHATML}]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": named})
    )
    assert load_tokenizer(tmp_path).chat["chat_template"] == CHATML
    assert UNLEARNED & entries_of(load_tokenizer(tmp_path), {"messages": CHAT})[0]
