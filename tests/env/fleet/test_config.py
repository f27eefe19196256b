"""The configuration file of a fleet, and the manifests generated from it."""

import json

import kubernetes_validate
import pytest
import yaml

from agentrl_env.errors import LaunchError
from agentrl_env.fleet.config import read_fleet_config
from agentrl_env.fleet.manifests import compose, kubernetes
from agentrl_env.launch.docker import ContainerLimits

FILE = """
name = "lab"

[controller]
port = 9000
token_env = "LAB_TOKEN"
redis = "redis://redis:6379/0"

[[tasks]]
name = "shop"
target = "shop"
kind = "docker"
replicas = 3
drain = 20
oracle = true
environment = { COLOUR = "blue: #1", EMPTY = "" }
limits = { memory = "512m", cpus = 0.5, pids = 100, tmp = "64m" }

[[tasks]]
name = "sql"
image = "registry.example/sql:2"
kind = "docker"
"""
TASK = '[[tasks]]\nname = "shop"\ntarget = "shop"'


@pytest.fixture
def config(tmp_path):
    """Read a configuration, by default ``FILE``."""

    def read(text=FILE):
        (tmp_path / "shop").mkdir(exist_ok=True)
        (tmp_path / "fleet.toml").write_text(text)
        return read_fleet_config(tmp_path / "fleet.toml")

    return read


def test_targets_are_relative_to_the_file_and_sizes_are_parsed(config, tmp_path):
    shop, sql = config().tasks
    assert shop.target == str(tmp_path / "shop")
    assert shop.limits == ContainerLimits(memory=512 << 20, cpus=0.5, pids=100, tmp=64 << 20)
    assert sql.limits == ContainerLimits()


