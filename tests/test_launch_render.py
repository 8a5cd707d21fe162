"""``launch --render``: objects of Kubernetes and tasks of SkyPilot by their schemas, and the commands in them."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from megatron_lossy.base.errors import UsageError
from megatron_lossy.lab.launch.__main__ import main as launch
from megatron_lossy.lab.launch.checks import check
from megatron_lossy.lab.launch.command import launch_command
from megatron_lossy.lab.launch.plan import make_plan
from megatron_lossy.lab.launch.render import render

pytestmark = pytest.mark.shows("islands as YAML for Kubernetes and SkyPilot, by their schemas", device=False)

KEY = "/etc/megatron-lossy/run.key"
#: Files that are on no disk here, as those of containers.
RUN = shlex.split("""
    --config llama2_7b/cuda_dp64 --program train --data-path /shared/c4 --valid-data-path /shared/valid --rate 0.1
    --tokenizer sentencepiece:/shared/tokenizer.model --out /shared/runs --accelerators 32 --islands 2
    --sync-method parameters --save-replicas --udp-key-file run.key --udp-port 41000 --max-restarts 3
    --container-image registry.example/lossy:1 --container-mounts disk:/shared
    --rendezvous tcp://one.example:29510/Run_7.b
""")
NAME = "lossy-run-7-b"


@pytest.fixture(autouse=True)
def run_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.key").write_bytes(bytes(32))
    (tmp_path / "run.key").chmod(0o600)


def rendered(capsys, *more):
    launch([*RUN, *more])
    text = capsys.readouterr().out
    return text, list(yaml.safe_load_all(text))


def planned(*more):
    """The command of an island, as a dry run with the key's place in a container has it."""
    own = ["--launcher=torchrun", "--render=k8s", "--max-restarts=0", f"--udp-key-file={KEY}"]
    plan = make_plan([*RUN, *own, *more])
    return launch_command(plan, {})


def test_kubernetes_gets_a_coordinator_and_a_jobset_for_each_site(capsys):
    text, [deployment, service, *sets] = rendered(capsys, "--render=k8s")
    assert [one["kind"] for one in (deployment, service, *sets)] == ["Deployment", "Service", "JobSet", "JobSet"]
    assert f"# kubectl create secret generic {NAME} --from-file=run.key=run.key\n" in text
    pod = deployment["spec"]["template"]["spec"]["containers"][0]
    assert pod["command"][3:6] == ["coordinator", "--key-file", KEY] and "[::]:29510" in pod["command"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["ports"] == [{"name": "store", "port": 29510}]
    for number, jobset in enumerate(sets):
        own = f"{NAME}-island-{number}"
        assert jobset["metadata"]["name"] == own
        assert f"# kubectl apply -f FILE -l part={jobset['metadata']['labels']['part']}\n" in text
        assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
        job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert job["parallelism"] == job["completions"] == 4 and job["backoffLimit"] == 0
        spec = job["template"]["spec"]
        [ranks] = spec["containers"]
        first = f"--rdzv-endpoint={own}-ranks-0-0.{own}:29500"
        assert ranks["command"] == planned(first, f"--island={number}") and ranks["command"][0] == "python"
        assert ranks["resources"] == {"limits": {"nvidia.com/gpu": 8}}
        assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "300"} in ranks["env"]
        assert spec["terminationGracePeriodSeconds"] > 300 and spec["hostNetwork"]
        places = {one["mountPath"]: one["name"] for one in ranks["volumeMounts"]}
        sources = {one["name"]: one for one in spec["volumes"]}
        assert sources[places["/shared"]]["persistentVolumeClaim"] == {"claimName": "disk"}
        assert sources[places["/etc/megatron-lossy"]]["secret"]["secretName"] == NAME


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--accelerators=8", "--device=h200", "--islands=16"),
        ("--device=cpu", f"--rendezvous=etcd://one.example/{'x' * 60}", "--udp-key-file=none"),
        ["--config=llama2_7b/gaudi3_dp64", "--program=/opt/M/pretrain_gpt.py", "--container-mounts=a:/shared,b:/d"],
    ],
    ids=["7B", "one node", "etcd", "Gaudi"],
)
def test_objects_of_kubernetes_are_valid(capsys, more):
    validate = pytest.importorskip("kubernetes_validate")
    from jsonschema import validators

    schema = yaml.safe_load(Path(__file__).with_name("jobset.yaml").read_text())
    of_jobset = validators.validator_for(schema)(schema)
    for one in rendered(capsys, "--render=k8s", *more)[1]:
        found = [one]
        if one["kind"] == "JobSet":
            of_jobset.validate(one)
            jobs = [job["template"] for job in one["spec"]["replicatedJobs"]]
            found = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": one["metadata"]} | job for job in jobs]
        for builtin in found:
            validate.validate(builtin, validate.latest_version(), strict=True)
    wrong = one | {"spec": one["spec"] | {"failurepolicy": {}}}
    assert not of_jobset.is_valid(wrong)
    builtin["spec"]["template"]["spec"]["hostnetwork"] = True
    with pytest.raises(validate.ValidationError, match="hostnetwork"):
        validate.validate(builtin, validate.latest_version(), strict=True)


