"""``launch --render k8s|skypilot``: islands that are launches of their own, as YAML for a scheduler (docs/elastic.md).

Kubernetes gets a Deployment and a Service of the coordinator, and a JobSet for each site. SkyPilot gets one task, which is
launched once in each region. The commands in them are those of a dry run. Nothing is started.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...base.errors import refuse
from ...mechanisms.islands.membership.store import check_url
from .command import SHUTDOWN_SECONDS, TORCHRUN_ENVIRONMENT, launch_command, ranks_of_node, shell
from .plan import Plan, make_plan

#: The place of the key file in each container.
_KEY = "/etc/megatron-lossy/run.key"
#: The extended resource of Kubernetes, by kind of accelerator.
_RESOURCES = {"cuda": "nvidia.com/gpu", "hpu": "habana.ai/gaudi"}
#: Exit statuses after which nothing starts a site again: it is refused, or its slot has another owner (docs/elastic.md).
_FINAL = [2, 4]


def render(plan: Plan, arguments: Sequence[str]) -> str:
    """Return the YAML of ``--render`` for all islands of ``plan``. Raises :class:`UsageError`.

    ``arguments``: the command line.
    """
    if not plan.jobs.apart or plan.island is not None:
        raise refuse("--render", plan.launch.render, "needs --rendezvous, and no --island")
    mounts = _mounts(plan)
    if plan.launch.render == "skypilot":
        return _skypilot(plan, arguments, mounts)
    [(_, port), *_], run, _, ours = check_url(plan.lossy.rendezvous or "")
    name = "lossy-" + re.sub("[^a-z0-9]+", "-", run.lower()).strip("-")[:24].strip("-")
    head = ["In the cluster of each part:"]
    if (key := _key(plan)) is not None:
        head.append(f"kubectl create secret generic {name} --from-file=run.key={key}")
    objects = _coordinator(plan, name, port) if ours else []
    objects += [_jobset(island, plan.launch.max_restarts, name, mounts) for island in _islands(plan, arguments, name)]
    parts = dict.fromkeys(item["metadata"]["labels"]["part"] for item in objects)
    return _text([*head, *(f"kubectl apply -f FILE -l part={part}" for part in parts)], objects)


def _mounts(plan: Plan) -> list[tuple[str, str]]:
    """Return sources and targets of ``--container-mounts``, one of which has the run's folder. Raises :class:`UsageError`."""
    given = plan.launch.container_mounts or ""
    found = [(source, target) for source, _, target in (mount.rpartition(":") for mount in given.split(","))]
    if not all(source and target.startswith("/") for source, target in found):
        raise refuse("--container-mounts", given, "must be SOURCE:/FOLDER,… with --render")
    if not any(plan.folder.is_relative_to(target) for _, target in found):
        raise refuse("--out", plan.launch.out, "must be in a folder of --container-mounts, which outlives containers")
    return found


def _key(plan: Plan) -> str | None:
    return None if plan.lossy.udp_key_file == "none" else plan.lossy.udp_key_file


def _islands(plan: Plan, arguments: Sequence[str], name: str) -> Iterator[Plan]:
    """Yield the plan of each island as its containers run it; the scheduler counts restarts, not torchrun."""
    inside = ["--max-restarts", "0"]
    if _key(plan) is not None:
        inside += ["--udp-key-file", _KEY]
    for job in range(plan.jobs.number):
        host = f"{name}-island-{job}-ranks-0-0.{name}-island-{job}" if plan.launch.render == "k8s" else "$head"
        endpoint = ["--rdzv-endpoint", f"{host}:{plan.launch.master_port}"] if plan.launch.nodes > 1 else []
        yield make_plan([*arguments, *inside, *endpoint, "--island", str(job)])


def _coordinator(plan: Plan, name: str, port: int) -> list[dict[str, Any]]:
    """Return a Deployment, and the Service whose address ``--rendezvous`` names."""
    part, labels = "coordinator", {"run": name, "part": "coordinator"}
    command = ["python", "-m", "megatron_lossy", part, "--key-file", _KEY]
    container = {
        "name": part,
        "image": plan.launch.container_image,
        "command": [*command, "--bind", f"[::]:{port}", "--page", f"[::]:{port + 1}"],
        "readinessProbe": {"httpGet": {"path": "/metrics", "port": port + 1}},
    }
    deployment = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels},
        "template": _pod(labels, container, [_key_volume(name)], {}),
    }
    service = {"type": "LoadBalancer", "selector": labels, "ports": [{"name": "store", "port": port}]}
    return [_object("apps/v1", "Deployment", labels, deployment), _object("v1", "Service", labels, service)]


