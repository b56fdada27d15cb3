"""The files for clusters are what Kubernetes and SLURM take, and their commands are ours."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from loosestep.lab.cli.arguments import parse
from loosestep.lab.cli.given import settings_of
from loosestep.lab.trainer.contenders import check_spec

pytestmark = pytest.mark.fast

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize("number", range(len(documents())))
def test_the_manifest_follows_the_schema(number: int) -> None:
    """Every object is one that Kubernetes accepts, with no field that it does not know."""
    kubernetes_validate.validate(documents()[number], "1.30", strict=True)


def test_the_schema_refuses_what_is_wrong() -> None:
    """A misspelt field would be found."""
    job = documents()[1]
    job["spec"]["completionMod"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.30", strict=True)


def test_pods_meet_at_the_name_that_the_service_makes_known() -> None:
    """Service, subdomain and address are of one name, and as many nodes as pods are waited for."""
    service, job = documents()
    name, spec = service["metadata"]["name"], job["spec"]
    command = spec["template"]["spec"]["containers"][0]["command"]
    assert spec["template"]["spec"]["subdomain"] == name
    assert f"--master-addr={job['metadata']['name']}-0.{name}" in command
    assert f"--nnodes={spec['parallelism']}" in command
    assert spec["parallelism"] == spec["completions"]
    assert f"--master-port={service['spec']['ports'][0]['port']}" in command


def commands() -> dict[str, list[str]]:
    job = documents()[1]
    in_pod = job["spec"]["template"]["spec"]["containers"][0]["command"]
    script = (CLUSTER / "train.sbatch").read_text().replace("\\\n", " ")
    line = next(line for line in script.splitlines() if line.startswith("srun"))
    return {"kubernetes": in_pod, "slurm": shlex.split(line.replace('"$@"', ""))}


@pytest.mark.parametrize("where", ["kubernetes", "slurm"])
def test_the_commands_are_understood(where: str) -> None:
    """Options and strategies in the files exist."""
    command = commands()[where]
    settings = settings_of(parse(command[command.index("loosestep") + 1 :]))
    check_spec(settings.spec)
    assert settings.out
