"""Pages, links and command lines of the documentation lead somewhere."""

import ast
import re
import runpy
import tomllib
from functools import cache
from urllib.parse import unquote

import pytest

from jaxforge.config import JobConfig
from jaxforge.config.reading.kempnerforge import NO_EFFECT, STORED_AS
from jaxforge.config.reading.schema import all_keys
from tests.documentation import FENCE, PAGES, ROOT, commands, parser_of, words_of
from tests.helpers import each

LINK = re.compile(r"\]\(([^)\s]+)\)")
OVERRIDE = re.compile(r"--(?P<key>[a-z_]+(\.[A-Za-z0-9_]+)+)(=.*)?$")
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {line.partition(":")[0] for line in MAKEFILE.splitlines()}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def anchor(heading):
    """Return the anchor that GitHub and the site make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@each(PAGES)
def test_links_lead_to_files_and_headings(page):
    prose = FENCE.sub("", page.read_text())
    for link in LINK.findall(prose):
        if ":" in link:  # another site
            continue
        path, _, name = unquote(link).partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if name else []
        assert not name or name in map(anchor, headings), link


@each(PAGES)
def test_nothing_is_left_of_a_merge(page):
    assert not re.search(r"^(<{7}|={7}|>{7})( |$)", page.read_text(), re.M)


def test_every_page_is_in_the_menu_of_the_site():
    tree = ast.parse((ROOT / "docs" / "conf.py").read_text())
    [chapters] = (
        node.value for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHAPTERS"
    )  # fmt: skip
    listed = [page for pages in ast.literal_eval(chapters).values() for page in pages]
    assert sorted(listed) == sorted(page.stem for page in (ROOT / "docs").glob("*.md"))


def test_config_reference_is_generated_from_the_schema():
    script = ROOT / "docs" / "config_reference.py"
    page = runpy.run_path(str(script))["reference"]()
    assert page == script.with_suffix(".md").read_text(), "run `python docs/config_reference.py`"


def test_index_links_to_every_page():
    links = set(LINK.findall((ROOT / "docs" / "index.md").read_text()))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= {link.partition("#")[0] for link in links}


def test_makefile_names_existing_tests_and_benchmarks():
    named = re.findall(r"(?:tests|benchmarks)/[\w/]+(?:\.py)?", MAKEFILE)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "docs/getting_started.md"])
def test_environment_is_activated_before_the_first_command(name):
    fences = "".join(text for language, text in FENCE.findall((ROOT / name).read_text()))
    before, _ = re.split(r"^jaxforge ", fences, maxsplit=1, flags=re.M)
    assert "\nsource .venv/bin/activate" in before


@each([command.values[0] for command in commands()])
def test_command_line_is_one_that_its_command_takes(line):
    match words_of(line):
        case ["make", *targets]:
            assert set(targets) <= TARGETS
        case ["pip", "install", *what]:
            assert all(extra in EXTRAS for item in what for extra in extras_of(item))
        case ["jaxforge", command, *arguments]:
            takes(command, arguments)
        case ["python", script, *arguments]:
            assert (ROOT / script).is_file()
            source = with_imported(ROOT / script)
            assert all(f'"{option}"' in source for option in arguments if option.startswith("--"))


def with_imported(script):
    """Return the source of a script and of the scripts next to it that it imports."""
    text = script.read_text()
    beside = (
        script.with_name(f"{name}.py") for name in re.findall(r"^from (\w+) import", text, re.M)
    )
    return text + "".join(path.read_text() for path in beside if path.is_file())


SPAN = re.compile(r"`([^`\n]+)`")
FOLDERS = [
    ROOT / name
    for name in ("jaxforge", "torch_compat", "tests", "benchmarks", "examples", "docs", ".ci")
]
SUFFIXES = ("bin", "jsonl", "npy", "pt", "safetensors", "toml")


@each(PAGES)
def test_names_in_page_exist_in_the_code(page):
    spans = SPAN.findall(FENCE.sub("", page.read_text())) if page.stem != "CHANGELOG" else []
    assert [span for span in dict.fromkeys(spans) if not exists(span)] == []


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("Progress.sync_from_device", True),
        ("Progress.follow", False),
        ("AutoModel.from_pretrained", True),  # of another project
        ("training/loop.py", True),
        ("training/loops.py", False),
        ("model/linear.py: declare", True),
        ("model/linear.py: undeclared", False),
        ("optimizer.lr = 1e-3", True),
        ("optimizer.learning_rate", False),
        ("metrics.jsonl", True),
    ],
)
def test_names_of_code_are_recognised(span, expected):
    assert exists(span) is expected


def exists(span):
    """Return whether a file, an attribute of a class of this project, or a key exists."""
    if match := re.fullmatch(r"(?P<path>[a-z_/.0-9]+\.py)(: (?P<names>[\w, .]+))?", span):
        texts = [text for path, text in sources().items() if path.endswith(f"/{match['path']}")]
        names = re.findall(r"\w+", match["names"] or "")
        return any(all(name in text for name in names) for text in texts)
    if match := re.fullmatch(r"(?P<owner>[A-Z]\w+)\.(?P<name>[a-z]\w*)(\(.*\))?", span):
        owned = attributes(match["owner"])
        return not owned or match["name"] in owned
    match = re.fullmatch(r"(?P<section>[a-z_]+)\.(?P<name>[a-z]\w*)( = .*)?", span)
    if match and match["section"] in JobConfig.model_fields and match["name"] not in SUFFIXES:
        section, name = match["section"], match["name"]
        if (section, name) in {**STORED_AS, **NO_EFFECT}:
            return True
        module = ROOT / "jaxforge" / section / name
        is_code = module.is_dir() or module.with_suffix(".py").is_file()
        return (
            f"{section}.{name}" in all_keys() or is_code or name in attributes(section.capitalize())
        )
    return True


@cache
def sources():
    return {str(path): path.read_text() for folder in FOLDERS for path in folder.rglob("*.py")}


@cache
def attributes(owner):
    """Return the attributes of the classes of a name, and of their bases in the project."""
    names = set()
    for path, text in sources().items():
        if "/tests/" in path or not re.search(rf"^class {owner}\b", text, re.M):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == owner:
                for part in ast.walk(node):
                    names |= {getattr(part, key, None) for key in ("name", "attr", "id")}
                for base in node.bases:
                    names |= attributes(base.id) if isinstance(base, ast.Name) else set()
    return names


def extras_of(requirement):
    match = re.search(r"\[(.*)\]", requirement)
    return match[1].split(",") if match else []


def takes(command, arguments):
    if command == "supervise":
        program, command, *arguments = arguments[arguments.index("--") + 1 :]
        assert program == "jaxforge"
    _, remaining = parser_of(command).parse(arguments)
    for word in remaining:
        match = OVERRIDE.match(word)
        assert match, word
        assert match["key"] in all_keys(), word
