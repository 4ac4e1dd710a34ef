"""Generated programs: unit tests, the sandboxes that run them, and the reward of the results (paper, Appendix B.5).

A generated program is hostile input. It runs only in a sandbox, expected outputs stay outside, and this process
compares the plain data that come out.
"""

from marlhf_lite.extras.programs.runner import EXECUTORS, TestRunner, run_tests
from marlhf_lite.extras.programs.tests import Outcome, Problem, Test, program_reward, read_problem
