"""Names of corpus layouts for `prepare --layout`: files to read, and the field of the source."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxforge.data.corpus.text_files import PACKINGS, TARS
from jaxforge.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Layout of a corpus, with its text in the field "text".

    Attributes:
        globs: names of its files.
        exclude: paths of files without text.
        source_field: field that names the source of a record, or "".
        alternatives: top-level directories with the same documents, the largest first.
    """

    globs: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    source_field: str = ""
    alternatives: tuple[str, ...] = ()

    def check(self, names: Iterable[str]) -> None:
        """Check that no record would be read twice.

        Args:
            names: names of the files.

        Raises:
            UserError: files are in several of the `alternatives`.
        """
        present = {name.partition("/")[0] for name in names if "/" in name}
        both = [name for name in self.alternatives if name in present]
        if len(both) > 1:
            raise UserError(
                f"{both[0]}/ contains the documents of {both[1]}/: give one of these directories, "
                f"or --exclude '{both[1]}/*'"
            )


LAYOUTS = {
    "dolma": Layout(
        tuple(f"*{kind}{end}" for kind in (".json", ".jsonl") for end in PACKINGS),
        exclude=("attributes/*", "*/attributes/*"),
        source_field="source",
    ),
    "fineweb": Layout(("*.parquet",), alternatives=("data", "sample")),
    "webdataset": Layout(TARS),
}
"""Layouts by name."""
