"""Telemetry of a run: metrics, trace, progress and sinks."""
