"""Check the English of docstrings, names and pages: `python .ci/english.py [FILE_OR_FOLDER ...]`.

Prints `file:line: message` for each offence and exits with 1 if there is any. The rules:

- A docstring opens with a statement and not with a question word or a pronoun without its noun.
- A docstring or comment contains no phrase of `PHRASES`.
- No function, argument, variable, attribute or class has a name of `NAMES`: they say nothing.
- A test is named `test_<subject>_<expected behaviour>` and opens with no word of `TEST_OPENERS`.
- A page (`*.md`) contains no phrase of `PAGE_PHRASES` outside of code and generated tables.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("jaxforge", "torch_compat", "benchmarks", "examples", "tests", ".ci", "docs")
OPENERS = re.compile(r"(What|Whether|Of|That|Those|These|How|Where|Which|The same|It|They|As)\b")
PHRASES = re.compile(
    r"\b(besides?|likewise|so many|of which|at hand|in turn|is not there|are not there)\b", re.I
)
PAGE_PHRASES = re.compile(
    r"\b(besides?|likewise|so many|at hand|in turn|anew|for want of|at any rate|leave it out"
    r"|(is|are) not there|what is there|that is said|(is|are) told|tells? (which|what|how|whether)"
    r"|go(es|ing)? on)\b",
    re.I,
)
GENERATED = re.compile(
    r"^```.*?^```$"  # code
    r"|^<!-- figures: .*?^<!-- end of figures -->$"  # results of benchmarks
    r"|^\| [gt]pu \|.*?$",  # parallel/xla_flags.py
    re.M | re.S,
)
GENERATED_PAGES = {"config_reference.md"}
NAMES = {
    *(
        "found",
        "kept",
        "made",
        "one",
        "piece",
        "place",
        "rest",
        "side",
        "thing",
        "told",
        "way",
        "work",
    ),
    *("founds", "ones", "pieces", "places", "sides", "things", "ways", "works"),
}
TEST_OPENERS = {
    *("a", "an", "the", "what", "whatever", "whether", "how", "of", "that", "those", "it", "they")
}

Offence = tuple[int, str]


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every name that the file itself introduces."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring of modules, classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every comment."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def offences(path: Path) -> Iterator[Offence]:
    """Yield the line and message of every offence in a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    described = list(docstrings(tree))
    for line, text in described:
        if opener := OPENERS.match(text):
            yield line, f"docstring opens with {opener[0]!r}: state what it does or is"
    for line, text in [*described, *comments(path)]:
        if phrase := PHRASES.search(text):
            yield line, f"{phrase[0]!r} in a description: name the noun and use a plain word"
    for line, name in names(tree):
        if name.strip("_").lower() in NAMES:
            yield line, f"the name {name!r} says nothing: name the content"
        if name.startswith("test_") and name.split("_")[1] in TEST_OPENERS:
            yield line, f"{name!r}: name a test test_<subject>_<expected behaviour>"


def page_offences(path: Path) -> Iterator[Offence]:
    """Yield the line and message of every offence in a page."""
    text = path.read_text(encoding="utf-8")
    prose = GENERATED.sub(lambda block: "\n" * block[0].count("\n"), text)
    for number, line in enumerate(prose.splitlines(), start=1):
        for phrase in PAGE_PHRASES.finditer(line):
            yield number, f"{phrase[0]!r} in a page: name the noun and use a plain word"


def files_in(root: Path) -> Iterator[Path]:
    """Yield the Python files and pages of a folder, or the file itself."""
    if root.is_file():
        yield root
    else:
        pages = (page for page in root.rglob("*.md") if page.name not in GENERATED_PAGES)
        yield from sorted([*root.rglob("*.py"), *pages])


def main(arguments: list[str]) -> int:
    """Check the given files and folders, or the whole project; return the exit status."""
    roots = [Path(argument) for argument in arguments or FOLDERS]
    if missing := [str(root) for root in roots if not root.exists()]:
        raise SystemExit(f"{', '.join(missing)}: does not exist. Name a file or folder.")
    files = [file for root in roots for file in files_in(root)]
    bad = [
        f"{file}:{line}: {message}"
        for file in files
        for line, message in sorted(
            set(page_offences(file) if file.suffix == ".md" else offences(file))
        )
    ]
    print("\n".join(bad) if bad else f"{len(files)} files: no offence against plain English")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
