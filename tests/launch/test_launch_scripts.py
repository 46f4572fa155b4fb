"""Every launcher: clean, helpful, and says what it would do."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch_helpers import LAUNCH, ROOT

SCRIPTS = sorted(path.name for path in LAUNCH.glob("*.sh") if path.name != "common.sh")
RUN = ("configs/small.yaml", "--folder", "gs://bucket/my run")
TRAIN = "train configs/small.yaml --folder 'gs://bucket/my run' --distributed --resume"


def test_shellcheck():
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin") or shutil.which("shellcheck")
    assert found, "pip install '.[test]' brings shellcheck"
    files = sorted(LAUNCH.glob("*.sh"))
    done = subprocess.run([found, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


DRY_RUNS = {
    "local.sh": (
        ("--processes", 2, "--gpus=4", "--port", 9000),
        [
            f"env JAX_COORDINATOR_ADDRESS=127.0.0.1:9000 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID={i} "
            f"JAX_LOCAL_DEVICE_IDS={devices} lmres {TRAIN}"
            for i, devices in enumerate(("0,1", "2,3"))
        ],
    ),
    "slurm.sh": (
        ("--nodes", 4, "--gpus-per-node", 8),
        [
            "sbatch --job-name=lmres --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --signal=TERM@120 --requeue "
            f"--open-mode=append --export=ALL {LAUNCH}/slurm.sh configs/small.yaml --folder 'gs://bucket/my run'"
        ],
    ),
    "xpk.sh": (
        ("--cluster=c", "--project=p", "--zone=z", "--device-type=v6e-16", "--image=i", "--num-slices=2"),
        [
            "xpk workload create --cluster=c --project=p --zone=z --workload=lmres --device-type=v6e-16 "
            "--num-slices=2 --num-nodes=1 --docker-image=i --max-restarts=100 --restart-on-exit-codes=143 "
            r"--termination-grace-period-seconds=300 '--command=exec lmres train configs/small.yaml --folder "
            r"'\''gs://bucket/my run'\'' --distributed --resume'"
        ],
    ),
    "tpu-vm.sh": (
        ("--project=p", "--zone=z", "--tpu-type=v6e-8", "--runtime-version=v", "--install=lmres[tpu]", "--setup=date"),
        [
            "gcloud compute tpus queued-resources create lmres --project=p --zone=z --accelerator-type=v6e-8 "
            "--runtime-version=v --node-id=lmres --spot",
            "gcloud compute tpus queued-resources ssh lmres --project=p --zone=z --node=all --worker=all "
            "--batch-size=all '--command=date && python3 -m venv ~/lmres-venv && "
            r"~/lmres-venv/bin/pip install -q -U '\''lmres[tpu]'\'''",
            "gcloud compute tpus queued-resources scp configs/small.yaml lmres: --project=p --zone=z --node=all "
            "--worker=all --batch-size=all",
            "gcloud compute tpus queued-resources ssh lmres --project=p --zone=z --node=all --worker=all "
            '--batch-size=all \'--command=if pid=$(cat lmres.pid 2>/dev/null) && kill -TERM "$pid" 2>/dev/null; then '
            'tail --pid="$pid" -f /dev/null; fi; echo $$ >lmres.pid; exec lmres-venv/bin/lmres train small.yaml '
            r"--folder '\''gs://bucket/my run'\'' --distributed --resume'",
            "gcloud compute tpus queued-resources delete lmres --project=p --zone=z --force --quiet",
        ],
    ),
    "gke.sh": (
        ("--kind=gpu", "--accelerator=a", "--chips=8", "--image=i", "--namespace=n"),
        ["kubectl --namespace n apply -f -"],
    ),
}


def test_each_launcher_has_a_dry_run():
    assert sorted(DRY_RUNS) == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run_says_what_it_would_do(launch, script):
    words, wanted = DRY_RUNS[script]
    done = launch(script, *words, "--dry-run", *RUN)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert lines[: len(wanted)] == wanted
    if script == "gke.sh":
        assert lines[1] == "apiVersion: jobset.x-k8s.io/v1alpha2"
    else:
        assert len(lines) == len(wanted)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_every_option(launch, script):
    done = launch(script, "--help")
    assert done.returncode == 0 and done.stdout.startswith("Trains ")
    text = (LAUNCH / script).read_text()
    settings = text.split('parse_options "')[1].split('"')[0].split()
    for setting in settings:
        name = "--" + setting.split("=")[0].lower().replace("_", "-")
        assert f"{name} " in done.stdout, name


NEEDED = {
    "xpk.sh": ["--cluster", "--project", "--zone", "--device-type", "--image"],
    "tpu-vm.sh": ["--project", "--zone", "--tpu-type", "--runtime-version", "--install"],
    "gke.sh": ["--kind", "--accelerator", "--topology", "--image", "--chips"],
}


@pytest.mark.parametrize("script", NEEDED)
def test_what_is_missing_is_named(launch, script):
    given = []
    for option in NEEDED[script]:
        done = launch(script, "--dry-run", *given, *RUN)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("error: ") and option in done.stderr and done.stderr.count("\n") == 1
        given.append(f"{option}={'tpu' if option == '--kind' else '4'}")
    assert launch(script, "--dry-run", *given, *RUN).returncode == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--nodes=0", *RUN), "--nodes 0: must be a whole number from 1 on"),
        (("--node=2", *RUN), "unknown option --node; slurm.sh --help"),
        (("--nodes",), "--nodes needs a value"),
        ((), "no config"),
        (("--", "--folder", "x"), "the config comes first"),
        (RUN[:1], "name the folder of the run"),
        ((*RUN, "--overwrite"), "--overwrite: every start of the job would delete"),
    ],
)
def test_faults_are_told(launch, words, told):
    done = launch("slurm.sh", "--dry-run", *words)
    assert done.returncode == 2 and f"error: {told}" in done.stderr, done.stderr


def test_settings_come_from_variables_too_and_options_win(launch):
    words = ("--dry-run", "--port=1", *RUN)
    assert launch("local.sh", *words, LMRES_PROCESSES="3").stdout.count("\n") == 3
    assert launch("local.sh", "--processes=2", *words, LMRES_PROCESSES="3").stdout.count("\n") == 2
    assert launch("local.sh", "--gpus=3", "--processes=2", *words).returncode == 2
    assert " python -m lmres train " in launch("local.sh", *words, LMRES_PROGRAM="python -m lmres").stdout


def documented():
    text = (LAUNCH / "README.md").read_text(encoding="utf-8")
    return [line.split("`")[-2] for line in text.splitlines() if line.startswith("|") and "`launch/" in line]


@pytest.mark.parametrize("command", documented())
def test_documented_commands_are_understood(launch, command):
    script, *words = shlex.split(command)
    assert (ROOT / next(word for word in words if word.endswith(".yaml"))).exists()
    done = launch(script.removeprefix("launch/"), "--dry-run", *words)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_each_launcher_is_documented():
    assert {command.split()[0] for command in documented()} == {f"launch/{script}" for script in SCRIPTS}
