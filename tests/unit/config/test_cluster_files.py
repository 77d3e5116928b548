"""The files for KubeRay and for Ray's cluster launcher: their fields exist, and have the documented effect.

KubeRay's schema (1.4 MB, with a Kubernetes pod's schema four times) is not in the repository. ``OWN`` lists KubeRay's
own fields, as its RayJob v1 of August 2026 declares them. When the file was written, it was checked against the whole
schema, which refuses unknown fields. ``POD`` lists the pod fields that the file may use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError

from hsx_dist.config.models import ExtractConfig
from hsx_dist.jobs.preflight import installed

CONFIGS = Path(__file__).parents[3] / "configs"

#: Path (* for a list's items) → fields: a name, or a name with its allowed values.
OWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "": dict.fromkeys(
        [
            "activeDeadlineSeconds",
            "backoffLimit",
            "clusterSelector",
            "deletionStrategy",
            "entrypoint",
            "entrypointNumCpus",
            "entrypointNumGpus",
            "entrypointResources",
            "jobId",
            "managedBy",
            "metadata",
            "preRunningDeadlineSeconds",
            "rayClusterSpec",
            "runtimeEnvYAML",
            "shutdownAfterJobFinishes",
            "submissionMode",
            "submitterConfig",
            "submitterPodTemplate",
            "suspend",
            "ttlSecondsAfterFinished",
        ],
        (),
    ),
    "rayClusterSpec": dict.fromkeys(
        [
            "authOptions",
            "autoscalerOptions",
            "enableInTreeAutoscaling",
            "gcsFaultToleranceOptions",
            "headGroupSpec",
            "headServiceAnnotations",
            "historyServerOptions",
            "managedBy",
            "networkPolicy",
            "rayVersion",
            "suspend",
            "tlsOptions",
            "upgradeStrategy",
            "workerGroupSpecs",
        ],
        (),
    ),
    "rayClusterSpec.authOptions": {"enableK8sTokenAuth": (), "mode": ("disabled", "token"), "secretName": ()},
    "rayClusterSpec.autoscalerOptions": {
        **dict.fromkeys(
            ["args", "command", "env", "envFrom", "idleTimeoutSeconds", "image", "imagePullPolicy", "resources"], ()
        ),
        **dict.fromkeys(["securityContext", "volumeMounts"], ()),
        "upscalingMode": ("Default", "Aggressive", "Conservative"),
        "version": ("v1", "v2"),
    },
    "rayClusterSpec.headGroupSpec": dict.fromkeys(
        [
            "enableIngress",
            "headService",
            "ingressOptions",
            "labels",
            "rayStartParams",
            "resources",
            "serviceType",
            "template",
        ],
        (),
    ),
    "rayClusterSpec.workerGroupSpecs.*": dict.fromkeys(
        [
            "groupName",
            "idleTimeoutSeconds",
            "labels",
            "maxReplicas",
            "minReplicas",
            "numOfHosts",
            "priority",
            "rayStartParams",
            "replicas",
            "resources",
            "scaleStrategy",
            "suspend",
            "template",
        ],
        (),
    ),
}
POD = {
    "template": "metadata spec",
    "spec": "serviceAccountName securityContext terminationGracePeriodSeconds nodeSelector tolerations containers "
    "volumes",
    "containers": "name image securityContext ports lifecycle resources volumeMounts",
}


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    found = list(yaml.safe_load_all((CONFIGS / "kuberay" / "rayjob.yaml").read_text()))
    return {document["kind"]: document for document in found}


@pytest.fixture(scope="module")
def job(documents) -> dict[str, Any]:
    assert documents["RayJob"]["apiVersion"] == "ray.io/v1"
    return documents["RayJob"]["spec"]


def groups(job) -> list[dict[str, Any]]:
    return [job["rayClusterSpec"]["headGroupSpec"], *job["rayClusterSpec"]["workerGroupSpecs"]]


def at(value: Any, path: str) -> list[Any]:
    for part in path.split(".") if path else ():
        if part == "*":
            return list(value)
        value = value[part]
    return [value]


@pytest.mark.parametrize("path", OWN)
def test_kuberay_knows_every_field(job, path):
    for found in at(job, path):
        for name, value in found.items():
            assert name in OWN[path], f"{path}.{name}"
            assert not OWN[path][name] or value in OWN[path][name]


def test_pods_have_known_fields_and_run_as_an_unprivileged_user(job):
    for group in groups(job):
        assert all(isinstance(v, str) for v in group["rayStartParams"].values())  # KubeRay accepts only strings
        assert set(group["template"]) <= set(POD["template"].split())
        pod = group["template"]["spec"]
        assert set(pod) <= set(POD["spec"].split())
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        (container,) = pod["containers"]
        assert set(container) <= set(POD["containers"].split())
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["limits"] == container["resources"]["requests"]
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
    assert len({g["template"]["spec"]["containers"][0]["image"] for g in groups(job)}) == 1


def test_the_driver_runs_outside_the_head_node(job):
    wanted = json.loads(job["entrypointResources"])
    head, *workers = groups(job)
    assert head["rayStartParams"]["num-cpus"] == "0"
    having = [
        g for g in workers if set(wanted) <= set(json.loads(json.loads(g["rayStartParams"].get("resources", '"{}"'))))
    ]
    assert [g["groupName"] for g in having] == ["driver"]
    assert float(having[0]["rayStartParams"]["num-cpus"]) >= job["entrypointNumCpus"]
    assert having[0]["minReplicas"] >= 1


def test_a_pod_has_time_to_drain_and_the_driver_to_stop(documents, job):
    settings = ExtractConfig.model_validate(yaml.safe_load(documents["ConfigMap"]["data"]["extract.yaml"]))
    driver, gpu = job["rayClusterSpec"]["workerGroupSpecs"]
    assert settings.stop_seconds < driver["template"]["spec"]["terminationGracePeriodSeconds"]
    command = gpu["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["hsx", "drain"]
    assert float(command[command.index("--seconds") + 1]) < gpu["template"]["spec"]["terminationGracePeriodSeconds"]
    assert settings.wait_seconds > 0  # the autoscaler needs time for the first node
    assert job["backoffLimit"] >= 1
    assert settings.resume == "allow"


def test_the_cluster_file_sets_token_access_a_service_account_and_the_tested_ray(documents, job):
    assert job["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert job["rayClusterSpec"]["rayVersion"] == installed("ray")
    names = {g["template"]["spec"]["serviceAccountName"] for g in groups(job)}
    assert names == {documents["ServiceAccount"]["metadata"]["name"]}
    assert "key" not in documents["ConfigMap"]["data"]["extract.yaml"].lower()


def test_the_pod_monitor_finds_the_pods_and_their_port(documents, job):
    monitor = documents["PodMonitor"]["spec"]
    for group in groups(job):
        assert monitor["selector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
        ports = {port["name"] for port in group["template"]["spec"]["containers"][0]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports


@pytest.mark.parametrize("path", sorted((CONFIGS / "ray").glob("*.yaml")), ids=lambda p: p.name)
def test_rays_launcher_takes_the_cluster_file(path):
    """Ray's schema, from its package."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    cluster = yaml.safe_load(path.read_text())
    validate_config(prepare_config(cluster))
    assert cluster["available_node_types"][cluster["head_node_type"]]["resources"]["CPU"] == 0
    with pytest.raises(ValidationError, match="max_worker"):
        validate_config(prepare_config({**cluster, "max_worker": 3}))
