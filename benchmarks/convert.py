"""Memory and throughput of conversions between PyTorch's checkpoints and jaxforge's.

    python benchmarks/convert.py [--quick]

A DCP checkpoint of parameters and AdamW moments is imported, and the run exported as DCP and as
Hugging Face safetensors, each by its own process; then a Hugging Face checkpoint of weights is
converted in both directions. Memory is the peak resident size minus that of the same command with
`--dry-run` and all libraries loaded. Throughput is that of the written data, compared with `cp -r`
of the same bytes, torch's `dcp_to_torch_save`, and `save_pretrained` of the same weights. All
alternate, with their files in the page cache.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import results

from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import make_config
from jaxforge.state.progress import Progress
from torch_compat.checkpoint import dcp_state
from torch_compat.checkpoint.name_maps import NAME_MAPS
from torch_compat.checkpoint.state import CheckpointState, abstract_target
from torch_compat.formats import dcp_writer
from torch_compat.formats.lazy import Index, LazyTensor, index_shape
from torch_compat.formats.staging import Staging

MIB = 1 << 20
ALLOWED = "256 MiB and the largest tensor"
LIMIT = 256 * MIB  # that memory may grow by, in addition to the largest tensor of a layer
BLOCK = 32 * MIB
LAYER = {"dim": 1024, "n_heads": 8, "ffn_hidden_dim": 3584, "vocab_size": 16384}

_MEASURED = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([time.perf_counter() - start, peak]))
"""

_TO_TORCH = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(*sys.argv[1:])
"""

_LOADED = """
import sys
import torch_compat.checkpoint.orbax_commit
from torch_compat.commands import convert
convert.main([*sys.argv[1:], "--dry-run"])
"""

_SAVE_PRETRAINED = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
model.save_pretrained(sys.argv[2])
"""


def config_of(parameters: int) -> JobConfig:
    """Return a model of about this many parameters."""
    d, f, v = LAYER["dim"], LAYER["ffn_hidden_dim"], LAYER["vocab_size"]
    per_layer, remainder = 4 * d * d + 3 * d * f, 2 * v * d
    layers = max(1, round((parameters - remainder) / per_layer))
    return make_config({"model": {**LAYER, "n_layers": layers}, "train": {"seq_len": 128}})


def write_checkpoint(config: JobConfig, directory: Path, *, weights_only: bool = False) -> int:
    """Write a DCP checkpoint of random numbers in parts and return its bytes."""
    rng = np.random.default_rng(0)

    def random(shape: tuple[int, ...]) -> LazyTensor:
        def read(index: Index) -> np.ndarray:
            return rng.standard_normal(index_shape(index), np.float32)

        return LazyTensor(shape, np.dtype(np.float32), read)

    declared = abstract_target(config)
    checkpoint = CheckpointState(
        params={name: random(shape) for name, shape in declared.params.items()},
        moments={
            field: {name: random(shape) for name, shape in shapes.items()}
            for field, shapes in declared.moments.items()
            if not weights_only
        },
        scalars={"updates": np.asarray(100, np.int32)},
        progress=Progress(step=100),
    )
    entries = dcp_state.entries(
        checkpoint,
        declared,
        NAME_MAPS["kempnerforge"],
        flat=False,
        prefix="model.",
        weights_only=weights_only,
    )
    with Staging(directory / "step_100", {}) as staging:
        units = dcp_writer.units(entries, staging.path, BLOCK)
        staging.write(units, lambda nbytes: None)
        dcp_writer.write_metadata(entries, staging.results(units), staging.path, BLOCK)
        staging.commit()
    return sum(tensor.nbytes for _, tensor in checkpoint.tensors())


def measured(command: Sequence[str | Path]) -> tuple[float, int]:
    """Return the seconds and peak resident bytes of a command."""
    arguments = [sys.executable, "-c", _MEASURED, *map(str, command)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=_environment())
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def compat(*arguments: str | Path) -> list[str | Path]:
    """Return a command of the converter."""
    return [sys.executable, "-m", "jaxforge", "convert", *arguments]


def python(code: str, *arguments: str | Path) -> list[str | Path]:
    """Return a command that runs `code`."""
    return [sys.executable, "-c", code, *arguments]


def copying(source: Path, target: Path) -> list[str | Path]:
    """Return a command that copies a directory durably, as conversions do."""
    return ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', source, target]


def speed(
    case: str,
    size: int,
    ours: tuple[Sequence[str | Path], Path],
    peers: dict[str, tuple[Sequence[str | Path], Path]],
    repeats: int,
) -> list[results.Row]:
    """Return GB/s of commands, alternating; the last output of each command stays."""
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for peer, (command, sizes) in {"ours": ours, **peers}.items():
            _remove(sizes)
            os.sync()
            times.setdefault(peer, []).append(measured(command)[0])
    rate = {peer: round(size / statistics.median(t) / 1e9, 3) for peer, t in times.items()}
    return [results.Row(case, rate["ours"], peer, rate[peer], "GB/s") for peer in peers]