@pytest.fixture
def task(capsys):
    return rendered(capsys, "--render=skypilot")


def test_a_task_of_skypilot_runs_an_island_in_a_region(task, tmp_path):
    """Its script, with a program named python that prints its words in the place of the real one."""
    text, [content] = task
    assert "# sky jobs launch FILE --env ISLAND=1 --infra CLOUD/REGION\n" in text
    assert content.keys() == {"name", "num_nodes", "resources", "envs", "file_mounts", "run"}
    assert (content["name"], content["num_nodes"]) == ("p_0.10", 4)
    assert content["resources"] == {
        "image_id": "docker:registry.example/lossy:1",
        "accelerators": "H100:8",
        "ports": "41000-41007",
        "job_recovery": {"max_restarts_on_errors": 3},
    }
    assert content["file_mounts"] == {"/shared": {"source": "disk", "mode": "MOUNT"}, KEY: "run.key"}
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@"\n')
    (tmp_path / "python").chmod(0o755)

    def run(island):
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "ISLAND": island,
        }
        return subprocess.run(["bash", "-c", content["run"]], env=environment, capture_output=True, text=True)

    for island in "01":
        assert run(island).stdout.splitlines() == [
            "300",
            *planned("--rdzv-endpoint=10.0.0.1:29500", f"--island={island}")[1:],
        ]
    assert run("2").returncode == 2


def test_skypilot_reads_the_task(task, tmp_path):
    """In an environment of its own: SkyPilot is large."""
    sky = pytest.importorskip("sky")
    (tmp_path / "task.yaml").write_text(
        task[0].replace(f"{KEY}: run.key", f"{KEY}: {tmp_path}/run.key").replace("source: disk", "source: s3://disk")
    )
    read = sky.Task.from_yaml(str(tmp_path / "task.yaml"))
    [resources] = read.resources
    assert read.num_nodes == 4 and resources.accelerators == {"H100": 8} and resources.ports == ["41000-41007"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--island=1"], "--render k8s: needs --rendezvous, and no --island"),
        (["--launcher=srun"], "--render k8s: needs --launcher torchrun"),
        (["--run"], "--run on: needs --rendezvous, and no --island or --render"),
        (["--container-mounts=/shared"], "--container-mounts /shared: must be SOURCE:/FOLDER"),
        (["--out=runs"], "--out runs: must be in a folder of --container-mounts"),
        (["--device=a100-40gb"], "--device a100-40gb: has 40.0 GiB"),
    ],
)
def test_one_line_says_what_cannot_be_rendered(flags, message):
    words = [*RUN, "--render=k8s", *flags]
    with pytest.raises(UsageError, match=message):
        plan = make_plan(words)
        check(plan, starting=False)
        render(plan, words)


def test_containers_must_be_named():
    alone = [
        word for word in RUN if "container" not in word and word not in ("registry.example/lossy:1", "disk:/shared")
    ]
    with pytest.raises(UsageError, match="--container-image: needs a value, for --render k8s"):
        make_plan([*alone, "--render=k8s"])
