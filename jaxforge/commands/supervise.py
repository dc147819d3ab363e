"""`jaxforge supervise [options] -- COMMAND`: run a command and restart it on failure."""

import argparse
import functools
import hashlib
import logging
import os
import shlex
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.errors import UserError
from jaxforge.storage import trust, urls
from jaxforge.supervision.supervisor import Policy, Supervisor

if TYPE_CHECKING:
    from jaxforge.config.job import JobConfig

_ABOUT = """\
`jaxforge supervise [options] -- COMMAND`: run a command and restart it on failure.

    jaxforge supervise -- jaxforge train --config FILE ...
    jaxforge supervise -- --config FILE ...        short form

The exit code decides about a restart (`jaxforge.exit_codes`). The pause before a restart doubles
until a start makes progress, which means that it writes a newer checkpoint. SIGTERM, SIGINT,
SIGUSR1 and SIGHUP are forwarded to the command. The supervisor then exits with the code of the
command, without a restart. With `--nproc N`, N processes run on this machine, connected by the
variables that `parallel.multihost` reads. If one of them fails, the others are stopped and all are
restarted. No started process outlives the supervisor.

With `--elastic`, the job has several hosts, each with a supervisor. When hosts are lost, the others
continue from the newest checkpoint with the same batches. Hosts that return join at the next save:

    jaxforge supervise --elastic --hosts 2:4 --peers a:7070,b:7070,c:7070,d:7070 -- ...

In the pods of a JobSet, `--engine jobset` takes the peers from the names of the pods.

With `--engine ray`, Ray places the hosts and replaces lost ones. The command is then run once:

    jaxforge supervise --elastic --engine ray --hosts 2:4 --host-resources GPU=8 -- ...
"""

_SECRET = "JAXFORGE_JOB_SECRET"
_HANG_TIMEOUT_SEC = 30.0  # if train.hang_timeout is off
_POD_PORT = 7070
_INDEX_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "GROUP_RANK")


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise a command; return the exit code."""
    args = parser().parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UserError("a command is required: -- jaxforge train --config FILE ...")
    # The short form, with options of `jaxforge train` alone.
    if command[0].startswith("-"):
        command = [sys.executable, "-m", "jaxforge.train", *command]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s supervise: %(message)s")
    policy = Policy(
        args.max_restarts, args.backoff, args.backoff_cap, args.grace, args.peer_grace,
        frozenset(args.restart_on),
    )  # fmt: skip
    if args.elastic:
        return _supervise_elastic(args, command, policy)
    return Supervisor(command, args.nproc, policy, run_directory(command)).run()


def _supervise_elastic(args: argparse.Namespace, command: Sequence[str], policy: Policy) -> int:
    """Take part in an elastic job, or run all of it on a Ray cluster; return the exit code."""
    # The only part that needs pydantic, for messages of other hosts.
    from jaxforge.supervision.elastic import ElasticSupervisor, Hosts

    addresses = _addresses(args)
    least, most = _host_range(args.hosts, len(addresses))
    index = _host_index(args.host_index, addresses) if addresses else 0
    resources = _resources(args.host_resources) if args.engine == "ray" else {}
    if _arguments_of_train(command) is None:
        raise UserError("--elastic supervises `jaxforge train`: its batches are adapted")
    config = _train_config(command)
    timeout = args.hang_timeout
    if timeout is None:
        timeout = (config.train.hang_timeout if config else 0.0) or _HANG_TIMEOUT_SEC
    elastic = {"elastic_processes": most * args.nproc, "elastic_min_processes": least * args.nproc}
    command = [*command, *(f"--distributed.{key}={value}" for key, value in elastic.items())]
    run = urls.path(config.checkpoint.dir, "checkpoint.dir") if config else None
    # With peers and command, so that hosts of another job cannot join by mistake. Only one process
    # starts a job on Ray: its key is new.
    secret = f"{os.environ.get(_SECRET, '')}\n{','.join(addresses)}\n{shlex.join(command)}"
    key = hashlib.sha256(secret.encode()).hexdigest() if addresses else uuid.uuid4().hex
    hosts = Hosts(most, index, least, args.host_multiple, key, timeout, args.join_timeout)
    if args.engine == "ray":
        from jaxforge.supervision import ray_engine

        return ray_engine.supervise(command, args.nproc, policy, run, hosts, resources)
    from jaxforge.supervision.members import Members

    connect = functools.partial(Members, addresses, index, key, timeout)
    return ElasticSupervisor(command, args.nproc, policy, run, hosts, connect).run()


def _addresses(args: argparse.Namespace) -> list[str]:
    """Return the address of each host's supervisor; none on Ray, which places the hosts."""
    if args.engine == "peers":
        addresses = [address for address in args.peers.split(",") if address.strip()]
        if not addresses:
            raise UserError("--elastic requires --peers: the address of each host's supervisor")
        if (most := _host_range(args.hosts, len(addresses))[1]) != len(addresses):
            raise UserError(
                f"--hosts {args.hosts} has at most {most} hosts, but --peers lists {len(addresses)}"
            )
        return addresses
    if not args.hosts:
        raise UserError(f"--engine {args.engine} requires --hosts MIN:MAX, such as 2:4")
    return _pods(_host_range(args.hosts, 0)[1]) if args.engine == "jobset" else []


