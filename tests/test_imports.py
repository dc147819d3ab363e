"""Imports follow the arrows of docs/architecture.md, and nothing needs torch to run."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from jaxforge.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]

LAYERS = {
    "errors": set(),
    "untrusted_json": {"errors"},
    "exit_codes": set(),
    "registry": {"errors"},
    "streams": {"errors"},
    "cli": {"errors", "streams"},
    "process": set(),
    "run_lock": {"errors", "storage"},
    "wide_count": set(),
    "git": set(),
    "redaction": set(),
    "line_file": {"errors", "safe_files", "untrusted_json"},
    "starts": {"errors", "git", "line_file", "redaction"},
    "job_facts": {"config", "starts"},
    "side": set(),
    "near": set(),
    "mistyped": set(),
    "command_line": {"cli", "config", "errors", "mistyped", "trust"},
    "safe_files": set(),
    "trust": {"storage"},
    "storage": {"errors", "buckets"},
    "buckets": {"errors", "storage"},
    "mirror": {"errors", "storage"},
    "config": {"errors", "registry", "storage", "trust"},
    "parallel": {"errors", "exit_codes", "process", "config", "streams"},
    "corpus": {"errors", "config", "storage"},
    "starting": {"errors", "config", "corpus"},
    "data": {"errors", "config", "corpus", "parallel", "storage", "buckets"},
    "model": {"errors", "config", "parallel", "side"},
    "optim": {"errors", "config", "parallel", "model", "state"},
    "pipeline": {"errors", "cli", "command_line", "config", "parallel", "side"},
    "state": {"errors", "model", "parallel", "wide_count"},
    "step": {"errors", "config", "parallel", "model", "optim", "pipeline", "data", "state", "side",
             "storage"},
    "health": {"errors", "exit_codes", "config", "parallel", "model", "optim", "state", "step",
               "telemetry", "process", "run_lock"},
    "training": {"errors", "exit_codes", "config", "parallel", "model", "optim", "corpus", "data",
                 "state", "step", "health", "checkpoint", "telemetry", "process", "storage",
                 "mirror", "side"},
    "checkpoint": {"errors", "config", "parallel", "model", "state", "storage", "buckets"},
    "telemetry": {"errors", "exit_codes", "config", "line_file", "mirror", "state",
                  "streams"},
    "notebook": {"exit_codes", "config", "telemetry", "training"},
    "run_directory": {"errors", "config", "corpus", "storage", "mirror", "starts",
                      "trust", "untrusted_json"},
    "inference": {"errors", "cli", "config", "parallel", "corpus", "data", "model", "checkpoint",
                  "run_directory", "storage", "telemetry", "training"},
}  # fmt: skip
ENTRY_POINTS = {"plan", "train", "build", "prepare", "generate", "report", "evaluate", "supervise",
                "replay", "activations", "launch", "run", "doctor", "__main__",
                "lm_eval", "capsule", "sweep", "completion", "init", "dry_run",
                "preparation"}  # fmt: skip
SUBCLASSES = {"jaxforge.lm_eval.adapter"}  # of classes that an extra brings


def imports_of(path, *, at_once=False):
    """What a module imports; at once: when it is imported itself."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(package):
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", modules("jaxforge"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    room = path.relative_to(ROOT / "jaxforge").parts[0].removesuffix(".py")
    names = set(imports_of(path))
    outside = {"torch"} if path.name == "build.py" else {"torch", "torch_compat"}
    assert not {n for n in names if n.split(".")[0] in outside}
    if room in ENTRY_POINTS or room == "__init__":
        return
    rooms = {n.split(".")[1] for n in names if n.startswith("jaxforge.")}
    assert rooms - {room, "near", "redaction", "safe_files"} <= LAYERS[room]


@pytest.mark.parametrize("path", modules("torch_compat"), ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_compat_keeps_out_of_the_loop(path):
    assert not {n for n in imports_of(path) if n.startswith("jaxforge.training.loop")}


def test_every_module_imports_without_torch():
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in modules("jaxforge")]
    names = [name for name in names if name not in SUBCLASSES]
    names += [
        ".".join(p.relative_to(ROOT).with_suffix("").parts)
        for p in modules("torch_compat")
        if p.name != "__main__.py"
    ]
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(f"import {n}" for n in names)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_commands_read_their_command_line_without_jax():
    """It takes a second or two to import."""
    modules = {command.module for command in COMMANDS.values()}
    code = f"import sys, jaxforge, {', '.join(modules)}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_supervisor_starts_without_numpy():
    code = "import sys, jaxforge.supervise; assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_kernels_of_other_machines_are_imported_when_they_run():
    """Pallas was a sixth of every start, and no CPU needs it."""
    imported = {
        f"jaxforge.model.{path.stem}": set(imports_of(path, at_once=True))
        for path in (ROOT / "jaxforge" / "model").glob("*.py")
    }
    kernels = {
        module for module, names in imported.items() if "jax.experimental.pallas" in " ".join(names)
    }
    assert {"jaxforge.model.splash", "jaxforge.model.megablox"} <= kernels
    assert not {module: names & kernels for module, names in imported.items()
                if module not in kernels and names & kernels}  # fmt: skip


def test_no_private_jax():
    for path in [*modules("jaxforge"), *modules("torch_compat")]:
        assert not {n for n in imports_of(path) if n.startswith(("jax._src", "jaxlib"))}, path


def test_conversions_start_without_jax():
    slow = {"jax", "flax", "optax", "orbax", "grain", "torch", "tokenizers", "fsspec"}
    code = f"import sys, torch_compat.__main__; assert not {slow} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
