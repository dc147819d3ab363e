"""Small real checkpoints of every format, to be damaged."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np

from jaxforge.config.reading.load import make_config
from jaxforge.state.progress import Progress
from tests.torch_compat import corpus_subjects, port_subjects
from tests.torch_compat.tensors import random_array, to_torch
from torch_compat.checkpoint import checkpoints, dcp_state, train_state
from torch_compat.checkpoint.name_maps import NAME_MAPS
from torch_compat.checkpoint.state import CheckpointState, abstract_target
from torch_compat.convert import conversion
from torch_compat.convert.source import Request
from torch_compat.formats import block_scaled, safetensors, torch_zip
from torch_compat.formats.lazy import LazyTensor, from_array

SUBJECTS = ["torch", "ours", "stages", "torchtitan", "hf", "sharded", "jaxforge", "report",
            "capsule", "scaled", "adapter", "arrow", "partial", "logits", "ports"]  # fmt: skip
CONFIG = {
    "model": {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 32,
              "max_seq_len": 16, "ffn_hidden_dim": 24},
    "train": {"seq_len": 16, "batch_size": 2},
    "data": {"order": "torch"},
}  # fmt: skip


def config():
    """Return the config of all subjects."""
    return make_config(CONFIG)


def checkpoint():
    """A state of random numbers."""
    declared = abstract_target(config())

    def tensors(shapes, seed):
        return {
            name: from_array(random_array("float32", shape, seed + i))
            for i, (name, shape) in enumerate(shapes.items())
        }

    return CheckpointState(
        params=tensors(declared.params, 0),
        moments={f: tensors(s, 1000 * i) for i, (f, s) in enumerate(declared.moments.items(), 1)},
        scalars={"updates": np.asarray(3, np.int32)},
        progress=Progress(step=3, samples=6, tokens=96),
    )


def write_torch(directory: Path) -> Path:
    """A DCP checkpoint by torch's own hand."""
    import torch
    import torch.distributed.checkpoint as dcp

    state: dict = {}
    entries = dcp_state.entries(
        checkpoint(), abstract_target(config()), NAME_MAPS["kempnerforge"], flat=False,
        prefix="model.", weights_only=False,
    )  # fmt: skip
    for entry in entries.values():
        into = state
        for part in entry.path[:-1]:
            into = into.setdefault(part, {})
        value = entry.value
        into[entry.path[-1]] = to_torch(value.all()) if isinstance(value, LazyTensor) else value
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    about = train_state.to_torch(Progress(step=3, samples=6, tokens=96), 3, config(), 1)
    torch_zip.save(about, path := directory / "train_state.pt")
    torch.save(torch.load(path, weights_only=False), path)
    return directory


def write_subjects(directory: Path) -> dict[str, Path]:
    """One of each of `SUBJECTS`."""
    directory.mkdir(parents=True)
    toml = directory / "run.toml"
    toml.write_text(config().to_toml())
    result = {"torch": write_torch(directory / "torch")}
    run = directory / "jaxforge"

    def convert(request):
        plan = conversion.plan(request)
        return conversion.run(request, plan, lambda nbytes: None)

    convert(Request(checkpoints.find(result["torch"]), run, "jaxforge", toml, max_memory=1 << 20))

    def export(name, **how):
        result[name] = convert(Request(checkpoints.find(run), directory / name, **how))

    export("ours", to="dcp")
    export("stages", to="dcp", stages=2)
    export("torchtitan", to="dcp", dialect="torchtitan")
    export("hf", to="hf")
    export("sharded", to="hf", largest_file=4096)
    result |= {"report": directory / "report", "capsule": directory / "capsule"}
    write_report(result["report"])
    write_capsule(result["capsule"])
    write_scaled(result["hf"], directory / "scaled")
    write_adapter(result["hf"], directory / "adapter")
    writers = {
        "arrow": corpus_subjects.write_arrow,
        "partial": corpus_subjects.write_partial,
        "logits": corpus_subjects.write_logits,
        "ports": port_subjects.write_ports,
    }
    for name, write in writers.items():
        write(directory / name)
    written = {name: directory / name for name in ("scaled", "adapter", *writers)}
    return result | {"jaxforge": run} | written


def write_safetensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a file, also of dtypes that the library's NumPy interface lacks."""
    header, at = {}, 0
    for name, array in arrays.items():
        kind = safetensors._CODE_OF[str(array.dtype)]
        header[name] = {
            "dtype": kind,
            "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_scaled(source: Path, directory: Path) -> None:
    """Write a model in which some matrices have 8 bits and scales."""
    shutil.copytree(source, directory)
    file = directory / "model.safetensors"
    tensors = safetensors.open_directory(checkpoints.find(source).directory)
    names = {name for name in tensors if "_proj" in name}
    quantized = block_scaled.quantize(tensors, names)
    write_safetensors(file, {name: tensor.all() for name, tensor in quantized.items()})
    about = json.loads((directory / "config.json").read_text())
    about["quantization_config"] = block_scaled.quantization_config()
    (directory / "config.json").write_text(json.dumps(about))


def write_adapter(base: Path, directory: Path) -> None:
    """Write an adapter of PEFT for two layers of a model."""
    directory.mkdir(parents=True)
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base),
             "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none",
             "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False,
             "init_lora_weights": True, "fan_in_fan_out": False}  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(about))
    key = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (2, 16), "B": (16, 2)}
    write_safetensors(directory / "adapter_model.safetensors", {
        key.format(layer, kind): random_array("float32", shape, layer)
        for layer in range(2) for kind, shape in shapes.items()
    })  # fmt: skip


def write_report(directory: Path) -> None:
    """Write what `report` reads of a run, into a directory `run`."""
    from tests.tools.report.pages import line, start

    run = directory / "run"
    run.mkdir(parents=True)
    loads = {"moe/load/layers.0": [0.5, 1.5], "moe/load/layers.1": [1.0, 1.0]}
    sample = {"step": 1, "prompt": "once", "text": "upon", "time": 1.0}
    metrics = [line(step) | loads for step in range(1, 21)]
    lines = {"metrics": metrics, "starts": [start(0), start(9)], "samples": [sample, sample]}
    (run / "config.toml").write_text(config().to_toml())
    for name, values in lines.items():
        (run / f"{name}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))


def write_capsule(directory: Path) -> None:
    """Write a capsule of a run, without making the run."""
    from jaxforge.tools.replay import capsule as archive

    tables = {name: {"x": {"y": 1}} for name in ("data", "code")}
    tables |= {name: {"x": "1"} for name in ("machine", "environment", "packages")}
    curve = [{"step": i, "train/loss": 5.0, "train/grad_norm": 1.0} for i in range(1, 9)]
    files = {"config.toml": config().to_toml()}
    files["curve.jsonl"] = "".join(json.dumps(item) + "\n" for item in curve)
    directory.mkdir(parents=True)
    about = {**tables, "mesh": {"dp_shard": 1}}
    archive.write(directory / "run.capsule.zip", archive.Capsule(about, files))
