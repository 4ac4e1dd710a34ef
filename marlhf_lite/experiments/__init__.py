"""Runs: their inputs and data, checks before training, stages chained into a pipeline, and reports."""
