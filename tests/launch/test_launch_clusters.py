"""What the launchers do on a cluster, tried with stand-ins for the cluster's programs that keep a log."""

from pathlib import Path

import pytest
from launch_helpers import LAUNCH

RUN = ("configs/small.yaml", "--folder", "gs://bucket/run")

# States and exit codes come from files, one line a call; the last one stays.
NEXT = """
next() { head -n 1 "$LOG.$1"; [[ $(wc -l <"$LOG.$1") -lt 2 ]] || sed -i 1d "$LOG.$1"; }
"""
GCLOUD = (
    NEXT
    + """
shift 3  # compute tpus queued-resources
case "$1 $*" in
    describe*)
        state=$(next states)
        [[ $state != MISSING ]] || { echo "ERROR: (gcloud) NOT_FOUND: not found" >&2; exit 1; }
        [[ $state != DENIED ]] || { echo "ERROR: (gcloud) PERMISSION_DENIED" >&2; exit 1; }
        echo "$state" ;;
    ssh*"exec lmres-venv"*) echo run >>"$LOG"; exit "$(next codes)" ;;
    ssh*) echo setup >>"$LOG" ;;
    *) echo "$1" >>"$LOG" ;;
esac
"""
)
TPU = ("--project=p", "--zone=z", "--tpu-type=v6e-8", "--runtime-version=v", "--install=lmres", "--poll=0")


@pytest.fixture
def tpu(launch, programs):
    """``tpu(states, codes, ...)``: the launcher's answer and what it had gcloud do."""

    def run(states, codes, *words):
        variables = programs(gcloud=GCLOUD)
        log = Path(variables["LOG"])
        for name, values in (("states", states), ("codes", codes)):
            Path(f"{log}.{name}").write_text("".join(f"{value}\n" for value in values))
        done = launch("tpu-vm.sh", *TPU, *words, *RUN, **variables)
        return done, log.read_text().split() if log.exists() else []

    return run


START = ["setup", "scp", "run"]


def test_tpu_is_created_awaited_and_deleted(tpu):
    done, calls = tpu(["MISSING", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"], [0])
    assert done.returncode == 0, done.stderr
    assert calls == ["create", *START, "delete"]
    assert tpu(["ACTIVE"], [0], "--keep=yes")[1][-1] == "run"


def test_tpu_run_goes_on_after_a_preemption(tpu):
    states = ["ACTIVE", "SUSPENDED", "SUSPENDED", "MISSING", "ACTIVE"]
    done, calls = tpu(states, [143, 0])
    assert done.returncode == 0, done.stderr
    assert calls == [*START, "delete", "create", *START, "delete"]
    assert "exit code 143, lmres is SUSPENDED: starting it again" in done.stderr


def test_tpu_run_goes_on_after_a_lost_connection_and_gives_up_in_the_end(tpu):
    done, calls = tpu(["ACTIVE"], [255], "--max-relaunches=2")
    assert done.returncode == 255 and calls == START * 3
    assert "not started again: --max-relaunches 2" in done.stderr


@pytest.mark.parametrize("code", [1, 3])
def test_tpu_run_that_fails_by_itself_is_not_started_again(tpu, code):
    done, calls = tpu(["ACTIVE"], [code])
    assert done.returncode == code and calls == START
    assert f"failed with exit code {code}" in done.stderr


def test_what_gcloud_refuses_ends_the_launcher(tpu):
    done, calls = tpu(["DENIED"], [0])
    assert done.returncode == 1 and calls == [] and "PERMISSION_DENIED" in done.stderr


SLURM = {
    "srun": 'echo srun "$@" >>"$LOG"; exit "$CODE"',
    "squeue": 'echo "$STATE"',
    "scontrol": 'echo scontrol "$@" >>"$LOG"',
}


@pytest.mark.parametrize(
    ("code", "state", "restarts", "queued"),
    [
        (0, "RUNNING", 0, False),
        (143, "RUNNING", 0, True),
        (143, "RUNNING", 2, False),  # often enough
        (143, "COMPLETING", 0, False),  # cancelled, or queued again by Slurm
        (1, "RUNNING", 0, False),
    ],
)
def test_slurm_job_is_queued_again_after_saving(launch, programs, code, state, restarts, queued):
    variables = programs(**SLURM)
    inside = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), "LMRES_LAUNCH": str(LAUNCH)}
    told = {"CODE": str(code), "STATE": state, "LMRES_MAX_RESTARTS": "2", "SLURM_GPUS_PER_NODE": "8"}
    done = launch("slurm.sh", *RUN, **variables, **inside, **told)
    assert done.returncode == code, done.stderr
    first, *rest = Path(variables["LOG"]).read_text().splitlines()
    assert first == (
        "srun --kill-on-bad-exit=1 --gpu-bind=none lmres train configs/small.yaml --folder gs://bucket/run "
        "--distributed --resume --device gpu"
    )
    assert rest == (["scontrol requeue 7"] if queued else [])
