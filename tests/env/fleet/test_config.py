"""A fleet's file: what it may say, and the manifests that are printed of it."""

import json

import kubernetes_validate
import pytest
import yaml

from agentrl_env.errors import LaunchError
from agentrl_env.fleet.config import read_plan
from agentrl_env.fleet.manifests import compose, kubernetes
from agentrl_env.launch.placement import Limits

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
def plan(tmp_path):
    """Read a plan; the text is the one above unless another is given."""

    def read(text=FILE):
        (tmp_path / "shop").mkdir(exist_ok=True)
        (tmp_path / "fleet.toml").write_text(text)
        return read_plan(tmp_path / "fleet.toml")

    return read


def test_a_target_lies_beside_the_file_and_sizes_are_bytes(plan, tmp_path):
    shop, sql = plan().tasks
    assert shop.target == str(tmp_path / "shop")
    assert shop.limits == Limits(memory=512 << 20, cpus=0.5, pids=100, tmp=64 << 20)
    assert sql.limits == Limits()


def test_the_token_comes_from_the_environment(plan, monkeypatch):
    monkeypatch.delenv("LAB_TOKEN", raising=False)
    assert plan().token is None
    monkeypatch.setenv("LAB_TOKEN", "s3cret")
    assert plan().token == "s3cret"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tasks = 1", "tasks"),
        ("tasks = []", "tasks"),
        ("nonsense", "cannot read"),
        ('[[tasks]]\nname = "a"', "tasks.0: give either target or image"),
        ('[[tasks]]\nname = "a"\nimage = "x"', 'kind = "docker"'),
        ('[[tasks]]\nname = "A b"\ntarget = "x"', "tasks.0.name: must be lower-case"),
        ('[[tasks]]\nname = "a"\ntarget = "x"\nreplica = 2', "tasks.0.replica: Extra inputs"),
        ('[[tasks]]\nname = "a"\ntarget = "x"\nreplicas = 0', "tasks.0.replicas"),
        ('[[tasks]]\nname = "a"\ntarget = "x"\nlimits = {memory = "much"}', "'much' is no size"),
        (
            f'{TASK}\nlimits = {{memory = "64m"}}',
            "tasks.0: a process has no limits; leave it out, or set kind",
        ),
        (f'{TASK}\nkind = "process"\nnetwork = "none"', "tasks.0: a process has no network; leave it out"),
        ('[[tasks]]\nname = "a"\ntarget = "x"\n' * 2, "two tasks are named 'a'"),
    ],
)
def test_a_file_that_means_nothing_is_one_sentence(plan, text, said):
    with pytest.raises(LaunchError) as raised:
        plan(text)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_manifests_are_what_kubernetes_takes(plan):
    documents = list(yaml.safe_load_all(kubernetes(plan())))
    kinds = ["Deployment", "Service", "Deployment", "Deployment", "NetworkPolicy"]
    assert [document["kind"] for document in documents] == kinds
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_the_pods_can_do_nothing_else(plan):
    for document in yaml.safe_load_all(kubernetes(plan())):
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
        token = container["env"][0]
        key = "token" if container["name"] == "controller" else "link"
        assert token["valueFrom"]["secretKeyRef"] == {"name": "lab-token", "key": key}


def test_the_servers_reach_the_controller_alone(plan):
    *_, policy = yaml.safe_load_all(kubernetes(plan()))
    spec = policy["spec"]
    assert spec["ingress"] == []
    link, names = spec["egress"]
    assert link["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"
    assert {port["port"] for port in names["ports"]} == {53}


def test_a_fleet_resumes_where_its_file_says_so(plan):
    assert plan().controller.resume is False
    resuming = plan(f"[controller]\nresume = true\n{TASK}")
    (controller, *_) = yaml.safe_load_all(kubernetes(resuming))
    (container,) = controller["spec"]["template"]["spec"]["containers"]
    assert "--resume" in container["args"]
    assert "--resume" in yaml.safe_load(compose(resuming))["services"]["controller"]["command"]
    assert "--resume" not in kubernetes(plan()) + compose(plan())


def test_in_the_compose_file_servers_have_no_more_than_the_fleets_token(plan):
    services = yaml.safe_load(compose(plan()))["services"]
    tokens = {name: service["environment"]["AGENTRL_TOKEN"] for name, service in services.items()}
    assert tokens.pop("controller").startswith("${LAB_TOKEN:?")
    assert all(token.startswith("${AGENTRL_LINK_TOKEN:?") for token in tokens.values())


def test_the_plan_is_in_the_compose_file(plan):
    written = yaml.safe_load(compose(plan()))
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


def test_odd_text_survives(plan):
    odd = json.dumps('a"b\\c: {d} # é\n- x')
    written = yaml.safe_load(compose(plan(FILE.replace('"blue: #1"', odd))))
    assert written["services"]["shop"]["environment"]["COLOUR"] == json.loads(odd)
