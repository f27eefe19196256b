"""Manifests of a fleet: for Kubernetes and for Docker Compose."""

from __future__ import annotations

import json
from typing import Any

from agentrl_env.fleet.config import FleetConfig, TaskConfig
from agentrl_env.launch.image_context import PORT, USER

_CONTROLLER_PORT = 8100
_ENTRY = "/opt/agentrl/bin/agentrl-env"
_OPERATOR, _LINK = "token", "link"
"""The keys of the secret; servers see only the second."""
_LINK_VARIABLE = "AGENTRL_LINK_TOKEN"
_GRACE_S = 15.0


def kubernetes(config: FleetConfig) -> str:
    """Return the manifests as YAML documents.

    The servers connect to the controller and need no Service; the network policy allows them to reach only
    the controller and DNS. The secret ``NAME-token`` holds the operator's token under the key ``token`` for
    the controller, and the output of ``agentrl-env controller --print-link-token`` under the key ``link``
    for the servers.
    """
    selector = {"app.kubernetes.io/part-of": config.name, "app.kubernetes.io/component": "controller"}
    documents = [
        _deployment(config, "controller", 1, _controller_container(config), _GRACE_S),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(config, "controller"),
            "spec": {
                "selector": selector,
                "ports": [{"name": "http", "port": _CONTROLLER_PORT, "targetPort": "http"}],
            },
        },
        *(_task_deployment(config, task) for task in config.tasks),
        _network_policy(config),
    ]
    return "---\n".join(_yaml(document) for document in documents)


def compose(config: FleetConfig) -> str:
    """Return a Compose file; the servers can reach only the controller.

    Only the controller is on a network with outside access. The operator's token comes from the configured
    variable; ``AGENTRL_LINK_TOKEN`` holds the output of ``agentrl-env controller --print-link-token`` for
    the servers.
    """
    token = {"AGENTRL_TOKEN": f"${{{config.controller.token_env}:?set the token of the fleet}}"}
    hint = "set it to what agentrl-env controller --print-link-token prints"
    link = {"AGENTRL_TOKEN": f"${{{_LINK_VARIABLE}:?{hint}}}"}
    services = {
        "controller": {
            **_confinement(config.tasks[0]),
            "image": _controller_image(config),
            "entrypoint": [_ENTRY],
            "command": _controller_arguments(config),
            "environment": token,
            "ports": [f"{config.controller.host}:{config.controller.port}:{_CONTROLLER_PORT}"],
            "networks": ["fleet", "outside"],
            "healthcheck": _health_check(_CONTROLLER_PORT),
        }
    }
    for task in config.tasks:
        services[task.name] = {
            **_confinement(task),
            "image": task.image_name,
            "command": _serve_arguments(task, f"http://controller:{_CONTROLLER_PORT}"),
            "environment": {**task.environment, **link},
            "networks": ["fleet"],
            "depends_on": {"controller": {"condition": "service_healthy"}},
            "deploy": {
                "replicas": task.replicas,
                "resources": {"limits": {"cpus": f"{task.limits.cpus:g}", "memory": str(task.limits.memory)}},
            },
            "healthcheck": _health_check(PORT),
            "stop_grace_period": f"{task.drain + _GRACE_S:g}s",
        }
    networks = {"fleet": {"internal": True}, "outside": {}}
    return _yaml({"services": services, "networks": networks})


def _controller_image(config: FleetConfig) -> str:
    return config.controller.image or config.tasks[0].image_name


def _controller_arguments(config: FleetConfig) -> list[str]:
    settings = config.controller
    arguments = ["controller", "--host", "0.0.0.0", "--port", str(_CONTROLLER_PORT)]
    arguments += ["--queue", f"{settings.queue:g}"]
    arguments += ["--redis", settings.redis] if settings.redis else []
    return [*arguments, "--resume"] if settings.resume else arguments


def _serve_arguments(task: TaskConfig, controller: str) -> list[str]:
    """Return the arguments after the image's own, which keep the server listening for health checks."""
    return ["--controller", controller, *task.arguments()]


