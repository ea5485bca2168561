"""Measurements: speed, memory and host overhead, as JSON under benchmarks/results."""
