"""Imports follow the arrows of docs/architecture.md, and nothing needs torch to run."""

import graphlib
import re
import subprocess
import sys

import pytest

from jaxforge.commands import COMMANDS
from tests.helpers import each
from tests.import_graph import (
    PACKAGES,
    ROOT,
    dotted,
    import_graph,
    imports_of,
    is_reached,
    modules,
)

ROOMS = ["errors", "exit_codes", "aux_outputs", "cli", "registry", "storage", "config", "parallel",
         "kernels", "model", "state", "optim", "data", "step", "program", "checkpoint", "telemetry",
         "runs", "tasks", "training", "inference", "tools", "supervision", "commands",
         "__main__", "train", "evaluate", "generate", "prepare", "plan"]  # fmt: skip
"""Files and directories of jaxforge; each imports only those before it."""
TORCH_ROOMS = ["formats", "names", "families", "checkpoint", "convert", "lockstep",
               "commands"]  # fmt: skip
TOP_FILES = 12  # five of them are entry points
SUBCLASSES = {  # of classes that an extra brings
    "jaxforge.tasks.lm_eval_model",
    "jaxforge.tasks.lm_eval_tasks",
    "jaxforge.tools.lm_eval",
}


@pytest.mark.parametrize(
    ("package", "rooms"), [("jaxforge", ROOMS), ("torch_compat", TORCH_ROOMS)], ids=PACKAGES
)
def test_imports_point_downwards(package, rooms):
    upward = [
        f"{module} imports {name}"
        for module, names in import_graph().items()
        for name in names
        if module.startswith(f"{package}.") and name.startswith(f"{package}.")
        if rooms.index(name.split(".")[1]) > rooms.index(module.split(".")[1])
    ]
    assert not upward


def test_architecture_page_has_the_rooms_in_their_order():
    page = (ROOT / "docs" / "architecture.md").read_text()
    page = page.partition("directory of `torch_compat/`")[0]
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", page, re.MULTILINE)
    listed = [room for room in rows if room in ROOMS]
    assert listed == [room for room in ROOMS if room in listed]
    directories = {path.parent.name for path in (ROOT / "jaxforge").glob("*/__init__.py")}
    assert directories <= set(listed)


def test_no_import_cycle():
    try:
        tuple(graphlib.TopologicalSorter(import_graph()).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_module_names_say_what_they_are_about():
    vague = {"page", "command", "helpers", "util", "utils"}
    assert not [path for path in modules("jaxforge") if path.stem in vague]


def test_few_files_at_the_top_of_the_package():
    assert len(list((ROOT / "jaxforge").glob("*.py"))) <= TOP_FILES


@each(modules("jaxforge"))
def test_torch_is_imported_by_conversions_only(path):
    outside = {"torch"} if path.name == "foreign.py" else {"torch", "torch_compat"}
    assert not {name for name in imports_of(path) if name.split(".")[0] in outside}


@each(modules("torch_compat"))
def test_torch_compat_keeps_out_of_the_loop(path):
    assert not {n for n in imports_of(path) if n.startswith("jaxforge.training.loop")}


def test_every_module_imports_without_torch():
    names = {dotted(path) for package in PACKAGES for path in modules(package)}
    names -= SUBCLASSES
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(
        f"import {name}" for name in sorted(names)
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_commands_read_their_command_line_without_jax():
    """Importing JAX takes a second or two."""
    modules = {command.module for command in COMMANDS.values()}
    code = f"import sys, jaxforge, {', '.join(modules)}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_supervisor_starts_without_numpy():
    code = "import sys, jaxforge.commands.supervise; assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_kernels_of_other_machines_are_imported_when_they_run():
    """Pallas was a sixth of every start, and no CPU needs it."""
    imported = {
        dotted(path): set(imports_of(path, at_once=True))
        for room in ("kernels", "model")
        for path in (ROOT / "jaxforge" / room).glob("*.py")
    }
    kernels = {
        module for module, names in imported.items() if "jax.experimental.pallas" in " ".join(names)
    }
    assert {"jaxforge.kernels.splash", "jaxforge.kernels.megablox"} <= kernels
    assert not {module: names & kernels for module, names in imported.items()
                if module not in kernels and names & kernels}  # fmt: skip


def test_no_private_jax():
    for path in [*modules("jaxforge"), *modules("torch_compat")]:
        assert not {n for n in imports_of(path) if n.startswith(("jax._src", "jaxlib"))}, path


def test_conversions_start_without_jax():
    slow = {"jax", "flax", "optax", "orbax", "grain", "torch", "tokenizers", "fsspec"}
    modules = "torch_compat.commands.convert, torch_compat.commands.verify"
    code = f"import sys, {modules}; assert not {slow} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_change_reaches_the_tests_that_import_it():
    schedule = ROOT / "tests/parallel/pipeline/test_pipeline_schedule.py"
    supervisor = ROOT / "tests/processes/test_supervised.py"
    assert is_reached(schedule, {"jaxforge/parallel/pipeline/schedule.py"})
    assert not is_reached(schedule, {"jaxforge/supervision/supervisor.py"})
    assert not is_reached(schedule, {"torch_compat/formats/torch_zip.py"})
    assert is_reached(supervisor, {"jaxforge/training/loop.py"})  # in a process
    assert is_reached(ROOT / "tests/test_docs.py", {"docs/plan.md"})
    assert not is_reached(schedule, {"docs/plan.md"})
