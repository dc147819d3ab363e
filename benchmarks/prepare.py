"""Speed and memory of `jaxforge prepare`: `python benchmarks/prepare.py [--quick]`.

A corpus of JSON lines is tokenized by jaxforge and by three peers with the same BPE. Commands are
measured from their start to their end, and all must give the same number of tokens:

datasets.map     `load_dataset("json")` and a batched map of `encode_batch`, as in nanoGPT's prepare
preprocess_data  a pool of processes that encode lines and a writer of documents, as Megatron-LM's
datatrove        `JsonlReader` and `DocumentTokenizer` without shuffling

The commands alternate. Tokens per second of CPU time (user and system, of all processes) are given
in addition to tokens per second and core, because they depend less on other processes of the
machine. Memory is the largest sum of proportional set sizes of a command's processes.

datatrove is run by the Python that the environment variable DATATROVE_PYTHON names, else by this
Python if it has datatrove.
"""

import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import results

from jaxforge.data.corpus.manifest import Manifest
from jaxforge.data.corpus.tokenizer import END_OF_TEXT, train_bpe

MIB = 1 << 20
FILES = 4
CORES = os.cpu_count() or 1
SAMPLE_SECONDS = 0.2  # between readings of memory
GROWTH = 1.1  # of memory with four times the text

_DATASETS = """
import sys
import numpy as np
import tokenizers
from datasets import load_dataset
source, tokenizer, output, workers = sys.argv[1:]
bpe = tokenizers.Tokenizer.from_file(tokenizer + "/tokenizer.json")
end = bpe.token_to_id("<|endoftext|>")
def encode(rows):
    encoded = bpe.encode_batch(rows["text"], add_special_tokens=False)
    ids = [[*e.ids, end] for e in encoded]
    return {"ids": ids, "length": [len(i) for i in ids]}
if __name__ == "__main__":
    data = load_dataset("json", data_files=source + "/*.jsonl", split="train", cache_dir=output)
    data = data.map(encode, batched=True, num_proc=int(workers), remove_columns=data.column_names)
    file = np.memmap(output + "/train.bin", np.uint16, "w+", shape=(sum(data["length"]),))
    at = 0
    for i in range(64):  # as nanoGPT writes
        part = data.shard(64, i, contiguous=True).with_format("numpy")
        if len(part):
            ids = np.concatenate(part["ids"])
            file[at : at + len(ids)] = ids
            at += len(ids)
    print(at)
"""

_PREPROCESS_DATA = """
import glob, json, multiprocessing, sys
import numpy as np
import tokenizers
source, tokenizer, output, workers = sys.argv[1:]
def start():
    global bpe, end
    bpe = tokenizers.Tokenizer.from_file(tokenizer + "/tokenizer.json")
    end = bpe.token_to_id("<|endoftext|>")
def encode(line):
    ids = bpe.encode(json.loads(line)["text"], add_special_tokens=False).ids
    ids.append(end)
    return ids, len(line)
if __name__ == "__main__":
    sizes = []
    with multiprocessing.Pool(int(workers), start) as pool, open(output + ".bin", "wb") as file:
        for path in sorted(glob.glob(source + "/*.jsonl")):
            with open(path, encoding="utf-8") as lines:
                for ids, _ in pool.imap(encode, lines, 32):
                    file.write(np.array(ids, np.uint16).tobytes())
                    sizes.append(len(ids))
    np.array(sizes, np.int32).tofile(output + ".idx")
    print(sum(sizes))
"""

_DATATROVE = """
import glob, os, sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
source, tokenizer, output, workers = sys.argv[1:]
if __name__ == "__main__":
    LocalPipelineExecutor(
        [JsonlReader(source, glob_pattern="*.jsonl"),
         DocumentTokenizer(output, tokenizer + "/tokenizer.json", eos_token="<|endoftext|>",
                           shuffle_documents=False)],
        tasks=4, workers=int(workers), logging_dir=output + "_logs", skip_completed=False,
    ).run()
    print(sum(os.path.getsize(path) for path in glob.glob(output + "/*.ds")) // 2)
"""

_MEASURED = """
import ctypes, json, os, resource, subprocess, sys, time
# PR_SET_CHILD_SUBREAPER: orphans become children of this process, whose CPU time is counted.
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
start = time.perf_counter()
ran = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
seconds = time.perf_counter() - start
if ran.returncode:
    sys.exit(ran.stderr[-2000:])
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([seconds, used.ru_utime + used.ru_stime,
                  ran.stdout.strip().splitlines()[-1]]))
"""


class Measurement(NamedTuple):
    """One run of a command.

    Attributes:
        seconds: from its start to its end.
        cpu_seconds: user and system time of all its processes.
        memory: largest sum of proportional set sizes of its processes, bytes.
        answer: last line of its output.
    """

    seconds: float
    cpu_seconds: float
    memory: int
    answer: str


def write_corpus(directory: Path, size: int) -> None:
    """Write about `size` bytes of text as JSON lines: source files, cut at random lengths."""
    generator, texts, written = random.Random(0), [], 0
    packages = Path(json.__file__).parents[1]
    for path in sorted(packages.rglob("*.py")):
        text, at = path.read_text(encoding="utf-8-sig", errors="replace"), 0
        while at < len(text) and written < size:
            end = at + 50 + int(generator.lognormvariate(7.8, 0.9))
            texts.append(text[at:end])
            written, at = written + end - at, end
    generator.shuffle(texts)
    directory.mkdir()
    for i in range(FILES):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[i::FILES])
        (directory / f"{i}.jsonl").write_text("".join(lines))


