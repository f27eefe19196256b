"""Telemetry of a serving process: metrics, log and traces."""
