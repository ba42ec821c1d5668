"""The manifests for Kubernetes and SkyPilot: their fields are known ones, and their shell lines
start our commands as the launcher takes them, on each node.

Neither kubectl nor sky is here. The schemas hold what the examples use of JobSet's v1alpha2 types,
of Kubernetes' pods and of SkyPilot's tasks (sky/utils/schemas.py), and refuse every other field.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from megatron_rl.cli.main import main
from tests.launcher.test_dry_runs import SHAPES, files
from tests.weights.made_up import write_zeros

pytestmark = pytest.mark.usefixtures("forked_tokenizer_children")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAME = "qwen3_30b_a3b"
TEXT, COUNT, TEXTS = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
)
assert files


def closed(*needed: str, **properties: Any) -> dict[str, Any]:
    """An object without other fields."""
    return {
        "type": "object", "properties": properties, "required": list(needed),
        "additionalProperties": False,
    }  # fmt: skip


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


FIELD = closed("fieldRef", fieldRef=closed("fieldPath", fieldPath=TEXT))
CONTAINER = closed(
    "name", "image",
    name=TEXT, image=TEXT, command=TEXTS, args=TEXTS,
    env=several(closed("name", name=TEXT, value=TEXT, valueFrom=FIELD)),
    resources=closed(limits={"type": "object", "additionalProperties": COUNT}),
    securityContext=closed(
        capabilities=closed(add=TEXTS), seccompProfile=closed("type", type={"enum": ["Unconfined"]})
    ),
    readinessProbe=closed("exec", exec=closed("command", command=TEXTS), periodSeconds=COUNT),
    volumeMounts=several(closed("name", "mountPath", name=TEXT, mountPath=TEXT)),
)  # fmt: skip
VOLUME = closed(
    "name", name=TEXT, persistentVolumeClaim=closed("claimName", claimName=TEXT),
    emptyDir=closed(medium={"enum": ["Memory"]}, sizeLimit={"pattern": r"^\d+Gi$"}),
)  # fmt: skip
POD = closed(
    "containers", containers=several(CONTAINER), volumes=several(VOLUME),
    restartPolicy={"enum": ["Never", "OnFailure"]}, terminationGracePeriodSeconds=COUNT,
    hostNetwork={"type": "boolean"}, dnsPolicy={"enum": ["ClusterFirstWithHostNet"]},
)  # fmt: skip
JOB = closed("template", backoffLimit=COUNT, template=closed("spec", spec=POD))
REPLICATED = closed(
    "name", "template", name={"pattern": "^[a-z][a-z-]*$"}, replicas=COUNT,
    template=closed("spec", spec=JOB),
    dependsOn=several(closed("name", "status", name=TEXT, status={"enum": ["Ready", "Complete"]})),
)  # fmt: skip
POLICY = closed(
    maxRestarts=COUNT,
    restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
)
JOBSET = closed(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"}, kind={"const": "JobSet"},
    metadata=closed("name", name=TEXT),
    spec=closed("replicatedJobs", failurePolicy=POLICY, replicatedJobs=several(REPLICATED)),
)  # fmt: skip
TASK = closed(
    "run", name=TEXT, num_nodes=COUNT, setup=TEXT, run=TEXT,
    resources=closed(
        accelerators={"pattern": r"^\w+:\d+$"}, image_id={"pattern": "^docker:"},
        network_tier={"enum": ["best", "standard"]},
    ),
    volumes={"type": "object", "additionalProperties": TEXT},
    envs={"type": "object", "additionalProperties": TEXT},
)  # fmt: skip


def read(name: str, schema: dict[str, Any], root: Path) -> Any:
    """A manifest whose shared folder is another one."""
    text = (EXAMPLES / name).read_text().replace("/shared/", f"{root}/")
    found = yaml.safe_load(text)
    jsonschema.validate(found, schema)
    return found


def commands_of(folder: Path, command: list[str], environment: dict[str, str]) -> list[list[str]]:
    """What the lines of one node call `megatron-rl` with."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "megatron-rl"
    program.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\necho --end--\n')
    program.chmod(0o755)
    (folder / "runs" / "first").mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command, env={"PATH": f"{folder}/bin:{os.environ['PATH']}"} | environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [part.split() for part in done.stdout.split("--end--\n") if part]


