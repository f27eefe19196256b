"""The operations pack: dashboards, alerts, a Helm chart and a systemd unit."""
