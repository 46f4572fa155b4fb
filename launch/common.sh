# shellcheck shell=bash
# What the launchers share; each of them sources this file. Every setting of a launcher is an option, or an environment
# variable: --job-name X is LMRES_JOB_NAME=X. The first word that is no option, and all after it, is for `lmres train`.

DRY_RUN=""
ARGS=()

die() {
    echo "error: $*" >&2
    exit 2
}

# The comment at the head of the launcher is its help.
usage() {
    sed -n '2,/^[^#]/ { /^#/ s/^# \{0,1\}//p }' "$LAUNCHER"
}

# option SETTING: how it is spelt on the command line.
option() {
    tr '[:upper:]_' '[:lower:]-' <<<"--$1"
}

# parse_options "SETTING=default ..." "$@": fills the settings, DRY_RUN, and ARGS with what is for `lmres train`.
parse_options() {
    local known=" " setting entry variable
    for entry in $1 PROGRAM=lmres; do
        setting=${entry%%=*} variable=LMRES_${entry%%=*}
        known+="$setting "
        printf -v "$setting" %s "${!variable:-${entry#*=}}"
    done
    shift
    while (($#)); do
        case $1 in
            -h | --help) usage && exit 0 ;;
            --dry-run) DRY_RUN=1 && shift ;;
            --) shift && ARGS=("$@") && return ;;
            --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
            --*)
                setting=${1#--} && setting=${setting//-/_} && setting=${setting^^}
                [[ $known == *" $setting "* ]] || die "unknown option $1; $(basename "$LAUNCHER") --help lists them"
                (($# > 1)) || die "$1 needs a value"
                printf -v "$setting" %s "$2"
                shift 2
                ;;
            *) ARGS=("$@") && return ;;
        esac
    done
}

# need SETTING "what it is": ends with a readable line where the setting is missing.
need() {
    [[ -n ${!1} ]] || die "$(option "$1") (or LMRES_$1) is missing: $2"
}

# need_count SETTING SMALLEST
need_count() {
    if ! [[ ${!1} =~ ^[0-9]+$ ]] || ((${!1} < $2)); then die "$(option "$1") ${!1}: must be a whole number from $2 on"; fi
}

# need_program NAME "where it comes from"; a dry run does without.
need_program() {
    [[ -n $DRY_RUN ]] || command -v "$1" >/dev/null || die "$1 is not installed: $2"
}

# The command in the form a shell reads back.
quoted() {
    local word line=""
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then line+=" $word"; else line+=" ${word@Q}"; fi
    done
    echo "${line# }"
}

# Runs a command, or says which one it would run.
run() {
    if [[ -n $DRY_RUN ]]; then quoted "$@"; else "$@"; fi
}

# has OPTION: whether ARGS has it, as --option, --option VALUE or --option=VALUE.
has() {
    local word
    for word in "${ARGS[@]}"; do
        [[ $word == "$1" || $word == "$1="* ]] && return 0
    done
    return 1
}

# Sets TRAIN: the entry point, the same everywhere, with what makes it one of several processes that go on where the
# last ones stopped. "durable" as argument: for launchers that start the job again by themselves, on other machines.
train_command() {
    read -ra TRAIN <<<"$PROGRAM"
    ((${#ARGS[@]})) || die "no config: name a YAML file, or the folder of a run, for lmres train"
    [[ ${ARGS[0]} != -* ]] || die "the config comes first: CONFIG ${ARGS[*]}"
    TRAIN+=(train "${ARGS[@]}")
    has --distributed || TRAIN+=(--distributed)
    if [[ ${1:-} == durable ]]; then
        has --overwrite && die "--overwrite: every start of the job would delete what the one before saved; leave it out"
        has --folder || die "name the folder of the run, on storage that every host sees: --folder gs://BUCKET/RUN"
    fi
    has --overwrite || has --resume || TRAIN+=(--resume)
}
