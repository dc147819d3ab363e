#!/bin/bash
# A TPU slice through XPK, which writes the JobSet itself:
#     CLUSTER=... PROJECT=... ZONE=... IMAGE=... examples/launch/xpk.sh my-run v6e-16 \
#         --config=/run/shared/my_run.toml [--section.key=value ...]
# Several slices: SLICES=2, and --distributed.dp_replicate=2 (or pp), which goes between them.
# The image has jaxforge; the config, the data and checkpoint.dir are on storage that the cluster
# mounts (`xpk storage attach`). XPK leaves pods 30 s after SIGTERM; where a checkpoint takes longer,
# say --termination-grace-period-seconds. 75 is a stop after a checkpoint: all pods start again.
set -euo pipefail
name=$1 type=$2
shift 2

xpk workload create \
  --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" \
  --workload="$name" --tpu-type="$type" --num-slices="${SLICES:-1}" \
  --docker-image="$IMAGE" \
  --max-restarts=50 --restart-on-exit-codes=75 \
  --command="exec jaxforge supervise --grace 25 -- ${*@Q}"