def check(
    nodes: list[list[list[str]]], root: Path, address: str,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The first node prepares, and the example fits; each node starts its own share."""
    run_dir = str(root / "runs" / "first")
    assert [[call[0] for call in calls] for calls in nodes] == [
        ["prepare", "node"], ["node"], ["node"], ["node"]
    ]  # fmt: skip
    prepare = nodes[0][0]
    assert f"ports.host={address}" in prepare and run_dir in prepare
    (root / "model" / "config.json").write_text(json.dumps(SHAPES[NAME]))
    write_zeros(root / "model")
    (root / "runs" / "first").rmdir()
    # The address is that of no interface here.
    words = ["ports.host=127.0.0.1" if word.startswith("ports.host") else word for word in prepare]
    assert main([*words, "--dry-run", "eval.prompts=10"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "on 4 nodes: 8 trainer ranks on node 0" in text
    for number, calls in enumerate(nodes):
        assert calls[-1] == [
            "node", run_dir, "--node", str(number), "--nodes", "4", "--gpus-per-node", "8"
        ]  # fmt: skip
        caplog.clear()
        # It takes the words, and says what is missing here.
        assert main([*calls[-1], "--dry-run"]) == 2 and "is no prepared run" in caplog.text


@pytest.fixture
def eight_gpus(torch_for_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")


@pytest.mark.usefixtures("eight_gpus")
def test_a_jobset_prepares_on_the_first_node_and_starts_all(
    files: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    spec = read("kubernetes.yaml", JOBSET, files)["spec"]
    first, others = spec["replicatedJobs"]
    assert first["template"]["spec"]["template"] == others["template"]["spec"]["template"]
    assert others["dependsOn"] == [{"name": first["name"], "status": "Ready"}]
    pod = first["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert {one["name"] for one in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] > 300
    given = {one["name"]: one.get("value", "") for one in container["env"]}
    assert int(given["NODES"]) == first["replicas"] + others["replicas"]
    from_field = {
        one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if "value" not in one
    }
    assert from_field == {
        "metadata.labels['jobset.sigs.k8s.io/job-global-index']", "status.podIP"
    }  # fmt: skip
    # Kubernetes itself replaces $(NAME), which would be meant for the shell.
    [text] = container["args"]
    assert "$(" not in text and set(re.findall(r"\$(\w+)", text)) == given.keys()
    probe = container["readinessProbe"]["exec"]["command"]
    text, probe[-1] = (
        each.replace("/tmp/prepared", f"{files}/ready") for each in (text, probe[-1])
    )
    nodes = []
    for number in range(4):
        Path(probe[-1]).unlink(missing_ok=True)
        environment = given | {"NODE": str(number), "POD_IP": "10.0.0.7"}
        nodes.append(commands_of(files, [*container["command"], text], environment))
        assert subprocess.run(probe, timeout=60).returncode == 0
    check(nodes, files, "10.0.0.7", capsys, caplog)


@pytest.mark.usefixtures("eight_gpus")
def test_a_skypilot_task_prepares_on_the_first_node_and_starts_all(
    files: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    task = read("skypilot.yaml", TASK, files)
    gpus = task["resources"]["accelerators"].partition(":")[2]
    environment = task["envs"] | {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NUM_GPUS_PER_NODE": gpus,
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n10.0.0.9\n10.0.0.10",
        "SKYPILOT_TASK_ID": "sky-1",
    }  # fmt: skip
    assert set(re.findall(r"\$([A-Z]\w+)", task["run"])) <= environment.keys() | {
        "SKYPILOT_NODE_RANK", "PATH", "PREPARED"
    }  # fmt: skip
    # What an earlier job has left does not let a node begin before this one is prepared.
    marker = files / "runs" / "first" / "prepared-sky-1"
    marker.parent.mkdir(parents=True)
    marker.touch()
    assert commands_of(files, ["bash", "-c", task["setup"]], environment) == []
    assert not marker.exists()
    nodes = [
        commands_of(
            files, ["bash", "-c", task["run"]], environment | {"SKYPILOT_NODE_RANK": str(number)}
        )
        for number in range(4)
    ]
    assert marker.exists()
    marker.unlink()
    check(nodes, files, "10.0.0.7", capsys, caplog)


def test_a_field_that_is_not_known_is_refused() -> None:
    found = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    jobs = found["spec"]["replicatedJobs"]
    jobs[1]["template"]["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="imagePolicy"):
        jsonschema.validate(found, JOBSET)
