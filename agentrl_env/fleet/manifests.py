"""Manifests of a fleet: for Kubernetes and for Docker Compose."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from agentrl_env.fleet.config import FleetConfig
from agentrl_env.launch.docker import ContainerLimits
from agentrl_env.launch.image_context import PORT, USER
from agentrl_env.launch.process import ServeOptions
from agentrl_env.server.auth import AGENT_KEY

_CONTROLLER, _CONTROLLER_PORT = "controller", 8100
_ENTRY = "/opt/agentrl/bin/agentrl-env"
_LINK_VARIABLE = "AGENTRL_LINK_TOKEN"
_OPERATOR = "token"
_GRACE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    """The controller, or the servers of one task. ``secret`` is the token's key in the Kubernetes secret."""

    name: str
    image: str
    arguments: list[str]
    limits: ContainerLimits
    secret: str
    port: int
    entrypoint: list[str] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    replicas: int = 1
    grace_s: float = _GRACE_S


def kubernetes(config: FleetConfig) -> str:
    """Return the manifests as YAML documents.

    The servers connect to the controller and need no Service. The network policy allows them to reach only
    the controller and DNS. The secret ``NAME-token`` has three keys: ``token`` is the operator's token for
    the controller, ``link`` is the output of ``agentrl-env controller --print-link-token`` for the servers,
    and ``agents`` is the optional key of agent tokens.
    """
    controller, *servers = _workloads(config, f"{config.name}-{_CONTROLLER}")
    metadata = _metadata(config, _CONTROLLER)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "selector": metadata["labels"],
            "ports": [{"name": "http", "port": _CONTROLLER_PORT, "targetPort": "http"}],
        },
    }
    deployments = [_deployment(config, server) for server in servers]
    documents = [_deployment(config, controller), service, *deployments, _network_policy(config)]
    return "---\n".join(_yaml(document) for document in documents)


def compose(config: FleetConfig) -> str:
    """Return a Compose file in which the servers can reach only the controller.

    Only the controller is on a network with outside access. The operator's token comes from the configured
    variable. ``AGENTRL_LINK_TOKEN`` holds the output of ``agentrl-env controller --print-link-token`` for
    the servers.
    """
    controller, *servers = _workloads(config, _CONTROLLER)
    hint = "set it to the output of agentrl-env controller --print-link-token"
    link = f"${{{_LINK_VARIABLE}:?{hint}}}"
    token = f"${{{config.controller.token_env}:?set the token of the fleet}}"
    controller.environment[AGENT_KEY] = f"${{{AGENT_KEY}:-}}"
    services = {
        _CONTROLLER: {
            **_service(controller, token),
            "ports": [f"{config.controller.host}:{config.controller.port}:{_CONTROLLER_PORT}"],
            "networks": ["fleet", "outside"],
        }
    }
    for server in servers:
        limits = {"cpus": f"{server.limits.cpus:g}", "memory": str(server.limits.memory)}
        services[server.name] = {
            **_service(server, link),
            "networks": ["fleet"],
            "depends_on": {_CONTROLLER: {"condition": "service_healthy"}},
            "deploy": {"replicas": server.replicas, "resources": {"limits": limits}},
            "stop_grace_period": f"{server.grace_s:g}s",
        }
    return _yaml({"services": services, "networks": {"fleet": {"internal": True}, "outside": {}}})


def _workloads(config: FleetConfig, host: str) -> list[_Workload]:
    """Return the controller and the servers, which reach it at ``host``."""
    settings, first = config.controller, config.tasks[0]
    arguments = [_CONTROLLER, "--host", "0.0.0.0", "--port", str(_CONTROLLER_PORT)]
    arguments += ["--queue", f"{settings.queue:g}", *(["--redis", settings.redis] if settings.redis else [])]
    arguments += ["--resume"] if settings.resume else []
    controller = _Workload(
        name=_CONTROLLER,
        image=settings.image or first.image_name,
        arguments=arguments,
        limits=first.limits.model_copy(update={"cpus": 1.0, "memory": 1 << 30}),
        secret=_OPERATOR,
        port=_CONTROLLER_PORT,
        entrypoint=[_ENTRY],
    )
    # Appended to the image's own options, which make the server listen for health checks.
    link = ["--controller", f"http://{host}:{_CONTROLLER_PORT}"]
    servers = [
        _Workload(
            name=task.name,
            image=task.image_name,
            arguments=[*link, *ServeOptions(**task.serve_options()).session_arguments()],
            limits=task.limits,
            secret="link",
            port=PORT,
            environment=task.environment,
            replicas=task.replicas,
            grace_s=task.drain + _GRACE_S,
        )
        for task in config.tasks
    ]
    return [controller, *servers]


def _service(work: _Workload, token: str) -> dict[str, Any]:
    """Return a confined service of Compose."""
    limits = work.limits
    url = f"http://127.0.0.1:{work.port}/health"
    code = f"import urllib.request as u; u.urlopen('{url}', timeout=2)"
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
        "image": work.image,
        **({"entrypoint": work.entrypoint} if work.entrypoint else {}),
        "command": work.arguments,
        "environment": {**work.environment, "AGENTRL_TOKEN": token},
        "healthcheck": {
            "test": ["CMD", "/opt/agentrl/bin/python", "-c", code],
            "interval": "5s",
            "timeout": "5s",
            "retries": 3,
            "start_period": "60s",
        },
    }


def _metadata(config: FleetConfig, component: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": config.name, "app.kubernetes.io/component": component}
    return {"name": f"{config.name}-{component}", "labels": labels}


def _deployment(config: FleetConfig, work: _Workload) -> dict[str, Any]:
    metadata = _metadata(config, work.name)
    user = int(USER.partition(":")[0])
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(work.grace_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(config, work)],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": str(work.limits.tmp)}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": work.replicas,
            "selector": {"matchLabels": metadata["labels"]},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": metadata["labels"]}, "spec": pod},
        },
    }


def _container(config: FleetConfig, work: _Workload) -> dict[str, Any]:
    secret = {"secretKeyRef": {"name": f"{config.name}-token", "key": work.secret}}
    agents = {"secretKeyRef": {"name": f"{config.name}-token", "key": "agents", "optional": True}}
    limits = {"cpu": f"{work.limits.cpus:g}", "memory": str(work.limits.memory)}
    health = {"httpGet": {"path": "/health", "port": "http"}}
    return {
        "name": work.name,
        "image": work.image,
        "args": work.arguments,
        "env": [
            {"name": "AGENTRL_TOKEN", "valueFrom": secret},
            *([{"name": AGENT_KEY, "valueFrom": agents}] if work.secret == _OPERATOR else []),
            *({"name": key, "value": value} for key, value in work.environment.items()),
        ],
        "ports": [{"name": "http", "containerPort": work.port}],
        "resources": {"limits": limits, "requests": limits},
        "startupProbe": {**health, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {"httpGet": {**health["httpGet"], "path": "/ready"}, "periodSeconds": 5},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        **({"command": work.entrypoint} if work.entrypoint else {}),
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
    """Return a value as YAML in block style. Scalars are written as JSON, a subset of YAML."""
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