def _jobset(plan: Plan, max_restarts: int, name: str, mounts: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the JobSet of an island, with a pod for each node.

    Pods have the network of their nodes, so that ranks of other sites reach them. Any failure starts all pods again, but for
    a status of :data:`_FINAL`.
    """
    nodes, resource = plan.launch.nodes, _RESOURCES.get(plan.device.kind)
    labels = {"run": name, "part": f"island-{plan.island}"}
    container = {
        "name": "ranks",
        "image": plan.launch.container_image,
        "command": launch_command(plan, {}),
        "env": [{"name": key, "value": value} for key, value in (plan.environment | TORCHRUN_ENVIRONMENT).items()],
        "resources": {"limits": {resource: ranks_of_node(plan)}} if resource else {},
    }
    volumes = [("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})]
    volumes += [
        (f"disk-{number}", target, {"persistentVolumeClaim": {"claimName": claim}})
        for number, (claim, target) in enumerate(mounts)
    ]
    volumes += [_key_volume(name)] * (_key(plan) is not None)
    settings = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": SHUTDOWN_SECONDS + 30,
    }
    final = {"action": "FailJob", "onExitCodes": {"containerName": "ranks", "operator": "In", "values": _FINAL}}
    job = {
        "completionMode": "Indexed",
        "parallelism": nodes,
        "completions": nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [final]},
        "template": _pod(labels, container, volumes, settings),
    }
    rule = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "failurePolicy": {"maxRestarts": max_restarts, "rules": [rule]},
        "replicatedJobs": [{"name": "ranks", "replicas": 1, "template": {"spec": job}}],
    }
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", labels, spec)


def _object(version: str, kind: str, labels: dict[str, str], spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": f"{labels['run']}-{labels['part']}", "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _pod(labels: dict[str, str], container: dict[str, Any], volumes: Sequence[Any], settings: dict[str, Any]) -> Any:
    """Return the template of a pod. ``volumes``: name, place in the container, and source of each."""
    container = container | {"volumeMounts": [{"name": name, "mountPath": place} for name, place, _ in volumes]}
    sources = [{"name": name} | source for name, _, source in volumes]
    return {"metadata": {"labels": labels}, "spec": settings | {"containers": [container], "volumes": sources}}


def _key_volume(name: str) -> tuple[str, str, dict[str, Any]]:
    return "key", str(Path(_KEY).parent), {"secret": {"secretName": name, "defaultMode": 0o400}}


def _skypilot(plan: Plan, arguments: Sequence[str], mounts: Sequence[tuple[str, str]]) -> str:
    """Return a task that runs the island ``$ISLAND``."""
    launch, port, ranks, islands = plan.launch, plan.lossy.udp_port, ranks_of_node(plan), plan.jobs.number
    resources: dict[str, Any] = {"image_id": f"docker:{launch.container_image}"}
    if plan.device.kind != "cpu":
        resources["accelerators"] = f"{str(launch.device).upper().removesuffix('-40GB')}:{ranks}"
    if port:
        resources["ports"] = f"{port}-{port + ranks - 1}"
    if launch.max_restarts:
        resources["job_recovery"] = {"max_restarts_on_errors": launch.max_restarts}
    lines = ['head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', 'case "$ISLAND" in']
    for island in _islands(plan, arguments, ""):
        command = shell(launch_command(island, {}), island.environment | TORCHRUN_ENVIRONMENT)
        lines.append(f"{island.island}) " + command.replace("'$head:", '"$head"\':') + " ;;")
    lines += [f'*) echo "ISLAND $ISLAND: must be from 0 to {islands - 1}"; exit 2 ;;', "esac\n"]
    files: dict[str, Any] = {target: {"source": source, "mode": "MOUNT"} for source, target in mounts}
    if (key := _key(plan)) is not None:
        files[_KEY] = key
    task = {"name": plan.folder.name, "num_nodes": launch.nodes, "resources": resources, "envs": {"ISLAND": "0"}}
    how = [f"sky jobs launch FILE --env ISLAND={job} --infra CLOUD/REGION" for job in range(islands)]
    head = ["With a coordinator at the address of --rendezvous:", *how]
    return _text(head, [task | {"file_mounts": files, "run": "\n".join(lines)}])


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they stand."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _text(head: Sequence[str], documents: Sequence[dict[str, Any]]) -> str:
    apart = json.loads(json.dumps(documents))  # or YAML would write a second use as a reference
    shape = {"sort_keys": False, "default_flow_style": None, "width": 110}
    return "".join(f"# {line}\n" for line in head) + yaml.dump_all(apart, Dumper=_Dumper, **shape)
