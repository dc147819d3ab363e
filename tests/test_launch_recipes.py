"""The recipes of examples/launch parse, fit this command line, and queue again on 75 alone."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxforge.commands import supervise
from jaxforge.config.reading.load import load_config
from jaxforge.exit_codes import AGREED, Exit
from tests.machine import PATIENCE, wait_until

RECIPES = Path(__file__).parents[1] / "examples" / "launch"
# slurm_prepare.sbatch is what `jaxforge prepare --slurm` writes (test_slurm_array.py).
SBATCH = sorted(set(RECIPES.glob("*.sbatch")) - {RECIPES / "slurm_prepare.sbatch"})
SCRIPTS = sorted([*RECIPES.glob("*.sh"), *SBATCH])
JOBSETS = sorted(RECIPES.glob("*.yaml"))


def fits_the_command_line(command):
    """Return whether a command is the supervisor's, with the arguments of a training run."""
    at = command.index("supervise")
    remaining = supervise.parser().parse_args(command[at + 1 :]).command
    assert remaining[0] == "--"
    assert remaining[1].startswith("--config")
    load_config(
        None, [item for item in remaining[1:] if item.startswith("--") and "config" not in item]
    )
    return True


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(path):
    subprocess.run(["bash", "-n", path], check=True)
    joined = path.read_text().replace("\\\n", " ").replace("\\$", "$")
    (line,) = (x for x in joined.splitlines() if "jaxforge supervise" in x)
    command = line[line.index("jaxforge supervise") :].replace("${*@Q}", "--config=a")
    command = command.replace('"$@"', "a").partition(" >>")[0].rstrip('"& ')
    assert fits_the_command_line(shlex.split(command))


@pytest.mark.parametrize("path", JOBSETS, ids=lambda path: path.name)
def test_jobsets_are_of_one_piece(path):
    jobset = yaml.safe_load(path.read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert job["parallelism"] == job["completions"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        v["name"] for v in pod["volumes"]
    }
    assert fits_the_command_line(container["command"] + container["args"])
    grace = int(container["command"][2].removeprefix("--grace="))
    assert grace < pod["terminationGracePeriodSeconds"]
    env = {item["name"]: item.get("value") for item in container.get("env", [])}
    if env:
        assert int(env["JAX_NUM_PROCESSES"]) == job["parallelism"]
        name = jobset["metadata"]["name"]
        assert env["JAX_COORDINATOR_ADDRESS"] == f"{name}-{replicated['name']}-0-0.{name}:1234"
    if "--elastic" in container["command"]:
        (hosts,) = (x for x in container["command"] if x.startswith("--hosts="))
        assert hosts.endswith(f":{job['parallelism']}")
        assert job["completionMode"] == "Indexed"
        assert job["backoffLimit"] > 0  # a lost pod is replaced alone
    else:
        check_probes(container)


def test_pods_of_an_elastic_jobset_know_their_peers(monkeypatch):
    """Each pod finds the same addresses, from its own name."""
    jobset = yaml.safe_load((RECIPES / "jobset_elastic.yaml").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    name, count = jobset["metadata"]["name"], replicated["template"]["spec"]["parallelism"]
    pods = [f"{name}-{replicated['name']}-0-{i}.{name}.default.svc.cluster.local"
            for i in range(count)]  # fmt: skip
    for index, pod in enumerate(pods):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        monkeypatch.setattr("socket.getfqdn", lambda pod=pod: pod)
        assert supervise._pods(count) == [f"{pod}:7070" for pod in pods]


def check_probes(container):
    """All probes request a path that the run serves, at the port that its arguments set."""
    (option,) = (x for x in container["args"] if x.startswith("--metrics.prometheus_port="))
    (port,) = container["ports"]
    assert port["containerPort"] == int(option.partition("=")[2])
    paths = {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    for name, path in paths.items():
        assert container[f"{name}Probe"]["httpGet"] == {"path": path, "port": port["name"]}
    liveness = container["livenessProbe"]  # the supervisor restarts the process in this time
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 1800


@pytest.mark.parametrize("path", JOBSETS, ids=lambda path: path.name)
def test_jobsets_give_up_where_the_supervisor_does(path):
    (replicated,) = yaml.safe_load(path.read_text())["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy demands it
    rule, *ignored = job["podFailurePolicy"]["rules"]
    assert all(rule["action"] == "Ignore" for rule in ignored)
    assert rule["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    stopped = AGREED - {Exit.NON_FINITE}  # on purpose, or to go on elsewhere
    assert rule["onExitCodes"]["values"] == [
        x.code for x in Exit if not x.again and x not in stopped
    ]


@pytest.fixture
def cluster(tmp_path):
    """A `srun` that ends as the test says, and a `scontrol` that writes down what it is asked."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(
        "#!/bin/bash\nprintf '%s\\n' \"$@\" > arguments\n"
        "trap 'touch ring_shift; exit 75' USR1\ntouch started\n"
        '[ -n "$CODE" ] && exit "$CODE"\n'
        "for _ in $(seq 30000); do sleep 0.1; done\n"
    )
    (tools / "scontrol").write_text('#!/bin/bash\necho "$@" > requeued\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_ID": "17", "CODE": ""}


def submit(path, directory, env):
    command = ["bash", path, "my run.toml", "--train.seed=1"]
    return subprocess.Popen(command, cwd=directory, env=env)


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
@pytest.mark.parametrize("sig", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_to_the_script_reaches_the_tasks_and_queues_it_again(path, sig, cluster, tmp_path):
    script = submit(path, tmp_path, cluster)
    wait_until((tmp_path / "started").exists)
    script.send_signal(sig)
    assert script.wait(PATIENCE) == 75
    assert (tmp_path / "ring_shift").exists()
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[-3:] == ["--config", "my run.toml", "--train.seed=1"]


@pytest.mark.slow
@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_signal_before_the_script_knows_its_step_is_not_lost(path, cluster, tmp_path):
    """On a busy machine the step may be at work before the script has its number."""
    slow = tmp_path / "slow.sh"
    slow.write_text("case $0 in *sbatch) trap 'sleep 0.2' DEBUG;; esac\n")
    script = submit(path, tmp_path, {**cluster, "BASH_ENV": str(slow)})
    wait_until((tmp_path / "started").exists)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(PATIENCE) == 75
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
@pytest.mark.parametrize("code", [0, 1, 2, 65, 134, 137])
def test_other_ends_stay_ends(path, code, cluster, tmp_path):
    assert submit(path, tmp_path, {**cluster, "CODE": str(code)}).wait(PATIENCE) == code
    assert not (tmp_path / "requeued").exists()
