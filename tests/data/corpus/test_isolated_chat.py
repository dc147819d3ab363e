"""Chat templates of strangers: what they may take, and what is said of those that take more."""

import gc
import pickle
from pathlib import Path

import psutil
import pytest

from jaxforge.data.corpus.chat import ChatTemplate, IsolatedTemplate
from jaxforge.errors import UserError

CHAT = [{"role": "user", "content": "hi 🙂"}, {"role": "assistant", "content": "hello"}]
SAID = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
SAID += "{% if add_generation_prompt %}<assistant>{% endif %}"


def isolated(template):
    return IsolatedTemplate({"chat_template": template, "bos_token": "<s>"})


def test_isolated_template_matches_template():
    for template in (SAID, "{{ bos_token }}x{% generation %}\ud83d{% endgeneration %}"):
        plain = ChatTemplate({"chat_template": template, "bos_token": "<s>"})
        apart = isolated(template)
        for arguments in ((CHAT,), (CHAT, 1), (CHAT, 2, {"tools": [{"a": b"bytes"}]})):
            assert apart.render(*arguments) == plain.render(*arguments)
        assert pickle.loads(pickle.dumps(apart)).render(CHAT) == plain.render(CHAT)


NESTED = "{% for a in [1] %}" * 21 + "{% endfor %}" * 21

DO_NOT_COMPILE = ["{% break %}", NESTED, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"]
CANNOT_WRITE = {
    "{{ 'a' | truncate(-1) }}": "",
    "{{ 10 ** messages | length ** 14 }}": "",
    "{{ 'a' * 10 ** 10 }}{{ messages }}": "memory|MiB",
    "{{ '{:>1000000000}'.format(messages[0].content) }}": "memory|MiB",
    "{% set n = namespace(a='aaaaaaaa') %}"
    "{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}": "memory|MiB",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "recursion",
}


@pytest.mark.parametrize("template", DO_NOT_COMPILE)
def test_uncompilable_templates_raise(template):
    with pytest.raises(UserError, match="the tokenizer's chat template"):
        isolated(template)


@pytest.mark.parametrize("template", CANNOT_WRITE)
def test_template_failure_names_the_reason(template):
    apart = isolated(template + SAID)
    with pytest.raises(ValueError, match=f"it.*{CANNOT_WRITE[template]}") as caught:
        apart.render(CHAT)
    assert not isinstance(caught.value, UserError)
    assert psutil.Process(apart._child.pid).memory_info().rss < 300 << 20


def test_endless_loops_end():
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    apart = IsolatedTemplate({"chat_template": loop + SAID}, seconds=0.2)
    for _ in range(2):
        with pytest.raises(UserError, match=r"ran for more than 0\.2 seconds: correct it"):
            apart.render(CHAT)


def test_endless_compilation_ends():
    """Jinja computes constants, and no handler of a signal would run meanwhile."""
    with pytest.raises(UserError, match=r"ran for more than 0\.2 seconds: correct it"):
        IsolatedTemplate({"chat_template": "{{ 9 ** (9 ** 9) }}"}, seconds=0.2)


def test_template_child_ends_and_ignores_working_directory(tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    apart = isolated(SAID)
    child = psutil.Process(apart._child.pid)
    assert apart.render(CHAT)[0].startswith("<user>hi 🙂\n")
    assert not Path("ran").exists()
    del apart
    gc.collect()
    assert not psutil.pid_exists(child.pid) or child.status() == psutil.STATUS_ZOMBIE


def test_fork_starts_new_child():
    apart = isolated(SAID)
    child, apart._pid = apart._child, -1  # as in a fork, whose number is another
    assert apart.render(CHAT)[1]
    assert apart._child is not child
    assert child.poll() is None  # which is the parent's
