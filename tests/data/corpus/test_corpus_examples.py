"""Maps of examples/corpus, as users name them."""

import importlib.util
import json
from pathlib import Path

import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus.manifest import Manifest
from tests.data.corpus.test_maps import documents

EXAMPLES = Path(__file__).parents[3] / "examples" / "corpus"
NEEDS = {"keep_english": "py3langid"}


def run(texts, tmp_path, example, function):
    """Prepare texts, or records, with an example; return the documents and the counts."""
    if function in NEEDS:
        pytest.importorskip(NEEDS[function])
    path = tmp_path / "texts.jsonl"
    records = [text if isinstance(text, dict) else {"text": text} for text in texts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    example = str(EXAMPLES / f"{example}.py")
    output = tmp_path / "out"
    prepare.main([str(path), "--output", str(output), "--map", f"{example}:{function}"])
    (rule,) = Manifest.read(output / "train").statistics.rules
    return documents(output), (rule.unchanged, rule.changed, rule.dropped)


def test_language_filter_keeps_english(tmp_path):
    english = [
        "It was a bright cold day in April, and the clocks were striking thirteen.",
        "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea.",
    ]
    foreign = ["Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich.",
              "Longtemps, je me suis couché de bonne heure. Parfois, à peine ma bougie éteinte.",
              "吾輩は猫である。名前はまだ無い。"]  # fmt: skip
    texts = [english[0], *foreign, english[1]]
    assert run(texts, tmp_path, "language", "keep_english") == (english, (2, 0, 3))


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Write to ada.l+x@mail.example.co.uk, please.", "Write to email@example.com, please."),
        ("host 8.8.8.8:53 and 1.2.3.4.", "host 192.0.2.1:53 and 192.0.2.1."),
        ("2606:4700::1111 answered", "2001:db8::1 answered"),
        ("call +44 20 7946 0958 or (212) 555-1234", "call +1-202-555-0100 or +1-202-555-0100"),
        ("tel. 212-555-1234.", "tel. +1-202-555-0100."),
        ("private 10.0.0.1, 127.0.0.1, ::1, fe80::1", None),
        ("version 1.2.3, at 10:30:45, a::b, 2024-05-17, 3.14159, 1,234,567, user@host", None),
        ("0123456789 4111 1111 1111 1111", None),
    ],
)
def test_mask_replaces_personal_data_only(text, masked):
    path = EXAMPLES / "mask_personal_data.py"
    spec = importlib.util.spec_from_file_location("mask_personal_data", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    record = {"text": text, "id": 7}
    assert module.mask(record) == {"text": masked or text, "id": 7}
    assert record["text"] == text
    assert module.mask(module.mask(record)) == module.mask(record)


def test_mask_is_counted(tmp_path):
    result = run(["no data", "ada@example.org"], tmp_path, "mask_personal_data", "mask")
    assert result == (["no data", "email@example.com"], (1, 1, 0))
