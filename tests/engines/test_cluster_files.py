"""The files for Kubernetes agree with the published schemas; all files start one torchrun on each machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import kubeflow_trainer_api.models as kubeflow
import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import parse_args

from hp_trainer.cli.train import run_command

pytestmark = pytest.mark.engines_core

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def load(name: str) -> list[dict]:
    return list(yaml.safe_load_all((CLUSTERS / name).read_text()))


def unknown_keys(model: type, given: dict) -> dict:
    """Return what a model of the Kubeflow client leaves out of `given`: it ignores keys that it does not know."""
    return difference(given, model.from_dict(given).to_dict())


def difference(given, read):
    if isinstance(given, dict):
        parts = {key: difference(value, (read or {}).get(key)) for key, value in given.items()}
        return {key: part for key, part in parts.items() if part}
    if isinstance(given, list):
        return [part for part in map(difference, given, read or [None] * len(given)) if part]
    return None if str(given) == str(read) else given


def check(document: dict) -> None:
    """Raise if a document does not agree with the published schema of its kind."""
    match document["kind"]:
        case "TrainJob":
            assert unknown_keys(kubeflow.TrainerV1alpha1TrainJob, document) == {}
        case "JobSet":
            assert unknown_keys(kubeflow.JobsetV1alpha2JobSet, document) == {}
        case _:
            kubernetes_validate.validate(document, "1.30", strict=True)


@pytest.mark.parametrize("name", ["kubernetes.yaml", "trainjob.yaml", "jobset.yaml"])
def test_kubernetes_accepts_the_files(name) -> None:
    for document in load(name):
        check(document)


@pytest.mark.parametrize(
    ("name", "path", "key"),
    [
        ("kubernetes.yaml", ["spec", "template", "spec"], "restartPolicies"),
        ("trainjob.yaml", ["spec", "trainer"], "numNode"),
        ("jobset.yaml", ["spec", "replicatedJobs", 0, "template", "spec"], "completion"),
    ],
)
def test_a_misspelt_key_is_found(name, path, key) -> None:
    document = load(name)[-1]
    inner = document
    for step in path:
        inner = inner[step]
    inner[key] = 1
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError), match=key):
        check(document)


def run_by_bash(task: dict, gpus: str, home: Path) -> list[str]:
    """Return the arguments that torchrun gets from the command of SkyPilot's task on its second machine."""
    torchrun = home / "hp" / "bin" / "torchrun"
    torchrun.parent.mkdir(parents=True)
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    place = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_RANK": "1", "HOME": str(home)}
    place |= {"SKYPILOT_NUM_GPUS_PER_NODE": gpus, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    command = ["bash", "-c", task["run"]]
    done = subprocess.run(command, env=os.environ | place, stdout=subprocess.PIPE, text=True, check=True)
    words = done.stdout.splitlines()
    assert "--master-addr=10.0.0.1" in words
    return words


def torchrun_of(name: str, folder: Path):
    """Return torchrun's arguments, the numbers of machines and GPUs that the file asks for, and the volumes mounted."""
    document = load(name)[-1]
    if name == "skypilot.yaml":
        gpus = document["resources"]["accelerators"].partition(":")[2]
        assert "/runs" in document["file_mounts"]
        return run_by_bash(document, gpus, folder), document["num_nodes"], gpus, (set(), set())
    if name == "trainjob.yaml":
        trainer = document["spec"]["trainer"]
        patch = document["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        pod = patch["template"]["spec"]["template"]["spec"]
        assert trainer["command"] == ["torchrun"]
        # The runtime sets PET_NNODES and PET_NPROC_PER_NODE, which are torchrun's defaults.
        asked = [f"--nnodes={trainer['numNodes']}", f"--nproc-per-node={trainer['numProcPerNode']}", "--node-rank=1"]
        limits = trainer["resourcesPerNode"]["limits"]
        return [*asked, *trainer["args"]], trainer["numNodes"], limits["nvidia.com/gpu"], mounts(pod)
    job = document["spec"] if name == "kubernetes.yaml" else document["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    assert container["command"] == ["torchrun"]
    assert job["completions"] == job["parallelism"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"]]
    return words, job["completions"], container["resources"]["limits"]["nvidia.com/gpu"], mounts(pod)


def mounts(pod: dict) -> tuple[set[str], set[str]]:
    return {each["name"] for each in pod["containers"][0]["volumeMounts"]}, {each["name"] for each in pod["volumes"]}


@pytest.mark.parametrize("name", ["kubernetes.yaml", "trainjob.yaml", "jobset.yaml", "skypilot.yaml"])
def test_a_file_starts_one_torchrun_on_each_machine(name, tmp_path) -> None:
    words, machines, gpus, (mounted, volumes) = torchrun_of(name, tmp_path)
    read = parse_args(words)
    assert (read.nnodes, read.nproc_per_node, read.node_rank) == (str(machines), str(gpus), 1)
    assert (read.module, read.training_script) == (True, "hp_trainer")
    command, *arguments = read.training_script_args
    assert command == "run"
    assert run_command.make_context(command, arguments).params["overrides"] == [("run.folder", "/runs/first")]
    assert mounted == volumes


def test_pod_0_is_the_meeting_point() -> None:
    service, job = load("kubernetes.yaml")
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert f"--master-addr={name}-0.{pod['subdomain']}" in pod["containers"][0]["args"]
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    assert service["spec"]["selector"] == {"job-name": name}
    (jobset,) = load("jobset.yaml")
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True
    (replicated,) = jobset["spec"]["replicatedJobs"]
    address = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['metadata']['name']}"
    container = replicated["template"]["spec"]["template"]["spec"]["containers"][0]
    assert f"--master-addr={address}" in container["args"]


def test_the_container_file_installs_every_package_for_torch() -> None:
    text = (CLUSTERS / "Containerfile").read_text()
    packages = Path(__file__).parents[2] / "packages"
    named = {each.name for each in packages.iterdir() if f"./{each.name}" in text}
    assert named == {each.name for each in packages.iterdir()} - {"hp-platform-mindspore"}
