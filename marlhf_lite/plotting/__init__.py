"""Figures of training and evaluation."""