def compare_weights(nbytes: int, repeats: int, directory: Path) -> list[results.Row]:
    """Convert a Hugging Face checkpoint of this size both ways."""
    config, name = config_of(nbytes // 4), f"{nbytes / 1e9:g} GB of weights"
    toml, dcp, run, hf, copy = (directory / of for of in ("run.toml", "dcp", "run", "hf", "copy"))
    toml.write_text(config.to_toml())
    size = write_checkpoint(config, dcp, weights_only=True)
    measured(compat(dcp, run, "--to=jaxforge", "--config", toml))
    _remove(dcp)
    export = compat(run, hf, "--to=hf")
    copying_hf = {"cp -r": (copying(hf, copy), copy)}
    measured(export)
    rows = speed(f"{name}: export to Hugging Face", size, (export, hf), copying_hf, repeats)
    again = directory / "again"
    importing = compat(hf, again, "--to=jaxforge")
    return rows + speed(
        f"{name}: import from Hugging Face", size, (importing, again), copying_hf, repeats
    )


def compare(nbytes: int, repeats: int, directory: Path) -> list[results.Row]:
    """Measure all conversions of parameters and both moments at one size."""
    config, name = config_of(nbytes // 12), f"{nbytes / 1e9:g} GB"
    toml = directory / "run.toml"
    toml.write_text(config.to_toml())
    total = write_checkpoint(config, directory / "dcp")
    weights = total // 3
    largest = LAYER["vocab_size"] * LAYER["dim"] * 4
    run, hf = directory / "run", directory / "hf"
    importing = compat(directory / "dcp", run, "--to=jaxforge", "--config", toml)
    to_dcp = compat(run, directory / "back", "--to=dcp")
    to_hf = compat(run, hf, "--to=hf")
    rows = []

    def memory(case: str, command: Sequence[str | Path], target: Path) -> None:
        is_import = "--to=jaxforge" in command
        _, base = measured(python(_LOADED, *command[4:]) if is_import else [*command, "--dry-run"])
        _, peak = measured(command)
        allowed = LIMIT + largest
        grown = max(1, round((peak - base) / MIB))
        rows.append(results.Row(f"{name}: memory of {case}", grown,
                                ALLOWED, round(allowed / MIB), "MiB",
                                smaller_is_better=True))  # fmt: skip
        if target != run and target != hf:
            shutil.rmtree(target)

    memory("import", importing, run)
    memory("export to DCP", to_dcp, directory / "back")
    memory("export to Hugging Face", to_hf, hf)
    copy = directory / "copy"
    torch_file = directory / "all.pt"
    pretrained = directory / "pretrained"
    copying_dcp = {"cp -r": (copying(directory / "dcp", copy), copy)}
    to_torch = python(_TO_TORCH, directory / "dcp" / "step_100", torch_file)
    rows += speed(f"{name}: import", total, (importing, run),
                  {**copying_dcp, "torch: dcp_to_torch_save": (to_torch, torch_file)},
                  repeats)  # fmt: skip
    _remove(torch_file)
    back = directory / "back"
    rows += speed(f"{name}: export to DCP", total, (to_dcp, back), copying_dcp, repeats)
    _remove(copy)
    case = f"{name}: export to Hugging Face"
    rows += speed(case, weights, (to_hf, hf), {"cp -r": (copying(hf, copy), copy)}, repeats)
    _remove(copy)
    saving = python(_SAVE_PRETRAINED, _cached_model(hf, directory), pretrained)
    peer = {"transformers: load, save_pretrained": (saving, pretrained)}
    rows += speed(case, weights, (to_hf, hf), peer, repeats)
    return rows


def _cached_model(hf: Path, directory: Path) -> Path:
    """Return a cached copy for the peer to load."""
    source = directory / "source"
    shutil.copytree(hf, source)
    return source


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}


def run_command() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    sizes, repeats = ([0.25], 1) if quick else ([0.25, 1, 4], 5)
    rows = []
    for gigabytes in sizes:
        with tempfile.TemporaryDirectory(prefix="convert-") as directory:
            rows += compare(int(gigabytes * 1e9), repeats, Path(directory))
    with tempfile.TemporaryDirectory(prefix="convert-") as directory:
        rows += compare_weights(int(sizes[-1] * 1e9), repeats, Path(directory))
    notes = [
        "sizes are those of parameters and both AdamW moments in float32, or as named",
        "times include starting Python and its libraries, and syncing the files",
        f"largest tensor: {LAYER['vocab_size'] * LAYER['dim'] * 4 / MIB:.0f} MiB",
    ]
    packages = ("jax", "orbax-checkpoint", "tensorstore", "torch", "transformers")
    results.report("convert", rows, packages, device="cpu", notes=notes, write=not quick,
                   limits={ALLOWED: 1})  # fmt: skip


if __name__ == "__main__":
    run_command()
