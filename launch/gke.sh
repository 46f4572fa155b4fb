#!/usr/bin/env bash
# Trains on TPU or GPU nodes of a Kubernetes cluster that has the JobSet controller (GKE, with kubectl pointing at it).
#
#   launch/gke.sh --kind tpu --accelerator tpu-v6e-slice --topology 4x4 --nodes 4 --chips 4 --image IMAGE \
#       configs/125m.yaml --folder gs://BUCKET/mine
#   launch/gke.sh --kind gpu --accelerator nvidia-h100-80gb --nodes 4 --chips 8 --image IMAGE \
#       configs/125m.yaml --folder gs://BUCKET/mine
#
# The image holds lmres and the config. A pod that is evicted gets SIGTERM: the run saves, and the JobSet starts again
# and goes on. To go on with more or fewer nodes, `launch/gke.sh --action delete`, and then the command with other
# numbers. launch/gke-jobset.yaml is the manifest.
#
# Options, or environment variables (--max-restarts N is LMRES_MAX_RESTARTS=N):
#   --kind tpu|gpu
#   --accelerator A     the node label: cloud.google.com/gke-tpu-accelerator, or gke-accelerator
#   --topology T        of a TPU slice: 2x4, 4x4 ...
#   --nodes N           per slice, or GPU nodes (1)
#   --slices N          TPU slices (1)
#   --chips N           TPU chips or GPUs per node
#   --image IMAGE
#   --name N            (lmres)
#   --namespace N       (the current one of kubectl)
#   --max-restarts N    after failures; preemptions do not count (3)
#   --grace S           seconds to save in (300)
#   --action A          run, delete, or print the manifest (run)
#   --dry-run           print the command and the manifest and stop

set -euo pipefail
LAUNCHER=${BASH_SOURCE[0]}
# shellcheck source=launch/common.sh
source "$(dirname "$LAUNCHER")/common.sh"

parse_options "KIND= ACCELERATOR= TOPOLOGY= NODES=1 SLICES=1 CHIPS= IMAGE= NAME=lmres NAMESPACE= MAX_RESTARTS=3 GRACE=300
    ACTION=run" "$@"
[[ $NAME =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] || die "--name $NAME: must be lower-case letters, digits and hyphens"
kubectl=(kubectl)
[[ -z $NAMESPACE ]] || kubectl+=(--namespace "$NAMESPACE")

# A value as YAML reads it back, whatever is in it.
json() {
    local text=${1//\\/\\\\}
    text=${text//\"/\\\"}
    text=${text//$'\n'/\\n}
    printf '"%s"' "${text//$'\t'/\\t}"
}
json_list() {
    local word line=""
    for word in "$@"; do line+=", $(json "$word")"; done
    printf '[%s]' "${line#, }"
}

manifest() {
    local line place values=(
        NAME "$(json "$NAME")" IMAGE "$(json "$IMAGE")" ACCELERATOR "$(json "$ACCELERATOR")"
        TOPOLOGY "$(json "$TOPOLOGY")" COMMAND "$(json_list "${TRAIN[@]}")" NODES "$NODES" SLICES "$SLICES"
        CHIPS "$CHIPS" MAX_RESTARTS "$MAX_RESTARTS" GRACE "$GRACE" PROCESSES "$(json "$NODES")"
        COORDINATOR "$(json "$NAME-workers-0-0.$NAME:8476")"
    )
    while IFS= read -r line; do
        if [[ $line =~ ^(.*[^[:space:]])[[:space:]]*#(tpu|gpu)$ ]]; then
            [[ ${BASH_REMATCH[2]} == "$KIND" ]] || continue
            line=${BASH_REMATCH[1]}
        fi
        [[ $line =~ ^[[:space:]]*# ]] && continue
        for ((i = 0; i < ${#values[@]}; i += 2)); do
            place=@${values[i]}@
            # One each, and the value is not looked at again: it may hold an @ of its own.
            [[ $line == *"$place"* ]] && line=${line%%"$place"*}${values[i + 1]}${line#*"$place"} && break
        done
        printf '%s\n' "$line"
    done <"$(dirname "$LAUNCHER")/gke-jobset.yaml"
}

case $ACTION in
    delete)
        need_program kubectl "see the Kubernetes documentation"
        run "${kubectl[@]}" delete jobset "$NAME" && exit
        ;;
    run | print) ;;
    *) die "--action $ACTION: must be run, delete or print" ;;
esac
[[ $KIND == tpu || $KIND == gpu ]] || die "--kind ${KIND:-(missing)}: must be tpu or gpu"
need ACCELERATOR "the label of the nodes, such as tpu-v6e-slice or nvidia-h100-80gb"
[[ $KIND == gpu ]] || need TOPOLOGY "of the TPU slice, such as 4x4"
[[ $KIND == tpu ]] || ((SLICES == 1)) || die "--slices $SLICES: are of TPUs; GPU nodes are counted by --nodes"
need IMAGE "the container image with lmres and the config"
need CHIPS "TPU chips or GPUs per node"
need_count NODES 1
need_count SLICES 1
need_count CHIPS 1
need_count MAX_RESTARTS 0
need_count GRACE 1
train_command durable
if [[ $ACTION == print ]]; then
    manifest
    exit
fi
need_program kubectl "see the Kubernetes documentation"
run "${kubectl[@]}" apply -f - <<<"$(manifest)"
[[ -z $DRY_RUN ]] || manifest
