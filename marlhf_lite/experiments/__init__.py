"""Stages chained into pipelines, studies of methods and seeds, and their reports."""
