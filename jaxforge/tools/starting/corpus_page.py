"""HTML page of prepared data (`corpus.html`), self-contained and without scripts."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from jaxforge.data.corpus.manifest import Manifest
from jaxforge.data.corpus.statistics import CorpusStatistics, RuleCounts, total
from jaxforge.errors import file_error
from jaxforge.telemetry.numbers import human
from jaxforge.tools.pages.parts import (
    details,
    document,
    fact_list,
    heading,
    table,
)
from jaxforge.tools.starting.prepared import PreparedData

FILE_NAME = "corpus.html"
_DOCUMENTS, _TOKENS = "0", "2"  # colours of the style


def write(data: PreparedData, directory: Path) -> None:
    """Write the page into a directory.

    Raises:
        UserError: the file cannot be written.
    """
    path = directory / FILE_NAME
    try:
        path.write_text(page(data), encoding="utf-8")
    except OSError as error:
        raise file_error(f"cannot write {path}", error) from error


def page(data: PreparedData) -> str:
    """Return the page of a prepared directory."""
    body = [fact_list(dict(_facts(data)))]
    splits = [data.train, *([data.validation] if data.validation else [])]
    if rules := total([split.statistics for split in splits if split.statistics]):
        body += [heading("Maps", "in their order, all splits"), _rules(rules)]
    body += _split(data.train)
    if data.validation:
        body.append(details("Held-out documents", "\n".join(_split(data.validation))))
    body.append(
        "<footer>A record that maps dropped is not counted by later maps. Tokens include those "
        "that begin and end documents.</footer>"
    )
    # No name of the directory: the page of the same data is the same everywhere.
    return document("Prepared corpus", "\n".join(body))


def _noun(manifest: Manifest) -> str:
    if manifest.preferences:
        return "answers"
    return "conversations" if manifest.conversations else "documents"


def _facts(data: PreparedData) -> Iterator[tuple[str, str]]:
    for name, manifest in (("", data.train), ("held out: ", data.validation)):
        if manifest is None:
            continue
        yield f"{name}tokens", f"{manifest.tokens:,}"
        yield f"{name}{_noun(manifest)}", f"{manifest.documents:,}"
        if manifest.documents:
            yield f"{name}tokens per document", f"{manifest.tokens / manifest.documents:,.1f}"
        if manifest.statistics and not manifest.conversations:
            size = manifest.statistics.bytes
            yield f"{name}bytes of text", f"{size:,}"
            yield f"{name}bytes per token", f"{size / max(1, manifest.tokens):.3f}"
    train = data.train
    yield "tokenizer", train.tokenizer
    yield "vocabulary", f"{train.vocab_size:,}"
    bos = ", ".join(map(str, train.bos_ids)) or "none"
    yield "end of text, BOS", f"{train.eos_id}, {bos}"
    yield "shards", f"{len(train.shards):,}, {train.dtype}"


def _rules(rules: Sequence[RuleCounts]) -> str:
    head = ("map", "records", "unchanged", "changed", "dropped", "dropped, share")
    return table("", head, map(_rule, rules), aligns=True)


def _rule(counts: RuleCounts) -> Sequence[str]:
    records = counts.unchanged + counts.changed + counts.dropped
    numbers = (records, counts.unchanged, counts.changed, counts.dropped)
    return (counts.rule, *(f"{n:,}" for n in numbers), f"{counts.dropped / max(1, records):.1%}")


def _split(manifest: Manifest) -> list[str]:
    """Return the histogram of lengths and the sources of a split as HTML."""
    statistics = manifest.statistics
    if statistics is None:
        return []
    noun = _noun(manifest)
    body = [heading("Lengths", f"{noun} by their number of tokens")]
    body.append(_bars("lengths", ("tokens", noun, "tokens"), _lengths(statistics)))
    body.append(heading("Sources", "with the most tokens"))
    body.append(_bars("sources", ("source", noun, "tokens"), _sources(statistics)))
    return body


_BarRow = tuple[str, int, int]  # name, documents, tokens


def _lengths(statistics: CorpusStatistics) -> list[_BarRow]:
    counts = (statistics.documents_by_length, statistics.tokens_by_length)
    rows = [
        (f"{2**i:,} to {2 ** (i + 1) - 1:,}" if i else "1", *both)
        for i, both in enumerate(zip(*counts, strict=True))
    ]
    first = next((i for i, row in enumerate(rows) if row[1]), 0)
    return rows[first:]


def _sources(statistics: CorpusStatistics) -> list[_BarRow]:
    return [(s.name or "all others", s.documents, s.tokens) for s in statistics.sources]


def _bars(name: str, head: tuple[str, str, str], rows: Sequence[_BarRow]) -> str:
    """Return a table with bars for documents and tokens, each relative to the largest."""
    documents = max((row[1] for row in rows), default=0)
    tokens = max((row[2] for row in rows), default=0)
    columns = "".join(
        f'<th scope="col">{escape(column)}</th>' if i == 0 else
        f'<th scope="col" colspan="2">{escape(column)}</th>'
        for i, column in enumerate(head)
    )  # fmt: skip
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        f"{_bar(n, documents, _DOCUMENTS)}{_bar(m, tokens, _TOKENS)}</tr>"
        for label, n, m in rows
    )
    return (
        f'<div class="scroll"><table class="bars {name}"><thead><tr>{columns}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _bar(count: int, largest: int, colour: str) -> str:
    width = 100 * count / max(1, largest)
    bar = f'<i style="width: {width:.2f}%; --c: var(--c{colour})"></i>' if count else ""
    return f'<td class="n" title="{count:,}">{human(count)}</td><td class="b">{bar}</td>'
