"""Reads the checkpoints whose paths come line by line, and says of each how that went."""

import functools
import hashlib
import json
import resource
import sys
import traceback
from pathlib import Path

import numpy as np

from jaxforge.config.reading import toml
from jaxforge.config.reading.load import make_config
from jaxforge.errors import StorageError, UserError, printable
from jaxforge.runs.reading import read_runs
from jaxforge.tools.replay import capsule as archive
from jaxforge.tools.report.run_page import page
from tests.torch_compat import corpus_subjects, mutations, port_subjects, subjects
from torch_compat.checkpoint import checkpoints, dcp_state
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.inspection import inspect
from torch_compat.checkpoint.state import abstract_target
from torch_compat.formats import safetensors

MEMORY = 300 << 20  # bytes that a reading may take
ABOVE = 1 << 30  # bytes above which an allocation fails, rather than the machine


def read(path):
    """Read as `inspect` and `convert` do: a digest of every value, by our names.

    Of a run, what `report` shows; of a capsule, what its verification goes by.
    """
    if (Path(path) / "run").is_dir():
        return {"page": page(read_runs([Path(path) / "run"]), "steps")}
    if capsules := list(Path(path).glob("*.zip")):
        capsule = archive.read(capsules[0])
        make_config(toml.parse(capsule.files["config.toml"], "config.toml"))
        return {"files": repr(capsule)}
    for name, reader in _READERS.items():
        if (Path(path) / name).is_dir():
            return reader(Path(path) / name)
    reference = checkpoints.find(path)
    json.dumps(inspect(reference))
    if reference.format == "dcp":
        opened = reference.dcp()
        for key in opened.objects:
            opened.objects(key)
        checkpoint = dcp_state.read(opened, _declared(), ReadOptions())
    else:
        checkpoint = reference.read(reference.config(None), ReadOptions())
    values = {name: _digest(tensor.all()) for name, tensor in checkpoint.tensors()}
    values |= {f"scalar {name}": str(scalar) for name, scalar in checkpoint.scalars.items()}
    progress = checkpoint.progress.to_json() if checkpoint.progress else {}
    return values | {f"progress {k}": str(v) for k, v in progress.items() if k != "run_id"}


_READERS = {
    "arrow": corpus_subjects.read_arrow,
    "prepare": corpus_subjects.read_partial,
    "logits": corpus_subjects.read_logits,
    "ports": port_subjects.read_ports,
}


@functools.cache
def _declared():
    return abstract_target(subjects.config())


def _digest(array):
    about = f"{array.dtype}{array.shape}".encode()
    return hashlib.sha1(about + array.tobytes(), usedforsecurity=False).hexdigest()


def outcome(path):
    """Return the outcome of reading, and peak memory in bytes above that before."""
    before = _reset_peak()
    answer = {"kind": "read", "message": "", "checkpoint": None, "says so": False}
    try:
        answer["checkpoint"] = read(path)
        kinds = {key.partition(" ")[0] for key in answer["checkpoint"]}
        answer["says so"] = kinds <= _WITHOUT_CHECKSUMS or (
            not kinds & _EXACT and _reference_agrees(path)
        )
    except (UserError, StorageError) as error:
        answer |= {"kind": "refused", "message": printable(str(error))}  # as the command does
    except BaseException:  # whatever it is, it is a fault
        answer |= {"kind": "traceback", "message": traceback.format_exc()[-1500:]}
    return answer | {"memory": _status("VmHWM") - before}


_WITHOUT_CHECKSUMS = {"page", "files"}  # what was read is what the file says
_EXACT = {"corpus", "logits", "services"}  # damage must not change them


def judge(answer, original, mutation=""):
    """The kind of an outcome, and what to say of it; kinds in capitals are faults."""
    if answer["kind"] in ("hang", "crash", "traceback"):
        return answer["kind"].upper(), answer["message"]
    if answer["memory"] > MEMORY:
        return "MEMORY", f"{answer['memory'] >> 20} MB, {answer['message']}"
    if answer["kind"] == "refused":
        message = answer["message"]
        plain = len(message) < 4000 and all(c.isprintable() or c == "\n" for c in message)
        return ("refused", message) if plain else ("MESSAGE", message[:400])
    if answer["checkpoint"] == original:
        return "read as it was", ""
    if answer["says so"] or any(method in mutation for method in mutations.WITH_CHECKSUMS):
        return "read as it says", ""  # by the reference reader of a format without checksums, too
    changed = sorted(k for k, v in original.items() if answer["checkpoint"].get(k) != v)
    return "DIFFERENT", ", ".join(changed[:5])


def _reference_agrees(path):
    """Return whether another reader accepts the same values.

    Tensorstore is what reads jaxforge's own; like safetensors it has no checksums of numbers.
    """
    if (Path(path) / "adapter_config.json").is_file():  # its numbers may be any
        return True
    if not (Path(path) / "config.json").is_file():
        return checkpoints.find(path).format == "jaxforge"
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if "quantization_config" in (Path(path) / "config.json").read_text():
        state = checkpoints.find(path).read(checkpoints.find(path).config(None), ReadOptions())
        return all(np.abs(tensor.all()).max() < 1000 for tensor in state.params.values())
    theirs = {}
    try:
        for file in Path(path).glob("*.safetensors"):
            theirs |= load_file(file)
    except (OSError, SafetensorError):
        return False
    native = safetensors.open_directory(checkpoints.find(path).directory)
    return all(_digest(theirs[n]) == _digest(t.all()) for n, t in native.items() if n in theirs)


def _reset_peak():
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def main():
    """Answers in JSON, a line for each path."""
    soft = _status("VmData") + ABOVE
    resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.RLIM_INFINITY))
    answers, sys.stdout = sys.stdout, sys.stderr
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(outcome(line.rstrip("\n"))), file=answers, flush=True)


if __name__ == "__main__":
    main()
