"""Observation: metrics, traces, recordings and logs."""
