"""The names of `import jaxforge`, and the page that describes them."""

import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import jaxforge as jf
from jaxforge.training import launch

ROOT = Path(__file__).parents[1]


def test_library_page_lists_the_public_names():
    page = (ROOT / "docs" / "library.md").read_text()
    listed = re.findall(r"^\| `jf\.(\w+)", page, re.MULTILINE)
    assert sorted(listed) == sorted(jf.__all__)


def test_every_public_name_can_be_imported():
    assert all(callable(getattr(jf, name)) for name in jf.__all__)
    assert set(dir(jf)) == {*jf.__all__, "__version__"}


def test_module_of_a_command_does_not_hide_a_public_name():
    command = importlib.import_module("jaxforge.train")
    assert command.run
    assert jf.train is launch.train


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
