"""Rollouts by vLLM servers."""
