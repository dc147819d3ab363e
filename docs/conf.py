"""The documentation as a site: `make docs` writes build/docs/index.html."""

import re
import sys
import types
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxforge", "torch_compat")
CHAPTERS = {
    "Tutorials": ["index", "getting_started", "from_kempnerforge"],
    "How-to guides": [
        "configs",
        "dial",
        "data",
        "lora",
        "preference_and_distillation",
        "prepare_terabytes",
        "launching",
        "elastic",
        "diloco",
        "averaging",
        "speedrun",
        "plan",
        "prove",
        "scaling",
        "torch_compat",
        "evaluate_and_generate",
        "report",
        "replay",
        "sweeps",
        "library",
    ],
    "Troubleshooting": [
        "loss_is_nan",
        "out_of_memory",
        "loss_changes_with_tp",
        "resume_on_other_devices",
        "gibberish_after_export",
        "training_hangs",
        "which_batch_caused_the_spike",
    ],
    "Explanation": [
        "mesh_and_sharding",
        "life_of_a_batch",
        "life_of_a_checkpoint",
        "bad_steps",
        "pipeline",
        "experts",
        "latent_attention",
        "hyper_connections",
        "gated_delta_net",
        "multi_token_prediction",
        "context",
        "remat",
        "precision",
        "kernels",
        "mup",
        "reliability",
        "security",
        "architecture",
    ],
    "Reference": [
        "config_reference",
        "metrics",
        "loop",
        "behaviours",
        "optimizers",
        "xla_flags",
        "gpu",
        "benchmarks",
        "upstream",
        "glossary",
    ],
}
"""Pages of docs/ by kind, in the order of the menu."""

sys.path.insert(0, str(ROOT))

project = html_title = "jaxforge"
copyright = "the jaxforge authors"
extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "build/api/**"]
exclude_patterns = ["**/modules.rst"]
html_theme = "furo"
highlight_language = "text"

myst_heading_anchors = 4

apidoc_modules = [
    {
        "path": f"../{package}",
        "destination": f"build/api/{package}",
        "module_first": True,
        "automodule_options": {"members", "show-inheritance"},
    }
    for package in PACKAGES
]
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_use_type_comments = False  # there are none; Sphinx would parse every signature again
napoleon_use_ivar = True
autodoc_mock_imports = ["lm_eval"]  # optional; jaxforge.tools.lm_eval extends its classes
_registry = types.ModuleType("lm_eval.api.registry")
_registry.__dict__["register_model"] = lambda *names: lambda model: model
sys.modules[_registry.__name__] = _registry  # a mocked decorator would return a mock of the class
suppress_warnings = ["ref.python"]  # attributes named `bytes`, like the type
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")


def setup(app: Sphinx) -> None:
    """Connect docstring conversion, the menu of the front page, and the redirect to it."""
    app.connect("autodoc-skip-member", _is_tuple_field)
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)  # then napoleon
    app.connect("source-read", _add_menu)
    app.connect("build-finished", _add_index)


def _add_menu(app: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        chapters = {name: [f"docs/{page}" for page in pages] for name, pages in CHAPTERS.items()}
        chapters["Reference"] += [f"build/api/{package}/{package}" for package in PACKAGES]
        chapters["Project"] = ["CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT"]
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {name}\n\n" + "\n".join(pages) + "\n```\n"
            for name, pages in chapters.items()
        )


def _add_index(app: Sphinx, error: Exception | None) -> None:
    page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
    Path(app.outdir, "index.html").write_text(page)


def _is_tuple_field(app: Sphinx, what: str, name: str, member: object, *_: object) -> bool | None:
    """Return whether a member is a field of a named tuple, whose docstring describes it."""
    return (getattr(member, "__doc__", None) or "").startswith("Alias for field") or None


def _as_restructured_text(*event: object) -> None:
    """Convert plain docstrings: `code` in single quotes, formulas indented by four."""
    lines = event[-1]
    converted, is_section, was_formula = [], False, False
    for line in lines:
        is_indented = line.startswith("    ") or (was_formula and not line)
        is_section = bool(_SECTION.match(line)) or (is_section and (is_indented or not line))
        is_formula = is_indented and not is_section
        if is_formula != was_formula:
            converted += ["", "::", ""] if is_formula else [""]
        converted.append(line if is_formula else _escaped(line))
        was_formula = is_formula
    lines[:] = converted


def _escaped(line: str) -> str:
    """Return a line with code in double quotes and all other markup escaped."""
    parts = re.split(r"(`[^`]+`)", line)
    parts[1::2] = (f"``{code.strip('` ')}``\\ " for code in parts[1::2])
    parts[::2] = (re.sub(r"(?<!^)([*|]|_\b)", r"\\\1", text) for text in parts[::2])
    return "".join(parts)