def measure(command: Sequence[str | Path]) -> Measurement:
    """Run a command and measure it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _MEASURED, *command], stdout=subprocess.PIPE, text=True
    )
    peak = [0]
    sampler = threading.Thread(target=_sample, args=(process.pid, peak))
    sampler.start()
    output = process.communicate()[0]
    sampler.join()
    if process.returncode:
        raise SystemExit(f"failed: {command[:3]}")
    seconds, cpu_seconds, answer = json.loads(output)
    return Measurement(seconds, cpu_seconds, peak[0], answer)


def _sample(pid: int, peak: list[int]) -> None:
    """Record the largest memory of the children of a process until it ends."""
    try:
        parent = psutil.Process(pid)
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            total = 0
            for child in parent.children(recursive=True):
                try:
                    total += child.memory_full_info().pss
                except psutil.Error:  # it has ended
                    continue
            peak[0] = max(peak[0], total)
            time.sleep(SAMPLE_SECONDS)
    except psutil.NoSuchProcess:
        return


class Commands:
    """Commands that tokenize a corpus.

    Args:
        directory: directory for tokenizer and outputs.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._tokenizer = directory, directory / "tokenizer"
        datatrove = os.environ.get("DATATROVE_PYTHON", "")
        if not datatrove and importlib.util.find_spec("datatrove"):
            datatrove = sys.executable
        self._datatrove = datatrove
        self._scripts = {
            "datasets.map": (sys.executable, _DATASETS),
            "preprocess_data": (sys.executable, _PREPROCESS_DATA),
            **({"datatrove": (datatrove, _DATATROVE)} if datatrove else {}),
        }

    @property
    def peers(self) -> list[str]:
        """Names of the peers."""
        return list(self._scripts)

    def datatrove_version(self) -> str:
        """Return the version of datatrove, or a message that it is not installed."""
        if not self._datatrove:
            return "datatrove was not installed"
        code = "import importlib.metadata as m; print('datatrove', m.version('datatrove'))"
        return subprocess.check_output([self._datatrove, "-c", code], text=True).strip()

    def run(self, name: str, corpus: Path) -> tuple[Measurement, int]:
        """Tokenize a corpus with jaxforge or a peer; return the measurement and the tokens."""
        output = self._directory / "output"
        for path in self._directory.glob("output*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if name == "jaxforge":
            program = (sys.executable, "-m", "jaxforge.prepare", corpus)
            options = ("--tokenizer", self._tokenizer, "--workers", str(CORES))
            measured = measure([*program, *options, "--output", output])
            manifest = Manifest.read(output / "train")
            assert manifest is not None
            return measured, manifest.tokens
        python, script = self._scripts[name]
        path = self._directory / f"run_{name}.py"
        path.write_text(script)
        if name != "preprocess_data":
            output.mkdir()
        measured = measure([python, path, corpus, self._tokenizer, output, str(CORES)])
        return measured, int(measured.answer)


def main() -> None:
    """Print the tables and write the results."""
    args = results.arguments(__doc__).parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism of all commands
    rounds, size = (1, 2 * MIB) if args.quick else (3, 36 * MIB)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_corpus(directory / "corpus", size)
        write_corpus(directory / "four times", 4 * size)
        texts = (json.loads(line)["text"] for line in (directory / "corpus" / "0.jsonl").open())
        train_bpe(texts, 32_768).save(directory / "tokenizer")
        commands = Commands(directory)
        names = ["jaxforge", *commands.peers]
        runs: dict[str, list[Measurement]] = {name: [] for name in names}
        counts: dict[str, int] = {}
        for _ in range(rounds):
            for name in names:
                measured, counts[name] = commands.run(name, directory / "corpus")
                runs[name].append(measured)
                print(
                    name,
                    f"{measured.seconds:.1f} s, {measured.cpu_seconds:.1f} s of CPU",
                    flush=True,
                )
        if len(set(counts.values())) > 1:
            raise SystemExit(f"the numbers of tokens differ: {counts}")
        large, _ = commands.run("jaxforge", directory / "four times")
    rows = list(_rows(runs, counts["jaxforge"], large))
    notes = [
        f"{size / 1e6:.0f} MB of Python sources in {FILES} files, {CORES} processes, medians of "
        f"{rounds} alternating rounds, start and end of the processes included",
        f"documents end with {END_OF_TEXT}; every command gives {counts['jaxforge']:,} tokens",
    ]
    notes.append(commands.datatrove_version())
    if not args.quick and large.memory > GROWTH * statistics.median(
        run.memory for run in runs["jaxforge"]
    ):
        raise SystemExit("the memory of jaxforge grows with the corpus")
    packages = ["datasets", "tokenizers"]
    results.report("prepare", rows, packages, notes=notes, write=not args.quick)


def _rows(runs: dict[str, list[Measurement]], tokens: int, large: Measurement) -> list[results.Row]:
    medians = {
        name: [statistics.median(column) for column in zip(*(run[:3] for run in measured),
                                                           strict=True)]
        for name, measured in runs.items()
    }  # fmt: skip
    ours, rows = medians.pop("jaxforge"), []
    for peer, theirs in medians.items():
        rows += [
            results.Row("tokenize", tokens / ours[0] / CORES, peer, tokens / theirs[0] / CORES,
                        "tokens/s per core"),
            results.Row("tokenize", tokens / ours[1], peer, tokens / theirs[1],
                        "tokens per second of CPU"),
            results.Row("tokenize", ours[2] / MIB, peer, theirs[2] / MIB, "MiB of memory",
                        smaller_is_better=True),
        ]  # fmt: skip
    rows.append(
        results.Row("tokenize four times the text", large.memory / MIB, "jaxforge, the text once",
                    ours[2] / MIB, "MiB of memory", smaller_is_better=True)
    )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
