"""Statistics of a split: lengths of documents, their sources, and the outcomes of maps.

`Statistics` is counted while a unit is written, and parts are added up. `summary` returns what the
manifest holds of the result.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from jaxforge.data.corpus.documents import TextPart

LONGEST_LIST = 20
"""Sources that a manifest names."""

_MOST_SOURCES = 1000  # counted by name; the documents of further sources are counted together
_UNNAMED = ""  # name of these
_BINS = 63


@dataclass(frozen=True)
class SourceCounts:
    """Counts of a source.

    Attributes:
        name: name of the source; "" for all sources that are not named.
        documents: its documents.
        tokens: its tokens, those that begin and end documents included.
        bytes: its bytes of text.
    """

    name: str
    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class RuleCounts:
    """Counts of a map; a record that an earlier map dropped is not counted.

    Attributes:
        rule: name of the map.
        unchanged: records that it returned as they were.
        changed: records that it changed.
        dropped: records that it dropped.
    """

    rule: str
    unchanged: int
    changed: int
    dropped: int


@dataclass(frozen=True)
class CorpusStatistics:
    """Statistics in a manifest.

    Attributes:
        bytes: bytes of text.
        documents_by_length: [i], documents of 2^i to 2^(i+1) - 1 tokens.
        tokens_by_length: [i], tokens of these documents.
        sources: sources with the most tokens, in this order, then all others together.
        rules: counts of the maps, in their order.
    """

    bytes: int
    documents_by_length: tuple[int, ...]
    tokens_by_length: tuple[int, ...]
    sources: tuple[SourceCounts, ...] = ()
    rules: tuple[RuleCounts, ...] = ()


@dataclass
class Statistics:
    """Counts of a split while it is written.

    Attributes:
        documents_by_length: see `CorpusStatistics`; all bins.
        tokens_by_length: see `CorpusStatistics`; all bins.
        sources: documents, tokens and bytes by source.
        outcomes: by index of the map, its outcomes (`content.UNCHANGED`, ...).
        open_tokens: tokens of the document that is not complete yet.
    """

    documents_by_length: list[int] = field(default_factory=lambda: [0] * _BINS)
    tokens_by_length: list[int] = field(default_factory=lambda: [0] * _BINS)
    sources: dict[str, list[int]] = field(default_factory=dict)
    outcomes: list[list[int]] = field(default_factory=list)
    open_tokens: int = 0

    def add(self, parts: Sequence[TextPart], lengths: Int[np.ndarray, "parts"]) -> None:
        """Count parts of documents with their numbers of tokens."""
        for part, length in zip(parts, lengths.tolist(), strict=True):
            self.add_text(part.source, length, part.size, is_end=part.last)

    def add_text(self, source: str, tokens: int, size: int, *, is_end: bool) -> None:
        """Count a part of a document.

        Args:
            source: name of the document's source.
            tokens: tokens of the part.
            size: bytes of the part.
            is_end: True if the document ends with the part.
        """
        counts = self.sources.get(source)
        if counts is None:
            # JSON in UTF-8 cannot hold the lone surrogates of a path.
            name = source.encode("utf-8", "backslashreplace").decode()
            is_named = name in self.sources or len(self.sources) < _MOST_SOURCES
            counts = self.sources.setdefault(name if is_named else _UNNAMED, [0, 0, 0])
        counts[1] += tokens
        counts[2] += size
        self.open_tokens += tokens
        if is_end:
            counts[0] += 1
            # floor(log2(tokens)); a document without tokens counts in bin 0.
            bin_ = max(0, self.open_tokens.bit_length() - 1)
            self.documents_by_length[bin_] += 1
            self.tokens_by_length[bin_] += self.open_tokens
            self.open_tokens = 0

    def add_outcomes(self, parts: Iterable[TextPart]) -> None:
        """Count the outcomes of maps for records that end in these parts."""
        for part in parts:
            for i, outcome in enumerate(part.outcomes):
                if i == len(self.outcomes):
                    self.outcomes.append([0, 0, 0])
                self.outcomes[i][outcome] += 1

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(counts[2] for counts in self.sources.values())

    def merge(self, other: "Statistics") -> None:
        """Add the counts of another part of the split."""
        for totals, added in ((self.documents_by_length, other.documents_by_length),
                             (self.tokens_by_length, other.tokens_by_length)):  # fmt: skip
            totals[:] = map(sum, zip(totals, added, strict=True))
        for name, counts in other.sources.items():
            # Each unit names up to a thousand sources, and all together may have many more.
            known = name in self.sources or len(self.sources) < _MOST_SOURCES
            totals = self.sources.setdefault(name if known else _UNNAMED, [0, 0, 0])
            totals[:] = map(sum, zip(totals, counts, strict=True))
        # Where no record passed the first maps, later maps have no counts yet.
        self.outcomes += [[0, 0, 0] for _ in other.outcomes[len(self.outcomes) :]]
        for totals, added in zip(self.outcomes, other.outcomes, strict=False):
            totals[:] = map(sum, zip(totals, added, strict=True))

    def summary(self, rules: Sequence[str]) -> CorpusStatistics:
        """Return the statistics for the manifest.

        Args:
            rules: names of the maps, in order.
        """
        bins = 1 + max((i for i, n in enumerate(self.documents_by_length) if n), default=-1)
        named = [(name, counts) for name, counts in self.sources.items() if name != _UNNAMED]
        # Ties are in the order of names, and not in that of the units.
        named.sort(key=lambda item: (-item[1][1], item[0]))
        unnamed = [counts for _, counts in named[LONGEST_LIST:]]
        unnamed += [self.sources[_UNNAMED]] if _UNNAMED in self.sources else []
        rows = [SourceCounts(name, *counts) for name, counts in named[:LONGEST_LIST]]
        if unnamed:
            rows.append(SourceCounts(_UNNAMED, *map(sum, zip(*unnamed, strict=True))))
        # Maps that no record has reached have no counts.
        counted = [*self.outcomes, *([[0, 0, 0]] * (len(rules) - len(self.outcomes)))]
        return CorpusStatistics(
            bytes=self.size,
            documents_by_length=tuple(self.documents_by_length[:bins]),
            tokens_by_length=tuple(self.tokens_by_length[:bins]),
            sources=tuple(rows),
            rules=tuple(RuleCounts(rule, *n) for rule, n in zip(rules, counted, strict=True)),
        )


def merged(parts: Iterable[Statistics]) -> Statistics:
    """Return the statistics of all parts of a split together."""
    result = Statistics()
    for part in parts:
        result.merge(part)
    return result


def total(statistics: Iterable[CorpusStatistics]) -> tuple[RuleCounts, ...]:
    """Return the counts of the maps over several splits."""
    rows = zip(*(each.rules for each in statistics), strict=True)
    return tuple(
        RuleCounts(
            counts[0].rule,
            sum(each.unchanged for each in counts),
            sum(each.changed for each in counts),
            sum(each.dropped for each in counts),
        )
        for counts in rows
    )
