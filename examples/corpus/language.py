"""Keep documents in English: `--map FILE:keep_english`.

    pip install py3langid
    jaxforge prepare texts/ --output data --map examples/corpus/language.py:keep_english

py3langid (4.6 MB, no network) is a naive Bayes classifier over byte n-grams. It takes about half a
millisecond for the 2,000 characters that it sees here. It is reliable for texts of some sentences
in one language. It errs for short texts, code, lists of names, mixed languages, and related
languages (Norwegian and Danish, English and Nigerian Pidgin). A stricter THRESHOLD drops more of
these. Measure it on a sample of your own data first.
"""

from typing import Any

from py3langid.langid import MODEL_FILE, LanguageIdentifier

TEXT = "text"
"""Field of the text."""

LANGUAGE = "en"
"""ISO 639 code of the language to keep."""

THRESHOLD = 0.5
"""Smallest probability of the language."""

CHARACTERS = 2000
"""Characters from the beginning of the text that are classified."""

_IDENTIFIER = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def keep_english(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record if its text is in the language, else None."""
    language, probability = _IDENTIFIER.classify(record[TEXT][:CHARACTERS])
    return record if language == LANGUAGE and probability >= THRESHOLD else None
