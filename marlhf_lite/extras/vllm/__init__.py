"""Rollouts by vLLM's servers."""
