"""Fixtures of all tests: eight virtual CPU devices, small models, golden runs if present."""

import atexit
import gc
import importlib
import logging
import math
import os
import shutil
import signal
import tempfile

from jaxforge.tools.prove import xla_flags
from tests.machine import compilation_cache, give_back_memory, memory_in_use

# In the background and under nohup, these signals are ignored: processes of tests would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = xla_flags(devices=8)
os.environ.setdefault("NPROC", "32")  # as `parallel.multihost` has it
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process of a test would compile everything
# Threads of PyTorch and BLAS would wait for each other, and for the workers next to them, at every
# product of small matrices: that took longer than the products.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers and commands inherit the first one's
    directory = compilation_cache()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    os.environ["NEW_COMPILATION_CACHE"] = str(int(not any(directory.iterdir())))
# Which runs are trusted to import their plugins: tests leave nothing of this in the user's home.
if not os.environ.get("XDG_STATE_HOME", "").startswith(tempfile.gettempdir()):
    STATE = tempfile.mkdtemp(prefix="jaxforge-tests-state-")
    atexit.register(shutil.rmtree, STATE, ignore_errors=True)
    os.environ["XDG_STATE_HOME"] = STATE
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Which line of Python an operation is from: to write it into programs is a tenth of compiling them.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxforge.config.job import JobConfig
from jaxforge.config.reading.schema import REGISTRIES
from jaxforge.model import runtime
from tests import helpers, import_graph

gc.set_threshold(100_000)  # to import tests and to trace makes objects by the hundred thousand

ENOUGH = 1.3e9
"""Bytes that a worker may hold when a file ends; the next file may add a gigabyte."""
GROWTH = 0.15e9
"""Bytes that are worth a second's work: what stays is imported, or in use."""

COMPILED_ONCE = ("kernels", "model", "optim", "step")
"""Directories of tests whose programs hardly any other test compiles again."""

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
SMALL_GOLDEN = Path(__file__).parent / "golden" / "runs"

TINY = {
    "model": {
        "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 256,
        "max_seq_len": 64,
    },
    "train": {
        "batch_size": 8, "seq_len": 32, "max_steps": 20, "mixed_precision": "fp32",
    },
    "optimizer": {"lr": 3e-3},
    "scheduler": {"warmup_steps": 4},
    "distributed": {"dp_shard": 1},
    "data": {"dataset_type": "synthetic"},  # where a test names none
    "metrics": {"log_interval": 1},
}  # fmt: skip


# What takes longest begins first: else one worker ends with a long file, and the others are idle.
LONGEST = (
    "processes/test_supervised.py", "storage/test_runs.py", "data/test_huggingface_runs.py",
    "parallel/test_gpu_meshes.py", "torch_compat/test_families.py",
    "parallel/pipeline/test_spmd.py",
    "step/test_grad_sync.py", "step/test_padding.py", "step/test_padded_batch.py",
    "torch_compat/test_idle_experts_of_torch.py", "step/test_context.py",
    "tools/replay/test_replay.py",
    "processes/test_exits.py", "storage/test_remote_corpora.py", "processes/test_generate.py",
    "model/test_mixers.py", "checkpoint/test_manager.py", "kernels/test_gated_delta.py",
    "training/test_rollback.py", "step/test_mtp.py",
    "torch_compat/test_convert.py", "optim/test_lr_patterns.py",
    "step/test_uneven_meshes.py", "step/test_aux_outputs.py", "step/test_experts.py",
    "step/test_train_step.py", "torch_compat/test_huggingface_models.py",
    "torch_compat/test_commands.py", "model/test_moe.py", "processes/test_evaluate.py",
    "step/test_meshes.py", "model/test_attention.py", "torch_compat/test_expert_checkpoints.py",
    "processes/test_two_processes.py", "test_examples.py", "tools/replay/test_capsule.py",
    "step/test_reduced_precision_state.py", "training/test_stopped_runs.py",
    "model/test_decoding.py", "model/test_layer_plan.py",
    "storage/test_conversions.py", "torch_compat/test_fsdp2.py",
    "tools/plan/test_wrong_configs.py", "torch_compat/test_untrained.py", "processes/test_kill.py",
    "step/test_fp8_steps.py", "test_configs.py", "golden/test_trajectories.py",
    "model/test_attention_sinks.py", "data/test_fine_tuning.py",
)  # fmt: skip


def pytest_addoption(parser):
    parser.addoption(
        "--changed-since", metavar="COMMIT", help="run only test files that the changes reach"
    )


def pytest_collection_modifyitems(config, items):
    """Files of `LONGEST` come first (with --no-loadscope-reorder)."""
    if base := config.getoption("--changed-since"):
        changed = import_graph.changed_files(base)
        files = {path for path in {item.path for item in items} if
                 import_graph.is_reached(path, changed)}  # fmt: skip
        config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
        items[:] = [item for item in items if item.path in files]
    location = {str(Path(__file__).parent / name): i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: location.get(str(item.path), len(location)))


def pytest_collection_finish():
    """Freeze imported and collected objects, so that no garbage collection visits them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def stays():
    """Bytes that a worker held when it had forgotten its programs, each time."""
    return [0]


@pytest.fixture(scope="module", autouse=True)
def forget_programs(stays, request):
    """Compiled programs are kept for the next file while they are few; they would be gigabytes.

    To write a program to the cache takes a twelfth of compiling it. The first run with a new cache,
    as in CI, does not write those of `COMPILED_ONCE`; later runs do.
    """
    is_once = request.path.parent.name in COMPILED_ONCE
    never = is_once and os.environ.get("NEW_COMPILATION_CACHE") == "1"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf if never else 0.0)
    yield
    helpers.forget()
    if memory_in_use() > max(ENOUGH, stays[-1] + GROWTH):
        jax.clear_caches()
        gc.collect()  # programs and networks are in circles with what traced them
        give_back_memory()
        stays.append(memory_in_use())


@pytest.fixture
def golden() -> Callable[[str], Path]:
    """Return the path of a reference run by its name; a test skips where the run is absent.

    Small runs are in the repository: of trajectories, initial weights and what was logged.
    """

    def path_of(name: str) -> Path:
        for directory in (GOLDEN, SMALL_GOLDEN):
            if (directory / name).exists():
                return directory / name
        pytest.skip(f"the reference run {name} is not in the repository")

    return path_of


@pytest.fixture(scope="module")
def one_device():
    """Runs of a file have one, where how many there are is not the point: eight take twice as long.

    Until the file ends; it is for all of its tests (`pytestmark`).
    """
    with helpers.devices_here(1):
        yield


@pytest.fixture(scope="module")
def two_devices():
    """Give the runs of a file two devices; see `one_device`."""
    with helpers.devices_here(2):
        yield


@pytest.fixture
def messages(caplog, monkeypatch):
    """Captured log messages of jaxforge."""
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    return caplog


@pytest.fixture
def loops_over_layers(monkeypatch):
    """Loop over layers as on GPUs and TPUs; CPUs unroll small models, which compiles slower."""
    monkeypatch.setattr(runtime, "UNROLLED_ON_CPU", 0)


@pytest.fixture
def own_names(monkeypatch):
    """Forget the names that a test registers."""
    importlib.import_module("jaxforge.data.sources")  # registers built-in names when imported
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_builders", dict(registry._builders))


def tiny_config(**sections: dict) -> JobConfig:
    """A config of seconds, with keys of each section replaced."""
    merged = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {*TINY, *sections}}
    return JobConfig.model_validate(merged)
