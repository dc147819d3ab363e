"""The names of `import jaxforge`, and the page that describes them."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxforge as jf
from tests.processes.conftest import environment

ROOT = Path(__file__).parents[1]


def test_library_page_lists_the_public_names():
    page = (ROOT / "docs" / "library.md").read_text()
    listed = re.findall(r"^\| `jf\.(\w+)", page, re.MULTILINE)
    assert sorted(listed) == sorted(jf.__all__)


def test_every_public_name_can_be_imported():
    assert all(callable(getattr(jf, name)) for name in jf.__all__)
    assert set(dir(jf)) == {*jf.__all__, "__version__"}


SIDE_EFFECTS = """
import os, signal, sys, types
before = list(sys.path), [signal.getsignal(s) for s in signal.valid_signals()], dict(os.environ)
loaded = set(sys.modules)
import jaxforge
after = list(sys.path), [signal.getsignal(s) for s in signal.valid_signals()], dict(os.environ)
assert after == before
assert set(sys.modules) - loaded == {"jaxforge"}
assert type(jaxforge) is types.ModuleType
assert jaxforge.__path__ == [os.path.dirname(jaxforge.__file__)]
"""


@pytest.mark.parametrize("program", ["-m", "jaxforge"])
def test_import_has_no_side_effects(program, tmp_path):
    """Not even in a command, whose words `sys.argv` has."""
    code = f"import sys; sys.argv = [{program!r}, 'train']; sys.path[:0] = ['']" + SIDE_EFFECTS
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, env=environment(PYTHONPATH=ROOT)
    )


def test_import_loads_no_library():
    code = "import sys, jaxforge; assert not {'jax', 'numpy', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_textbook_loop_needs_three_imports_at_most():
    source = (ROOT / "examples" / "textbook.py").read_text()
    imports = re.findall(r"^(?:import|from) jaxforge", source, re.MULTILINE)
    assert len(imports) <= 3


def test_type_hints_are_shipped():
    assert (ROOT / "jaxforge" / "py.typed").is_file()
    assert (ROOT / "torch_compat" / "py.typed").is_file()


def test_version_is_the_installed_one():
    assert jf.__version__ == importlib.metadata.version("jaxforge")