def _resources(text: str) -> dict[str, float]:
    """Return the resources of a host by their names, of "GPU=8,CPU=16"."""
    pairs = [item.partition("=")[::2] for item in text.split(",")]
    try:
        return {name.strip(): float(number) for name, number in pairs}
    except ValueError as error:
        raise UserError(
            f"--host-resources {text}: give NAME=N,... with what Ray reserves for each host, such "
            "as GPU=8"
        ) from error


def _pods(count: int) -> list[str]:
    """Return the addresses of the pods of an Indexed Job, by the name of this pod.

    The names of pods differ in their last number, and stay when pods are replaced.
    """
    name, _, domain = socket.getfqdn().partition(".")
    stem, _, index = name.rpartition("-")
    if not (stem and domain) or index != os.environ.get("JOB_COMPLETION_INDEX"):
        raise UserError(
            f"--engine jobset: {socket.getfqdn()} is not the name of a pod of a JobSet: it must "
            "end with JOB_COMPLETION_INDEX and have a domain. Elsewhere, set --peers"
        )
    return [f"{stem}-{i}.{domain}:{_POD_PORT}" for i in range(count)]


def _host_range(text: str | None, n_hosts: int) -> tuple[int, int]:
    """Return the smallest and largest number of hosts; by default 1 and all."""
    if text is None:
        return 1, n_hosts
    least, colon, most = text.partition(":")
    if not (least.isdigit() and (most.isdigit() or not colon)):
        raise UserError(f"--hosts {text}: give MIN:MAX, such as 2:4")
    numbers = int(least), int(most or least)
    if not 1 <= numbers[0] <= numbers[1]:
        raise UserError(f"--hosts {text}: MIN must be at least 1, and at most MAX")
    return numbers


def _host_index(index: int | None, addresses: Sequence[str]) -> int:
    """Return the number of this host: the option, the scheduler's, or that of its name."""
    from jaxforge.supervision.members import parse_address

    names = [parse_address(address)[0] for address in addresses]
    for variable in _INDEX_VARIABLES:
        if index is None and os.environ.get(variable, "").isdigit():
            index = int(os.environ[variable])
    if index is None:
        local_names = {
            socket.gethostname(),
            socket.gethostname().partition(".")[0],
            socket.getfqdn(),
        }
        matching = [i for i, name in enumerate(names) if name in local_names]
        # Two supervisors on one host have the same name, which then does not tell the number.
        index = matching[0] if len(matching) == 1 else None
    if index is None or not 0 <= index < len(addresses):
        raise UserError(
            f"the number of this host in --peers is {'unknown' if index is None else index}: set "
            f"--host-index from 0 to {len(addresses) - 1}"
        )
    return index


