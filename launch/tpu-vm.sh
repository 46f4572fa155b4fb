#!/usr/bin/env bash
# Trains on Google Cloud TPU VMs, got as a queued resource: creates it, installs lmres on every host, starts the run on
# all of them, and after a preemption does so again until the run is finished. Then deletes it.
#
#   launch/tpu-vm.sh --name mine --project P --zone Z --tpu-type v6e-16 --runtime-version v2-alpha-tpuv6e \
#       --install 'lmres[tpu,gcs]' configs/125m.yaml --folder gs://BUCKET/mine
#
# Ctrl-C here stops the watching; the hosts go on. The same command takes up the watching again: what runs is told to
# save and stop, and goes on. For more or fewer hosts run `launch/tpu-vm.sh --action delete ...` and then the command
# with another --tpu-type or --node-count. Needs gcloud, logged in; the hosts need access to the bucket.
#
# Options, or environment variables (--tpu-type T is LMRES_TPU_TYPE=T):
#   --name N             of the queued resource (lmres)
#   --project P, --zone Z
#   --tpu-type T         such as v5litepod-16, v6e-8
#   --runtime-version V  the image of the hosts
#   --node-count N       slices, for a multislice run (1)
#   --spot yes|no        (yes)
#   --install SPEC       what pip installs on the hosts: lmres[tpu], a wheel, a repository
#   --python P           on the hosts, 3.11 or newer (python3)
#   --setup COMMAND      runs on every host before pip: to install that Python, to mount a disk
#   --max-relaunches N   (100)
#   --poll S             seconds between two looks at the state (30)
#   --keep yes|no        keep the TPU when the run is finished (no)
#   --action A           run; or setup, delete: only that (run)
#   --dry-run            print the commands of one start and stop

set -euo pipefail
LAUNCHER=${BASH_SOURCE[0]}
# shellcheck source=launch/common.sh
source "$(dirname "$LAUNCHER")/common.sh"

parse_options "NAME=lmres PROJECT= ZONE= TPU_TYPE= RUNTIME_VERSION= NODE_COUNT=1 SPOT=yes INSTALL= PYTHON=python3 SETUP=
    MAX_RELAUNCHES=100 POLL=30 KEEP=no ACTION=run" "$@"
need PROJECT "the Google Cloud project"
need ZONE "the zone of the TPU"
need_count NODE_COUNT 1
need_count MAX_RELAUNCHES 0
need_count POLL 0
need_program gcloud "see the Google Cloud CLI's own documentation"

tpus() { # tpus VERB ...: on the queued resource
    run gcloud compute tpus queued-resources "$1" "$NAME" --project="$PROJECT" --zone="$ZONE" "${@:2}"
}
on_every_host() {
    tpus ssh --node=all --worker=all --batch-size=all --command="$1"
}

create() {
    local options=(--accelerator-type="$TPU_TYPE" --runtime-version="$RUNTIME_VERSION")
    if ((NODE_COUNT > 1)); then options+=(--node-count="$NODE_COUNT" --node-prefix="$NAME"); else options+=(--node-id="$NAME"); fi
    [[ $SPOT != yes ]] || options+=(--spot)
    tpus create "${options[@]}"
}
delete() {
    tpus delete --force --quiet
}
# The state, MISSING for none. Other failures (no login, no permission) end the launcher with gcloud's own words.
state() {
    local told
    if told=$(gcloud compute tpus queued-resources describe "$NAME" --project="$PROJECT" --zone="$ZONE" \
        --format='value(state.state)' 2>&1); then
        tail -n 1 <<<"$told"
    elif grep -qi "not.\?found" <<<"$told"; then
        echo MISSING
    else
        echo "$told" >&2
        return 1
    fi
}
# Until the TPU is there, whatever is there now.
acquire() {
    local now
    [[ -z $DRY_RUN ]] || { create && return; }
    while :; do
        now=$(state)
        case $now in
            ACTIVE) return ;;
            MISSING) create ;;
            SUSPENDED | FAILED) delete ;;
            *) echo "$NAME is $now" >&2 && sleep "$POLL" ;;
        esac
    done
}
setup() {
    # shellcheck disable=SC2088 # the tilde is the host's
    local venv='~/lmres-venv'
    on_every_host "${SETUP:+$SETUP && }$PYTHON -m venv $venv && $venv/bin/pip install -q -U $(quoted "$INSTALL")"
}
send_config() {
    [[ ! -f $config ]] || run gcloud compute tpus queued-resources scp "$config" "$NAME:" --project="$PROJECT" \
        --zone="$ZONE" --node=all --worker=all --batch-size=all
}
# A run that a broken connection left behind still holds the TPU: it is told to save, and waited for.
start() {
    # shellcheck disable=SC2016 # for the host's shell
    local stop='if pid=$(cat lmres.pid 2>/dev/null) && kill -TERM "$pid" 2>/dev/null; then tail --pid="$pid" -f /dev/null; fi'
    on_every_host "$stop; echo \$\$ >lmres.pid; exec $(quoted "${TRAIN[@]}")"
}

if [[ $ACTION == delete ]]; then
    delete
    exit
fi
[[ $ACTION == run || $ACTION == setup ]] || die "--action $ACTION: must be run, setup or delete"
need TPU_TYPE "the accelerator type, such as v6e-8"
need RUNTIME_VERSION "the image of the hosts, such as v2-alpha-tpuv6e"
need INSTALL "what pip installs on the hosts, such as 'lmres[tpu]' or the address of a wheel"
if [[ $ACTION == setup ]]; then
    acquire
    setup
    exit
fi
[[ $PROGRAM != lmres ]] || PROGRAM=lmres-venv/bin/lmres
config=${ARGS[0]:-}
[[ ! -f $config ]] || ARGS[0]=$(basename "$config") # sent to the hosts
train_command durable

for ((relaunches = 0; ; relaunches++)); do
    acquire
    code=0
    { setup && send_config && start; } || code=$?
    [[ -z $DRY_RUN ]] || break
    ((code)) || { echo "the run is finished" >&2 && break; }
    now=$(state)
    # What lmres says of itself (an error, a usage error, divergence) would come again; the rest is the machine's doing.
    if [[ $now == ACTIVE ]] && ((code <= 3)); then
        echo "the run failed with exit code $code, see above; $NAME is kept: --action delete deletes it" >&2
        exit "$code"
    fi
    if ((relaunches >= MAX_RELAUNCHES)); then
        echo "the run ended with exit code $code; not started again: --max-relaunches $MAX_RELAUNCHES" >&2
        exit "$code"
    fi
    echo "the run ended with exit code $code, $NAME is $now: starting it again" >&2
done
[[ $KEEP == yes ]] || delete
