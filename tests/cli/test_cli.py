"""Exit of commands with running threads, closed pipes and Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jaxforge.cli.process import end_now
from jaxforge.cli.running import STDOUT, raise_interrupts, run_main, write_json
from tests.machine import PATIENCE

ROOT = Path(__file__).parents[2]

PROGRAM = """
import concurrent.futures, time
from jaxforge.cli.running import leave

pool = concurrent.futures.ThreadPoolExecutor(1, "reader")
pool.submit(time.sleep, {seconds})
leave(75, patience={patience})
"""


@pytest.mark.parametrize(
    ("seconds", "patience", "message"),
    [
        (600, 0.1, "exiting with 75 while threads are running: reader_0\n"),
        (0.1, 600, ""),
    ],
)
def test_hanging_thread_does_not_block_exit(seconds, patience, message):
    program = PROGRAM.format(seconds=seconds, patience=patience)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (75, message)


PRINTS = """
import sys
from jaxforge.cli.running import run_main

def work():
    for _ in range(3):
        print("a line that waits in a buffer")
        sys.stdout.{flush}
    print("a word", file=sys.stderr)
    open(sys.argv[1], "w").close()
    return 5

raise SystemExit(run_main(work, outlives_reader={outlives}))
"""


@pytest.mark.parametrize("flush", ["flush()", "buffer.write(b'bytes')"])
@pytest.mark.parametrize(
    ("redirected", "outlives", "code", "finishes"),
    [
        (">&$PIPE", True, 5, True),
        ("2>&$PIPE", True, 5, True),
        (">&$PIPE 2>&1", True, 5, True),
        (">/dev/full 2>/dev/full", True, 5, True),
        (">&- 2>&-", True, 5, True),
        (">&$PIPE", False, 0, False),
        (">/dev/full", False, 74, False),
        ("2>&$PIPE", False, 5, True),
    ],
)
def test_closed_pipe_ends_only_commands_with_text_results(
    tmp_path, redirected, outlives, code, finishes, flush
):
    """The interpreter must not exit with 120, as it does if the final flush fails."""
    read, write = os.pipe()
    os.close(read)
    marker = tmp_path / "finished"
    done = subprocess.run(
        ["bash", "-c", f"exec '{sys.executable}' - '{marker}' {redirected}"],
        input=PRINTS.format(outlives=outlives, flush=flush), env={**os.environ, "PIPE": str(write)},
        cwd=ROOT, pass_fds=[write], text=True, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if finishes or flush == "flush()":  # otherwise the failure occurs at exit
        assert marker.exists() == finishes
    if code == 74:
        assert "error: standard output could not be written: No space left" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "jaxforge.train --config=configs/debug.toml",
        "jaxforge.generate runs/one",
        "jaxforge evaluate runs/one",
        "jaxforge report runs/one",
        "jaxforge prepare texts --output data",
    ],
)
def test_ctrl_c_during_import_ends_silently(tmp_path, command):
    """In C extensions of NumPy and JAX, KeyboardInterrupt would cause SIGSEGV."""
    for name in ("jax", "numpy"):
        (tmp_path / f"{name}.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_characters_that_a_terminal_lacks_are_escaped(capfdbinary, monkeypatch, encoding):
    def show():
        print("caf\u00e9 \u2026")
        print("\u2026", file=sys.stderr)
        write_json(STDOUT, {"text": "\u00e9\u2026"})
        return 5

    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = open(fd, "w", encoding=encoding, errors="strict", closefd=False)  # noqa: SIM115
        monkeypatch.setattr(sys, name, stream)
    assert run_main(show) == 5
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    out, err = capfdbinary.readouterr()
    e = b"\\xe9" if encoding == "ascii" else b"\xe9"
    assert out == b"caf" + e + b' \\u2026\n{"text": "\\u00e9\\u2026"}\n'
    assert err == b"\\u2026\n"


OPTIMIZED = """
import importlib, json, sys
from jaxforge.commands import COMMANDS

modules = sorted({command.module for command in COMMANDS.values()})
helps = {name: importlib.import_module(name).parser().format_help() for name in modules}
print(json.dumps(helps))
"""


def test_help_needs_no_docstrings():
    """`python -OO` drops docstrings."""
    helps = [
        json.loads(subprocess.run(
            [sys.executable, *options, "-c", OPTIMIZED],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout)
        for options in ([], ["-OO"])
    ]  # fmt: skip
    assert helps[0] == helps[1]


COMPILES = """
import ctypes
from jaxforge.cli.process import end_at_signals
end_at_signals()
from jaxforge.cli.running import run_main

def work():
    libc = ctypes.PyDLL(None)  # with Python's lock held, as by code that looks at no signals
    print("compiling", flush=True)
    libc.sleep(600)

run_main(work)
"""


def test_ctrl_c_ends_a_command_in_compiled_code():
    with subprocess.Popen(
        [sys.executable, "-c", COMPILES], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "compiling\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == -signal.SIGINT


NAMESPACE = ["unshare", *([] if os.geteuid() == 0 else ["-r"]), "--pid", "--fork", "--kill-child"]
WAITS = """
import time
from jaxforge.cli.process import end_at_signals
end_at_signals()
print("waiting", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_command_that_is_first_process_of_container(number):
    """Linux discards signals to PID 1 without a handler, such as a Ctrl-C in `docker run`."""
    is_here = shutil.which("unshare")
    if not is_here or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("no pid namespaces here")
    command = [*NAMESPACE, sys.executable, "-c", WAITS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        (first,) = psutil.Process(process.pid).children()
        first.send_signal(number)
        try:
            assert process.wait(PATIENCE) == 128 + number
        finally:
            process.kill()


def test_ctrl_c_is_raised_for_cleanup():
    def interrupted():
        raise_interrupts()
        signal.raise_signal(signal.SIGINT)
        return 0

    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with pytest.raises(ZeroDivisionError):
            run_main(lambda: 1 // 0)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert run_main(interrupted) == 130
    finally:
        signal.signal(signal.SIGINT, previous)


def test_interactive_process_is_not_ended(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    end_now(1, flush=False)
    assert not ended
    monkeypatch.delattr(sys, "ps1")
    end_now(7, flush=False)
    assert ended == [7]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--xla_nope=3", "Unknown flag in XLA_FLAGS: --xla_nope=3"),
        ("--xla_force_host_platform_device_count=x", "Couldn't interpret value x for flag xla_fo"),
    ],
)
def test_invalid_xla_flags_are_user_errors(flags, message):
    """XLA would end the process with code 1, which leads to a restart."""
    program = (
        "from jaxforge.cli.running import run_main; exit(run_main(lambda: 0, uses_devices=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "XLA_FLAGS": flags}, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: XLA_FLAGS={flags}: {message}")
    assert done.stderr.count("\n") == 1
