"""The import graph of packages and tests, and the tests that a change reaches."""

import ast
import functools
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxforge", "torch_compat")
EVERYWHERE = {"tests/conftest.py", "pyproject.toml", "constraints.txt"}
"""Files that every test depends on."""
_MODULE = re.compile(r"(?:jaxforge|torch_compat|tests|benchmarks)(?:\.\w+)+")


@functools.cache
def imports_of(path, *, at_once=False):
    """Return the imports of a module; `at_once` means those at its own import."""
    tree, imports = ast.parse(path.read_text()), []
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports.append(node.module)
            imports += (f"{node.module}.{alias.name}" for alias in node.names)
    return imports


def modules(package):
    return sorted((ROOT / package).rglob("*.py"))


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def import_graph(packages=PACKAGES):
    """Return the modules of the packages that each of them imports, anywhere in its code."""
    paths = {dotted(path): path for package in packages for path in modules(package)}
    graph = {}
    for name, path in paths.items():
        imported = set(imports_of(path)) & paths.keys()
        parents = {other.rpartition(".")[0] for other in imported}  # `from package import module`
        graph[name] = imported - parents - {name, *packages}
    return graph


@functools.cache
def _graph():
    """Return the graph with tests, and with modules that are imported by their name.

    These are the commands and the public names; and a test may patch a module by its name.
    """
    packages = (*PACKAGES, "tests", "benchmarks")
    paths = {dotted(path): path for package in packages for path in modules(package)}
    graph = import_graph(packages)

    def named(path):
        return paths.keys() & set(_MODULE.findall(path.read_text()))

    public = named(ROOT / "jaxforge" / "__init__.py")
    commands = named(ROOT / "jaxforge" / "commands" / "__init__.py")
    for name, path in paths.items():
        if name.startswith("tests.") and name != __name__:
            graph[name] |= named(path)
            imported = set(imports_of(path))
            graph[name] |= public if "jaxforge" in imported else set()
            graph[name] |= commands if "tests.helpers.cli" in imported else set()
    for package, path in paths.items():
        if "iter_modules(__path__)" in path.read_text():  # importing a member imports all members
            members = {name for name in paths if name.startswith(f"{package}.")}
            graph[package] |= members
            for imported in graph.values():
                imported |= {package} if imported & members else set()
    graph["jaxforge.commands.dispatch"] |= commands
    return graph


@functools.cache
def _starting_processes():
    return {dotted(path) for path in modules("tests") if re.search('"-[m]"', path.read_text())}


def reached(name):
    """Return a module and all modules that it imports, in any number of steps.

    A file that starts processes reaches every command.
    """
    graph, seen, pending = _graph(), set(), [name]
    while pending:
        module = pending.pop()
        if module in seen or module not in graph:
            continue
        seen.add(module)
        pending += graph[module]
        if module in _starting_processes():
            pending.append("jaxforge.__main__")
    return seen


def changed_files(base):
    """Return the files that differ from a commit, including new ones."""
    diff = ["git", "diff", "--name-only", base]
    new = ["git", "ls-files", "--others", "--exclude-standard"]
    outputs = (subprocess.check_output(command, cwd=ROOT, text=True) for command in (diff, new))
    return {line for output in outputs for line in output.splitlines()}


def is_reached(test, changed):
    """Return whether a change of files may change the result of a test file.

    Args:
        test: path of the test file.
        changed: result of `changed_files`. A file that is not Python reaches the tests that name
            it or its directory.
    """
    if changed & EVERYWHERE:
        return True
    names = {dotted(ROOT / file) for file in changed if file.endswith(".py")}
    if names & reached(dotted(test)):
        return True
    text, others = test.read_text(), [Path(file) for file in changed if not file.endswith(".py")]
    return any(file.name in text or f'"{file.parts[0]}"' in text for file in others)