def run_directory(command: Sequence[str]) -> Path | None:
    """Return the run directory of a command that trains; None for other commands.

    Raises:
        UserError: the config cannot be loaded.
    """
    config = _train_config(command)
    return urls.path(config.checkpoint.dir, "checkpoint.dir") if config else None


def _train_config(command: Sequence[str]) -> "JobConfig | None":
    """Return the config of a command that trains; None for other commands."""
    arguments = _arguments_of_train(command)
    if arguments is None:
        return None
    from jaxforge.commands import train  # takes half a second to import
    from jaxforge.config.reading.load import load_config

    args, overrides = train.parser().parse(arguments)
    if not args.config:
        return None
    config = load_config(args.config, overrides, trust.never)
    return getattr(config, "known", config)


def _arguments_of_train(command: Sequence[str]) -> Sequence[str] | None:
    """Return the arguments of the supervised `jaxforge train` command, or None."""
    for i, word in enumerate(command):
        if word == "jaxforge.train":
            return command[i + 1 :]
        if Path(word).name == "jaxforge" and command[i + 1 : i + 2] == ["train"]:
            return command[i + 2 :]
    return None


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "supervise", description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--max-restarts", type=int, default=10, metavar="N",
        help="consecutive restarts without a newer checkpoint (10)")  # fmt: skip
    add("--backoff", type=float, default=5.0, metavar="SEC",
        help="seconds before the first restart, then doubled (5)")  # fmt: skip
    add("--backoff-cap", type=float, default=300.0, metavar="SEC",
        help="maximum pause before a restart (300)")  # fmt: skip
    add("--grace", type=float, default=630.0, metavar="SEC",
        help="seconds between a forwarded signal and SIGKILL (630, slightly more than "
        "train.shutdown_timeout_sec)")  # fmt: skip
    add("--peer-grace", type=float, default=30.0, metavar="SEC",
        help="seconds until the other processes are killed after one has failed (30)")  # fmt: skip
    add("--nproc", type=int, default=1, metavar="N",
        help="processes on this machine, one GPU each (1)")  # fmt: skip
    add("--restart-on", type=int, action="append", default=[], metavar="CODE",
        help="further exit code that leads to a restart, such as 75; repeatable")  # fmt: skip
    add(
        "--elastic",
        action="store_true",
        help="take part in a job whose hosts may leave and return; run this on every host",
    )
    add("--hosts", metavar="MIN:MAX", help="numbers of hosts of an elastic job (1 to all)")
    add(
        "--engine",
        choices=["peers", "jobset", "ray"],
        default="peers",
        help="what starts and replaces the hosts: you or Slurm, with --peers (the default); "
        "Kubernetes, in the pods of a JobSet; a Ray cluster",
    )
    add(
        "--host-resources",
        default="",
        metavar="NAME=N,...",
        help="what Ray reserves for each host, such as GPU=8",
    )
    add(
        "--peers",
        default="",
        metavar="NAME:PORT,...",
        help="address of each host's supervisor, in the same order on every host",
    )
    add(
        "--host-index",
        type=int,
        metavar="N",
        help="number of this host in --peers, from 0 (SLURM_NODEID, JOB_COMPLETION_INDEX, or by "
        "its name)",
    )
    add(
        "--host-multiple",
        type=int,
        default=1,
        metavar="N",
        help="hosts that hold one copy of the model together, and leave together (1)",
    )
    add(
        "--hang-timeout",
        type=float,
        metavar="SEC",
        help="seconds until a silent host counts as lost (train.hang_timeout)",
    )
    add("--join-timeout", type=float, default=300.0, metavar="SEC",
        help="seconds that the first start waits for all hosts (300)")  # fmt: skip
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


entry = functools.partial(run_main, main, outlives_reader=True)
