"""Write the generated files of ``deploy/``: ``python -m deploy.generate``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from deploy.alerts import ALERTS
from deploy.dashboards import DASHBOARDS

FOLDER = Path(__file__).parent
RUNBOOK = "docs/how-to/runbook.md"
"""Page with a section for each alert."""


def rules() -> str:
    """Return the alert rules of Prometheus as YAML."""
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook": f"{RUNBOOK}#{alert.name.lower()}"},
        }
        for alert in ALERTS
    ]
    head = "# python -m deploy.generate writes this file.\n"
    return head + yaml.safe_dump(
        {"groups": [{"name": "agentrl", "rules": alerts}]}, sort_keys=False, width=1000
    )


def files() -> Iterator[tuple[Path, str]]:
    """Yield every generated file with its content."""
    yield FOLDER / "prometheus" / "alerts.yml", rules()
    yield FOLDER / "helm" / "agentrl" / "files" / "alerts.yml", rules()
    for name, dashboard in DASHBOARDS.items():
        yield FOLDER / "grafana" / name, json.dumps(dashboard, indent=2) + "\n"


if __name__ == "__main__":
    for path, text in files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(FOLDER.parent))