def test_token_comes_from_the_environment(config, monkeypatch):
    monkeypatch.delenv("LAB_TOKEN", raising=False)
    assert config().token is None
    monkeypatch.setenv("LAB_TOKEN", "s3cret")
    assert config().token == "s3cret"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks = 1", "at least one table [[tasks]]"),
        ("tasks = []", "at least one table [[tasks]]"),
        ("", "at least one table [[tasks]]"),
        ('[tasks]\nname = "a"\ntarget = "x"', "at least one table [[tasks]]"),
        ("nonsense", "cannot read"),
        ('[[tasks]]\nname = "a"', "tasks.0: give either target or image"),
        ('[[tasks]]\nname = "a"\nimage = "x"', 'kind = "docker"'),
        ('[[tasks]]\nname = "A b"\ntarget = "x"', "tasks.0.name: must be lower-case"),
        (f"{TASK}\nreplica = 2", "tasks.0.replica: there is no such key; did you mean 'replicas'?"),
        (f"{TASK}\nlimits = {{memry = 1}}", "limits.memry: there is no such key; did you mean 'memory'?"),
        (f"[controler]\nport = 1\n{TASK}", "controler: there is no such key; did you mean 'controller'?"),
        (f"queue = 1\n{TASK}", "queue: there is no such key; did you mean 'controller.queue'?"),
        (f"[controller]\nreplicas = 2\n{TASK}", "no such key; did you mean 'tasks.replicas'?"),
        (f"[controller]\nzzz = 2\n{TASK}", "controller.zzz: there is no such key"),
        ('[[tasks]]\nname = "a"\ntarget = "x"\nreplicas = 0', "tasks.0.replicas"),
        (f"{TASK}\nlease = 0.5", "tasks.0.lease: Input should be greater than or equal to 1"),
        ('[[tasks]]\nname = "a"\ntarget = "x"\nlimits = {memory = "much"}', "'much' is not a size"),
        (
            f'{TASK}\nlimits = {{memory = "64m"}}',
            "tasks.0: a process has no limits; remove it, or set kind",
        ),
        (f'{TASK}\nkind = "process"\nnetwork = "none"', "tasks.0: a process has no network; remove it"),
        ('[[tasks]]\nname = "a"\ntarget = "x"\n' * 2, "two tasks are named 'a'"),
    ],
)
def test_invalid_file_is_rejected_in_one_line(config, text, message):
    with pytest.raises(LaunchError) as raised:
        config(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_invalid_task_is_the_only_problem_of_its_file(config):
    with pytest.raises(LaunchError) as raised:
        config(f"{TASK}\nreplicas = 0")
    assert str(raised.value).endswith("tasks.0.replicas: Input should be greater than or equal to 1")


def test_file_of_a_windows_editor_is_read(config):
    assert config("\ufeff" + TASK.replace("\n", "\r\n")).tasks[0].name == "shop"


def test_manifests_are_valid_for_kubernetes(config):
    documents = list(yaml.safe_load_all(kubernetes(config())))
    kinds = ["Deployment", "Service", "Deployment", "Deployment", "NetworkPolicy"]
    assert [document["kind"] for document in documents] == kinds
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_pods_are_confined(config):
    for document in yaml.safe_load_all(kubernetes(config())):
        if document["kind"] != "Deployment":
            continue
        pod = document["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
        paths = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("readiness", "liveness")}
        assert paths == {"readiness": "/ready", "liveness": "/health"}
        token = container["env"][0]
        key = "token" if container["name"] == "controller" else "link"
        assert token["valueFrom"]["secretKeyRef"] == {"name": "lab-token", "key": key}


def test_servers_reach_only_the_controller_and_dns(config):
    *_, policy = yaml.safe_load_all(kubernetes(config()))
    spec = policy["spec"]
    assert spec["ingress"] == []
    link, names = spec["egress"]
    assert link["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"
    assert {port["port"] for port in names["ports"]} == {53}


def test_resume_is_passed_to_the_controller(config):
    assert config().controller.resume is False
    resuming = config(f"[controller]\nresume = true\n{TASK}")
    (controller, *_) = yaml.safe_load_all(kubernetes(resuming))
    (container,) = controller["spec"]["template"]["spec"]["containers"]
    assert "--resume" in container["args"]
    assert "--resume" in yaml.safe_load(compose(resuming))["services"]["controller"]["command"]
    assert "--resume" not in kubernetes(config()) + compose(config())


def test_servers_in_compose_have_only_the_link_token(config):
    services = yaml.safe_load(compose(config()))["services"]
    tokens = {name: service["environment"]["AGENTRL_TOKEN"] for name, service in services.items()}
    assert tokens.pop("controller").startswith("${LAB_TOKEN:?")
    assert all(token.startswith("${AGENTRL_LINK_TOKEN:?") for token in tokens.values())


def test_only_the_controller_has_the_key_of_agent_tokens(config):
    services = yaml.safe_load(compose(config()))["services"]
    assert [name for name, service in services.items() if "AGENTRL_AGENT_KEY" in service["environment"]] == [
        "controller"
    ]
    pods = [d for d in yaml.safe_load_all(kubernetes(config())) if d["kind"] == "Deployment"]
    (container,), *others = [pod["spec"]["template"]["spec"]["containers"] for pod in pods]
    (reference,) = [one for one in container["env"] if one["name"] == "AGENTRL_AGENT_KEY"]
    assert reference["valueFrom"]["secretKeyRef"]["optional"] is True
    assert "AGENTRL_AGENT_KEY" not in str(others)


def test_compose_contains_the_configuration(config):
    written = yaml.safe_load(compose(config()))
    shop = written["services"]["shop"]
    assert shop["image"] == "agentrl-shop:latest"
    assert shop["environment"]["COLOUR"] == "blue: #1"
    assert shop["deploy"]["replicas"] == 3
    assert shop["deploy"]["resources"]["limits"] == {"cpus": "0.5", "memory": str(512 << 20)}
    assert "--oracle" in shop["command"]
    assert shop["networks"] == ["fleet"]
    assert written["networks"]["fleet"] == {"internal": True}
    assert written["services"]["controller"]["ports"] == ["127.0.0.1:9000:8100"]
    assert "redis://redis:6379/0" in written["services"]["controller"]["command"]


def test_special_characters_round_trip_through_yaml(config):
    odd = json.dumps('a"b\\c: {d} # é\n- x')
    written = yaml.safe_load(compose(config(FILE.replace('"blue: #1"', odd))))
    assert written["services"]["shop"]["environment"]["COLOUR"] == json.loads(odd)
