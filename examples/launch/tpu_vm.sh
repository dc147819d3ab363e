#!/bin/bash
# A TPU VM slice without Kubernetes; runs on your own machine:
#     TPU=... ZONE=... examples/launch/tpu_vm.sh start --config=my_run.toml [--section.key=value ...]
#     TPU=... ZONE=... examples/launch/tpu_vm.sh stop      # after a checkpoint
#     TPU=... ZONE=... examples/launch/tpu_vm.sh log
# jaxforge is installed in ~/venv of every host, and the config lies in the home directory;
# checkpoint.dir and the data are on storage that every host mounts. JAX finds the hosts through the
# metadata server. A preempted VM does not come back: create it again, then `start`.
set -euo pipefail
action=$1
shift

on() { gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker="$1" --command="$2"; }

case $action in
  start)
    on all "nohup ~/venv/bin/jaxforge supervise -- ${*@Q} \
      >> supervise.log 2>&1 < /dev/null & echo \$! > supervise.pid"
    ;;
  stop) on all "kill -TERM \$(cat supervise.pid)" ;;
  log) on 0 "tail -n 50 -f supervise.log" ;;
  *)
    echo "say start, stop or log" >&2
    exit 2
    ;;
esac
