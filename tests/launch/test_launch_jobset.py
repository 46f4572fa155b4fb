"""The manifest of launch/gke.sh against the schemas of JobSet and Kubernetes."""

import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

SCHEMA = json.loads((Path(__file__).parent / "jobset-schema.json").read_text())
RUN = ("configs/small.yaml", "--folder", "gs://bucket/run", 'data.text_key=a "b" \\ @NAME@ #gpu')
KINDS = {
    "tpu": ("--accelerator=tpu-v6e-slice", "--topology=4x4", "--nodes=4", "--slices=2", "--chips=4"),
    "gpu": ("--accelerator=nvidia-h100-80gb", "--nodes=3", "--chips=8"),
}


@pytest.fixture(params=KINDS)
def manifest(launch, request):
    words = KINDS[request.param]
    done = launch(
        "gke.sh", "--action=print", "--kind", request.param, *words, "--image=host/lmres:1", "--name=mine", *RUN
    )
    assert done.returncode == 0, done.stderr
    return request.param, yaml.safe_load(done.stdout)


def test_it_is_what_jobset_takes(manifest):
    jsonschema.Draft202012Validator(SCHEMA).validate(manifest[1])


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_its_jobs_are_what_kubernetes_takes(manifest, version):
    (workers,) = manifest[1]["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "mine"}, "spec": workers["template"]["spec"]}
    kubernetes_validate.validate(job, version, strict=True)
    job["spec"]["template"]["spec"]["restartPolcy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, version, strict=True)


def test_it_says_what_the_options_say(manifest):
    kind, tree = manifest
    (workers,) = tree["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["lmres", "train", *RUN, "--distributed", "--resume"]
    assert (tree["metadata"]["name"], container["image"]) == ("mine", "host/lmres:1")
    nodes = {"tpu": 4, "gpu": 3}[kind]
    assert job["parallelism"] == job["completions"] == nodes and workers["replicas"] == {"tpu": 2, "gpu": 1}[kind]
    # Kubernetes allows a pod failure policy for pods that are never started again, and reports its FailJob so.
    assert pod["restartPolicy"] == "Never" and job["backoffLimit"] == 0
    (rule,) = tree["spec"]["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    variables = {v["name"]: v.get("value") for v in container.get("env", [])}
    if kind == "gpu":
        # HOSTNAME of pod 0: set, replicated job, number of the job, number of the pod; the set is the subdomain.
        assert variables["JAX_COORDINATOR_ADDRESS"] == f"mine-{workers['name']}-0-0.mine:8476"
        assert variables["JAX_NUM_PROCESSES"] == "3" and "JAX_PROCESS_ID" in variables
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    else:
        assert not variables and container["resources"]["limits"] == {"google.com/tpu": 4}


def test_name_that_kubernetes_refuses_is_told(launch):
    done = launch("gke.sh", "--dry-run", "--name=My_Run", *RUN)
    assert done.returncode == 2 and "--name My_Run" in done.stderr
    done = launch("gke.sh", "--dry-run", "--action=delete")
    assert done.stdout == "kubectl delete jobset lmres\n"
