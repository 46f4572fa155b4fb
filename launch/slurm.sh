#!/usr/bin/env bash
# Trains on the nodes of a Slurm cluster, with one process per GPU (per node, where there are none). Run it on the
# login node: it submits itself.
#
#   launch/slurm.sh --nodes 4 --gpus-per-node 8 configs/125m.yaml --folder /shared/runs/mine
#
# GRACE seconds before the time limit Slurm sends SIGTERM: all processes save and stop, and the job is queued again and
# goes on. A preempted job is queued again by Slurm itself. To go on with more or fewer nodes, cancel the job and submit
# it with another --nodes. A run that fails or diverges is not queued again.
#
# Options, or environment variables (--gpus-per-node N is LMRES_GPUS_PER_NODE=N):
#   --nodes N            (1)
#   --gpus-per-node N    0 for nodes without (0)
#   --grace S            seconds to save in before the time limit (120)
#   --max-restarts N     how often the job is queued again (100)
#   --job-name NAME      (lmres)
#   --dry-run            print the command and stop
#   --program P          such as /shared/venv/bin/lmres (lmres)
# All else as sbatch takes it: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT, SBATCH_CONSTRAINT ...

set -euo pipefail
# Slurm runs a copy of this file from a folder of its own.
LAUNCHER=${LMRES_LAUNCH:-$(realpath "$(dirname "${BASH_SOURCE[0]}")")}/slurm.sh
# shellcheck source=launch/common.sh
source "$(dirname "$LAUNCHER")/common.sh"

parse_options "NODES=1 GPUS_PER_NODE=0 GRACE=120 MAX_RESTARTS=100 JOB_NAME=lmres" "$@"
need_count NODES 1
need_count GPUS_PER_NODE 0
need_count GRACE 1
need_count MAX_RESTARTS 0
train_command durable

if [[ -z ${LMRES_LAUNCH:-} || -z ${SLURM_JOB_ID:-} ]]; then # not in the job yet
    need_program sbatch "this is to be run on a login node of a Slurm cluster"
    tasks=$((GPUS_PER_NODE ? GPUS_PER_NODE : 1))
    options=(--job-name="$JOB_NAME" --nodes="$NODES" --ntasks-per-node="$tasks")
    # One task per GPU, each of which sees all of them and takes that of its rank on the node.
    ((GPUS_PER_NODE == 0)) || options+=(--gpus-per-node="$GPUS_PER_NODE")
    options+=(--signal="TERM@$GRACE" --requeue --open-mode=append)
    LMRES_LAUNCH=$(dirname "$LAUNCHER")
    export LMRES_LAUNCH LMRES_MAX_RESTARTS="$MAX_RESTARTS" LMRES_PROGRAM="$PROGRAM"
    run sbatch "${options[@]}" --export=ALL "$LAUNCHER" "${ARGS[@]}"
    exit 0
fi

step=(srun --kill-on-bad-exit=1)
if ((${SLURM_GPUS_PER_NODE:-0})); then
    step+=(--gpu-bind=none)
    TRAIN+=(--device gpu)
fi
trap : TERM # this shell lives on to queue the job again, once the processes have saved
code=0
run "${step[@]}" "${TRAIN[@]}" || code=$?
[[ -z $DRY_RUN ]] || exit 0

# Not when the job was cancelled, and not when Slurm preempts it, which queues it again itself: then it no longer runs.
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T || echo unknown)
if ((code == 143)) && [[ $state == RUNNING ]]; then
    if ((${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS)); then
        echo "stopped after saving; queueing job $SLURM_JOB_ID again" >&2
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "stopped after saving; not queued again: --max-restarts $MAX_RESTARTS" >&2
    fi
fi
exit "$code"
