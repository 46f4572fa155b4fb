#!/usr/bin/env bash
# Trains with several processes on this machine, on its CPU or its GPUs.
#
#   launch/local.sh --processes 2 configs/small.yaml --folder runs/two
#   launch/local.sh --processes 8 --gpus 8 configs/125m.yaml --folder runs/eight
#
# Runs `lmres train CONFIG ... --distributed --resume` once per process. The first process that fails ends the others,
# and its exit code is the launcher's. Ctrl-C and SIGTERM are passed on to all, which then save and stop (130, 143);
# the same command goes on from there, also with another number of processes.
#
# Options, or environment variables (--cpu-devices N is LMRES_CPU_DEVICES=N):
#   --processes N      how many (1)
#   --gpus N           of this machine, shared out evenly; without it the processes run on the CPU
#   --cpu-devices N    simulated devices of each process, on the CPU (1)
#   --port P           where process 0 is found; any free one
#   --grace S          seconds for the others to end once one has failed, before they are killed (20)
#   --dry-run          print the commands and stop
#   --program P        "python -m lmres" for one that is not installed (lmres)

set -euo pipefail
LAUNCHER=${BASH_SOURCE[0]}
# shellcheck source=launch/common.sh
source "$(dirname "$LAUNCHER")/common.sh"

parse_options "PROCESSES=1 GPUS=0 CPU_DEVICES=1 PORT= GRACE=20" "$@"
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)) || die "needs bash 5.1 or newer, this is $BASH_VERSION"
need_count PROCESSES 1
need_count GPUS 0
need_count CPU_DEVICES 1
need_count GRACE 0
((GPUS % PROCESSES == 0)) || die "--gpus $GPUS cannot be shared out evenly among --processes $PROCESSES"
train_command

free_port() {
    local port
    for _ in {1..50}; do
        port=$((20000 + RANDOM % 12000)) # below the range from which systems take ports for outgoing connections
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port" && return; }
    done
    die "no free port found; name one with --port"
}
[[ -n $PORT ]] || PORT=$(free_port)

# Sets ENV for process $1: what jax.distributed.initialize finds the others by, and the devices that are its own.
environment() {
    ENV=("JAX_COORDINATOR_ADDRESS=127.0.0.1:$PORT" "JAX_NUM_PROCESSES=$PROCESSES" "JAX_PROCESS_ID=$1")
    if ((GPUS)); then
        local each=$((GPUS / PROCESSES))
        ENV+=("JAX_LOCAL_DEVICE_IDS=$(seq -s, $(($1 * each)) $(($1 * each + each - 1)))")
    else
        ENV+=(JAX_PLATFORMS=cpu "JAX_NUM_CPU_DEVICES=$CPU_DEVICES")
    fi
}

if [[ -n $DRY_RUN ]]; then
    for ((i = 0; i < PROCESSES; i++)); do
        environment "$i"
        run env "${ENV[@]}" "${TRAIN[@]}"
    done
    exit 0
fi

PIDS=()
STOPPING=""

# Each process is a job with a group of its own (set -m), so that a Ctrl-C in the terminal reaches it once, through us,
# and is not ignored, as it is in the background jobs of a script otherwise.
signal_all() {
    local pid
    for pid in "${PIDS[@]}"; do
        kill -"$1" -- "-$pid" 2>/dev/null || true # has ended
    done
}
# shellcheck disable=SC2329 # by the traps
pass_on() {
    STOPPING=$1
    signal_all "$1"
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
trap 'signal_all KILL' EXIT

set -m
for ((i = 0; i < PROCESSES; i++)); do
    environment "$i"
    env "${ENV[@]}" "${TRAIN[@]}" </dev/null &
    PIDS+=($!)
done

# A process that fails leaves the others waiting for it, with SIGTERM in jax's hands: they are told, then killed.
give_up() {
    signal_all TERM
    local left=$((GRACE * 10))
    while ((left-- > 0)) && [[ -n $(jobs -pr) ]]; do sleep 0.1; done
}

CODE=0
RUNNING=$PROCESSES
while ((RUNNING)); do
    ended=""
    status=0
    wait -n -p ended "${PIDS[@]}" || status=$?
    [[ -n ${ended:-} ]] || continue # a signal came, and was passed on
    RUNNING=$((RUNNING - 1))
    for i in "${!PIDS[@]}"; do
        [[ ${PIDS[i]} != "$ended" ]] || { unset "PIDS[i]" && break; }
    done
    if ((status && !CODE)); then
        CODE=$status
        # All stop at the same step when told to; the rest are ending too.
        if [[ -z $STOPPING ]] || ((status != 143 && status != 130)); then
            echo "process $i of $PROCESSES ended with exit code $status; ending the others" >&2
            give_up
            break
        fi
    fi
done
exit "$CODE"
