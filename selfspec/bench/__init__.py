"""Measurement: modes side by side, tasks, throughput, and the stages of one step."""