def _confinement(task: TaskConfig) -> dict[str, Any]:
    limits = task.limits
    return {
        "user": USER,
        "read_only": True,
        "tmpfs": [f"/tmp:rw,exec,nosuid,nodev,size={limits.tmp},mode=1777"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "pids_limit": limits.pids,
        "ulimits": {"nofile": {"soft": limits.files, "hard": limits.files}, "core": 0},
        "init": True,
        "restart": "unless-stopped",
    }


def _health_check(port: int) -> dict[str, Any]:
    code = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/health', timeout=2)"
    return {
        "test": ["CMD", "/opt/agentrl/bin/python", "-c", code],
        "interval": "5s",
        "timeout": "5s",
        "retries": 3,
        "start_period": "60s",
    }


def _metadata(config: FleetConfig, component: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": config.name, "app.kubernetes.io/component": component}
    return {"name": f"{config.name}-{component}", "labels": labels}


def _deployment(
    config: FleetConfig, component: str, replicas: int, container: dict[str, Any], grace_s: float
) -> dict[str, Any]:
    metadata = _metadata(config, component)
    user = int(USER.partition(":")[0])
    tmp = next((task for task in config.tasks if task.name == component), config.tasks[0]).limits.tmp
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(grace_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": str(tmp)}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": metadata["labels"]},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": metadata["labels"]}, "spec": pod},
        },
    }


def _controller_container(config: FleetConfig) -> dict[str, Any]:
    limits = {"cpu": "1", "memory": str(1 << 30)}
    arguments = _controller_arguments(config)
    return {
        **_container(
            config,
            "controller",
            _controller_image(config),
            arguments,
            {},
            limits,
            _CONTROLLER_PORT,
            _OPERATOR,
        ),
        "command": [_ENTRY],
    }


def _task_deployment(config: FleetConfig, task: TaskConfig) -> dict[str, Any]:
    limits = {"cpu": f"{task.limits.cpus:g}", "memory": str(task.limits.memory)}
    arguments = _serve_arguments(task, _controller_url(config))
    container = _container(
        config, task.name, task.image_name, arguments, task.environment, limits, PORT, _LINK
    )
    return _deployment(config, task.name, task.replicas, container, task.drain + _GRACE_S)


def _controller_url(config: FleetConfig) -> str:
    return f"http://{config.name}-controller:{_CONTROLLER_PORT}"


def _container(
    config: FleetConfig,
    name: str,
    image: str,
    arguments: list[str],
    environment: dict[str, str],
    limits: dict[str, str],
    port: int,
    token: str,
) -> dict[str, Any]:
    secret = {"secretKeyRef": {"name": f"{config.name}-token", "key": token}}
    health = {"httpGet": {"path": "/health", "port": "http"}}
    return {
        "name": name,
        "image": image,
        "args": arguments,
        "env": [
            {"name": "AGENTRL_TOKEN", "valueFrom": secret},
            *({"name": key, "value": value} for key, value in environment.items()),
        ],
        "ports": [{"name": "http", "containerPort": port}],
        "resources": {"limits": limits, "requests": limits},
        "startupProbe": {**health, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {**health, "periodSeconds": 5},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def _network_policy(config: FleetConfig) -> dict[str, Any]:
    part = {"app.kubernetes.io/part-of": config.name}
    controller = {"matchLabels": {**part, "app.kubernetes.io/component": "controller"}}
    servers = [{"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["controller"]}]
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    link = [{"protocol": "TCP", "port": _CONTROLLER_PORT}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(config, "servers"),
        "spec": {
            "podSelector": {"matchLabels": part, "matchExpressions": servers},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": [{"to": [{"podSelector": controller}], "ports": link}, {"ports": names}],
        },
    }


def _yaml(value: Any, indent: int = 0) -> str:
    """Return a value as YAML in block style; scalars are JSON, a subset of YAML."""
    pad = " " * indent
    lines = []
    if isinstance(value, dict) and value:
        for key, item in value.items():
            nested = isinstance(item, dict | list) and item
            lines.append(
                f"{pad}{key}:" + (f"\n{_yaml(item, indent + 2)}" if nested else f" {json.dumps(item)}\n")
            )
    elif isinstance(value, list) and value:
        for item in value:
            if isinstance(item, dict) and item:
                lines.append(f"{pad}- {_yaml(item, indent + 2).lstrip()}")
            else:
                lines.append(f"{pad}- {json.dumps(item)}\n")
    return "".join(lines)
