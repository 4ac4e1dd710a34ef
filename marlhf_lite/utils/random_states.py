"""States of every random generator that a run draws from."""

import random

import numpy
import torch


def random_states() -> tuple:
    """Return the states of the generators of torch, GPU, Python and numpy: sampling, training and rewards may draw."""
    cuda = []
    if torch.cuda.is_available():
        cuda = [torch.cuda.get_rng_state()]  # of this process's GPU
    # numpy's keys as a list, because checkpoints hold no arrays of numpy
    kind, keys, *rest = numpy.random.get_state()
    of_numpy = (kind, keys.tolist(), *rest)
    return torch.get_rng_state(), cuda, random.getstate(), of_numpy


def set_random_states(saved: tuple) -> None:
    """Restore what `random_states` returned."""
    cpu, cuda, python, of_numpy = saved
    torch.set_rng_state(cpu)
    if cuda and torch.cuda.is_available():
        # Older checkpoints have the states of all GPUs of a machine, which may have fewer now.
        torch.cuda.set_rng_state(cuda[torch.cuda.current_device() % len(cuda)])
    random.setstate(python)
    numpy.random.set_state(of_numpy)
