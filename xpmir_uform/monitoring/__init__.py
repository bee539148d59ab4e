"""Monitoring: telemetry, alerts and TensorBoard."""
