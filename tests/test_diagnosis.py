"""A moment of a run measured: what is in it, and that training goes on as if nothing had been asked."""

import json

import torch
from conftest import PROMPTS
from small_runs import batches, build

from marlhf_lite.lab.credit.diagnosis import LADDER, Sizes, main, measure, read_options
from marlhf_lite.lab.studies.results import rounded

SMALL = Sizes(prompts=4, continuations=4, alternatives=2, ranked=3, replicates=4)


def test_a_moment_holds_what_a_lesson_reads_and_disturbs_nothing(moved, tokenizer):
    trainer = build(moved, tokenizer, length=8, top_k=0, kl_coef=0.1)
    weights = [p.detach().clone() for p in (*trainer.parameters["policy"], *trainer.parameters["critic"])]
    before = torch.random.get_rng_state()
    found = json.loads(json.dumps(rounded(measure(trainer, PROMPTS[:4], SMALL))))
    assert torch.equal(before, torch.random.get_rng_state())
    now = (*trainer.parameters["policy"], *trainer.parameters["critic"])
    assert all(torch.equal(x, y) and y.grad is None for x, y in zip(weights, now, strict=True))
    assert set(found["gradients"]) == {*LADDER, "RLOO"} and len(found["explained"]) == 4
    assert set(found["gradients"]["E0"]) == {"kept", "direction", "batch", "noise"}
    assert len(found["cuts"]) == len(found["explainable"]) == 3 and found["ranking"]["alternatives"] == 2
    again = measure(trainer, PROMPTS[:4], SMALL)
    assert json.loads(json.dumps(rounded(again))) == found
    trainer.updates_done = 1  # in the middle of a run, where the policy may differ from the reference
    trainer.update(next(batches(trainer)))
    assert measure(trainer, PROMPTS[:4], SMALL)["credit_seen"] != again["credit_seen"]


def test_options_are_those_of_the_study_main(capsys):
    options = read_options(["--seed", "3", "--kl_coef", "0.1"])
    assert (options.updates, options.critic_learning_rate, options.kl_coef) == (30, 0.003, 0.1)
    assert options.seed == 3
    assert main(["--sft", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("diagnosis: --sft nowhere: no adapter there") and error.count("\n") == 1
