"""What `deploy/` has fits the server: flags, paths, times and names are those that there are."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.running import Server
from tests.server.test_metrics import DOCUMENT

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Options of `octavo serve`."""
    told = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "300"},
    )
    return set(re.findall(r"--[a-z][a-z0-9-]*", told.stdout))


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def kubernetes() -> dict[str, Any]:
    (deployment,) = [one for one in documents("kubernetes.yaml") if one["kind"] == "Deployment"]
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "octavo.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


def commands() -> dict[str, list[str]]:
    """Arguments of `octavo serve` in each file."""
    container = (DEPLOY / "Containerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", container, re.MULTILINE)
    program, command, *first = json.loads(entry)
    assert (program, command) == ("octavo", "serve")
    (pod,) = kubernetes()["containers"]
    compose = documents("compose.yaml")[0]["services"]
    (start,) = unit()["ExecStart"]
    serve = shlex.split(start)
    assert serve[0].endswith("/bin/octavo")
    assert serve[1] == "serve"
    return {
        "Containerfile": first,
        "kubernetes.yaml": first + pod["args"],
        "compose.yaml": first + compose["octavo"]["command"],
        "compose.yaml, cuda": first + compose["octavo-cuda"]["command"],
        "octavo.service": serve[2:],
    }


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("place", commands())
def test_flags_are_those_of_the_command(place: str, flags: set[str]) -> None:
    used = [argument for argument in commands()[place] if argument.startswith("--")]
    assert used
    assert set(used) <= flags


def test_the_container_runs_as_nobody_in_particular() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    stages = text.split("\nFROM ")
    (user,) = re.findall(r"^USER (\d+):\d+$", stages[-1], re.MULTILINE)
    assert int(user) > 0
    assert kubernetes()["securityContext"]["runAsUser"] == int(user)
    assert kubernetes()["securityContext"]["runAsNonRoot"] is True
    root = DEPLOY.parent
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, _target = line.split()
        assert all((root / source).exists() for source in sources), line


def test_probes_ask_routes_that_there_are(server: Server) -> None:
    (pod,) = kubernetes()["containers"]
    (port,) = pod["ports"]
    assert str(port["containerPort"]) == option(commands()["Containerfile"], "--port")
    for name, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        assert pod[name]["httpGet"] == {"path": path, "port": port["name"]}
        assert server.get(path).status == 200
    (check,) = re.findall(r"http://127.0.0.1:(\d+)(/\w+)", (DEPLOY / "Containerfile").read_text())
    assert check == (str(port["containerPort"]), "/health")
    service = documents("kubernetes.yaml")[0]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]


def test_a_drain_has_the_time_that_it_may_take() -> None:
    (pod,) = kubernetes()["containers"]
    seconds = float(option(pod["args"], "--shutdown-timeout"))
    before = float(pod["lifecycle"]["preStop"]["exec"]["command"][1])
    # Five seconds more are the front's own for answers that have ended.
    assert kubernetes()["terminationGracePeriodSeconds"] >= before + seconds + 5
    compose = documents("compose.yaml")[0]["services"]["octavo"]
    assert (
        float(compose["stop_grace_period"].removesuffix("s"))
        >= float(option(compose["command"], "--shutdown-timeout")) + 5
    )
    (stop,) = unit()["TimeoutStopSec"]
    assert float(stop) >= float(option(commands()["octavo.service"], "--shutdown-timeout")) + 5
    assert unit()["KillMode"] == ["mixed"], "the engine is the front's to end"


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze")
    copy = tmp_path / "octavo.service"
    # The program is not installed where the unit says.
    copy.write_text((DEPLOY / "octavo.service").read_text().replace("/opt/octavo/bin/octavo", sys.executable))
    checked = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_dashboard_asks_only_for_metrics_that_the_server_has(server: Server) -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in board["templating"]["list"]]
    used = {name for expression in expressions for name in re.findall(r"octavo:\w+", expression)}
    assert all("octavo:" in expression for expression in expressions if expression != "prometheus")
    # One of each kind of answer, so that every family has a sample.
    assert server.post("/v1/completions", {"prompt": [5], "max_tokens": 2, "ignore_eos": True}).status == 200
    samples = {
        re.split(r"[{ ]", line, maxsplit=1)[0] for line in server.get("/metrics").text.splitlines() if line[0] != "#"
    }
    assert used <= samples
    listed = set(re.findall(r"^\| `(octavo:\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert {name.removesuffix("_bucket") for name in used} == listed, "the dashboard shows every metric"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
