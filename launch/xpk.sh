#!/usr/bin/env bash
# Trains on a GKE cluster through xpk, which must be installed and know the cluster (`xpk cluster create`).
#
#   launch/xpk.sh --cluster C --project P --zone Z --device-type v6e-16 --image IMAGE \
#       configs/125m.yaml --folder gs://BUCKET/mine
#
# The image holds lmres and the config. A host that is taken away gets SIGTERM: the run saves, and the workload starts
# again and goes on. To go on with more or fewer slices, `launch/xpk.sh --action delete ...`, and then the command with
# another --num-slices or --device-type.
#
# Options, or environment variables (--device-type T is LMRES_DEVICE_TYPE=T):
#   --cluster C, --project P, --zone Z
#   --name N            of the workload (lmres)
#   --device-type T     TPU or GPU type as xpk names it: v5litepod-16, v6e-8, h100-80gb-8
#   --num-slices N      TPU slices (1)
#   --num-nodes N       GPU nodes (1)
#   --image IMAGE
#   --max-restarts N    (100)
#   --grace S           seconds to save in when a host is taken away (300)
#   --action A          run or delete (run)
#   --dry-run           print the command and stop

set -euo pipefail
LAUNCHER=${BASH_SOURCE[0]}
# shellcheck source=launch/common.sh
source "$(dirname "$LAUNCHER")/common.sh"

parse_options "CLUSTER= PROJECT= ZONE= NAME=lmres DEVICE_TYPE= NUM_SLICES=1 NUM_NODES=1 IMAGE= MAX_RESTARTS=100 GRACE=300
    ACTION=run" "$@"
need CLUSTER "the GKE cluster"
need PROJECT "the Google Cloud project"
need ZONE "the zone of the cluster"
need_program xpk "pip install xpk"

where=(--cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" --workload="$NAME")
case $ACTION in
    delete) run xpk workload delete "${where[@]}" && exit ;;
    run) ;;
    *) die "--action $ACTION: must be run or delete" ;;
esac
need DEVICE_TYPE "the TPU or GPU type, such as v6e-16"
need IMAGE "the container image with lmres and the config"
need_count NUM_SLICES 1
need_count NUM_NODES 1
need_count MAX_RESTARTS 0
need_count GRACE 1
train_command durable
# exec: xpk passes SIGTERM to the shell that it starts for the command, which lmres takes the place of.
run xpk workload create "${where[@]}" --device-type="$DEVICE_TYPE" --num-slices="$NUM_SLICES" --num-nodes="$NUM_NODES" \
    --docker-image="$IMAGE" --max-restarts="$MAX_RESTARTS" --restart-on-exit-codes=143 \
    --termination-grace-period-seconds="$GRACE" --command="exec $(quoted "${TRAIN[@]}")"
