"""The deployment files: alerts, dashboards, the Helm chart and the systemd unit."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import httpx
import kubernetes_validate
import pytest
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families

from agentrl_env import EnvClient, ToolCall
from agentrl_env.__main__ import app
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from agentrl_env.launch.image_context import USER
from agentrl_train.telemetry import metrics as run_metrics
from agentrl_train.telemetry.prometheus import PREFIX, PrometheusExporter
from deploy.alerts import ALERTS
from deploy.dashboards import DASHBOARDS
from deploy.generate import FOLDER, RUNBOOK, files
from deploy.metrics import controller_metrics, names_in, sample_names
from tests.env.tasks import Quick

ROOT = Path(__file__).parents[1]
CHART = FOLDER / "helm" / "agentrl"
VALUES = {
    "tasks": {
        "shop": {
            "image": "registry.example/shop:1",
            "replicas": 2,
            "environment": {"COLOUR": "blue: #1"},
            "autoscaling": {"maxReplicas": 9, "waitingPerReplica": 5},
            "minAvailable": 1,
        },
        "sql": {"image": "registry.example/sql:1", "drain": 3600},
    },
    "ingress": {"enabled": True, "host": "env.example", "tls": "certificate", "className": "nginx"},
    "monitoring": {"serviceMonitor": True, "rules": True},
}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing; run .ci/system-packages prometheus"
)


def expressions():
    """Yield all expressions in the alerts and dashboards."""
    yield from (alert.expr for alert in ALERTS)
    for dashboard in DASHBOARDS.values():
        for panel in dashboard["panels"]:
            yield from (target["expr"] for target in panel.get("targets", ()))


def test_generated_files_are_current():
    for path, text in files():
        assert path.read_text() == text, "outdated; run python -m deploy.generate"


async def test_every_metric_of_the_alerts_and_dashboards_is_exported_by_a_real_fleet_and_run():
    front = ControllerServer(FleetService(), port=0)
    server = EnvServer([Quick], host=NOWHERE, controllers=[front.url], drain_s=0.0)
    await front.start()
    await server.start()
    exporter = PrometheusExporter(host="127.0.0.1", port=0)
    try:
        async with EnvClient.connect(front.url) as client:
            await (await client.open("quick")).step(ToolCall.of("finish"))
        named = set().union(*map(names_in, expressions()))
        of_runs = {name.removeprefix(f"{PREFIX}_") for name in named if name.startswith(PREFIX)}
        documented = set(re.findall(r"``(\w+)``", run_metrics.__doc__))
        documented |= {f"{name}_ceiling" for name in documented} | {"step", "last_step_timestamp_seconds"}
        assert of_runs <= documented
        exporter.write(dict.fromkeys(of_runs, 1.0), step=1)
        exported = set()
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            for url in (f"{front.url}/metrics", exporter.url):
                exported |= sample_names(text_string_to_metric_families((await http.get(url)).text))
    finally:
        exporter.close()
        await server.stop()
        await front.stop()
    assert named <= exported
    assert controller_metrics() <= exported
    assert len(named) > 30


@needs_promtool
@pytest.mark.parametrize("command", ["check rules alerts.yml", "test rules alerts.test.yml"])
def test_promtool_accepts_the_alerts_and_each_fires_on_its_condition(command):
    words = ["promtool", *command.split()]
    done = subprocess.run(words, cwd=FOLDER / "prometheus", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_configuration_and_every_expression_of_the_dashboards(tmp_path):
    token = tmp_path / "token.txt"
    token.write_text("metrics.token")
    text = (FOLDER / "prometheus/prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/agentrl-metrics-token", str(token)))
    shutil.copy(FOLDER / "prometheus/alerts.yml", tmp_path)
    variables = {"$task": ".*", "$instance": ".*"}
    rules = []
    for number, expr in enumerate(expressions()):
        for name, value in variables.items():
            expr = expr.replace(name, value)
        rules.append({"record": f"panel:{number}", "expr": expr})
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for words in (["config", "prometheus.yml"], ["rules", "panels.yml"]):
        done = subprocess.run(["promtool", "check", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_runbook_has_one_section_for_each_alert_and_names_existing_metrics():
    text = (ROOT / RUNBOOK).read_text()
    sections = re.findall(r"^## (\w+)\n\n\*(page|ticket)\.\*", text, re.MULTILINE)
    assert sections == [(alert.name, alert.severity) for alert in ALERTS]
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in controller_metrics()}
    assert names_in(text) - {"process_"} <= families | controller_metrics()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboard_has_distinct_panels_in_rows_that_do_not_overlap(name):
    panels = DASHBOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("name", DASHBOARDS)
def test_grafana_models_parse_the_dashboard(name):
    sdk = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk is not installed"
    )
    written = json.loads((FOLDER / "grafana" / name).read_text())
    read = sdk.Dashboard.from_json(written)
    assert (read.uid, read.title) == (written["uid"], written["title"])
    assert len(read.panels) == len(written["panels"])
    again = read.to_json()
    assert written.keys() <= again.keys()


@pytest.fixture(scope="module")
def helm():
    """Return the library of Helm."""
    return pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed")


def rendered(helm, values=None):
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(VALUES if values is None else values, name="lab", namespace="default")
    return [document for text in texts.values() for document in yaml.safe_load_all(text) if document]


def test_helm_lint_accepts_the_chart(helm):
    report = helm.lint(CHART, VALUES, strict=True)
    assert report["errors"] == []
    assert [found for found in report["messages"] if found["severity"] > 1] == []


def test_manifests_of_the_chart_are_valid_for_kubernetes(helm):
    documents = rendered(helm)
    kinds = {document["kind"] for document in documents}
    assert kinds >= {"Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "Ingress"}
    for document in documents:
        if not document["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(document, "1.31", strict=True)
    (rules,) = [document for document in documents if document["kind"] == "PrometheusRule"]
    assert [rule["alert"] for rule in rules["spec"]["groups"][0]["rules"]] == [alert.name for alert in ALERTS]


def test_pods_of_the_chart_are_confined_and_have_a_readiness_probe_and_the_least_token(helm):
    pods = [d["spec"]["template"]["spec"] for d in rendered(helm) if d["kind"] == "Deployment"]
    assert len(pods) == 3
    for pod in pods:
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsUser"] == int(USER.partition(":")[0])
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        key = "token" if container["name"] == "controller" else "link"
        assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "agentrl-token", "key": key}
        command = typer.main.get_command(app).commands["controller" if key == "token" else "serve"]
        arguments = [argument for argument in container["args"] if argument != "controller"]
        command.make_parser(command.context_class(command)).parse_args(arguments)
    drains = {pod["containers"][0]["name"]: pod["terminationGracePeriodSeconds"] for pod in pods}
    assert drains == {"controller": 15, "shop": 45, "sql": 3615}


def test_chart_scales_servers_by_the_queue(helm):
    (scaler,) = [document for document in rendered(helm) if document["kind"] == "HorizontalPodAutoscaler"]
    (metric,) = scaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] in controller_metrics()
    deployments = {d["metadata"]["name"]: d["spec"] for d in rendered(helm) if d["kind"] == "Deployment"}
    assert "replicas" not in deployments["lab-shop"]  # set by the autoscaler
    assert deployments["lab-sql"]["replicas"] == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"controller": {"replicas": 2}, **VALUES}, "several controllers share a fleet through Redis"),
        ({"tasks": {"Shop": {"image": "x"}}}, "invalid propertyName"),
        ({"tasks": {"shop": {"image": "x", "replica": 2}}}, "replica"),
        ({"tasks": {}}, "give controller.image"),
    ],
)
def test_invalid_values_are_rejected(helm, values, message):
    def render():
        with helm.Chart.load(CHART) as chart:
            chart.validate_schema(values)
            chart.render(values, name="lab")

    with pytest.raises(Exception, match=message):
        render()


def test_systemd_unit_starts_a_command_that_exists_and_reloads_it():
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str
    unit.read(FOLDER / "systemd/agentrl-env.service")
    program, name, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "agentrl-env"
    command = typer.main.get_command(app).commands[name]
    given, rest, _ = command.make_parser(command.context_class(command)).parse_args(arguments)
    assert not rest
    assert given["token_file"] == "${CREDENTIALS_DIRECTORY}/token"
    assert unit["Service"]["ExecReload"] == "/bin/kill -HUP $MAINPID"
