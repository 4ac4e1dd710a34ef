"""The recipes of examples/: objectives against float64 loops, checked answers, and a reward behind an endpoint."""

import ast
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import fails

from marlhf_lite.cli import main
from marlhf_lite.config.options import PPOTrainerConfig
from marlhf_lite.macro import FixedNGram, Whole
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.training.experience import ModelOutputs
from marlhf_lite.training.objective import Objective
from marlhf_lite.training.objectives import make_objective
from marlhf_lite.training.rewards import FunctionReward
from marlhf_lite.training.rollout import generate

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the examples in it."""
    for name in ("objectives", "reasoning", "remote_reward"):
        shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


# -- objectives -------------------------------------------------------------------------------------------------------


class Case:
    """A batch of the tests with outputs that are drawn: old ones, and new ones that have moved away."""

    def __init__(self, rollout, rule, seed=0, **options):
        self.config = PPOTrainerConfig(max_response_length=12, batch_size=len(rollout), **options)
        self.objective, draw = make_objective(self.config), torch.Generator().manual_seed(seed)
        mask, noise = (
            rollout.mask,
            lambda: torch.randn(rollout.mask.shape, generator=draw).masked_fill(~mask, 0.0),
        )
        self.batch = self.objective.batch(rollout, rule(mask))
        self.entropy = noise().abs()
        before = ModelOutputs(rollout.ref_logprobs + 0.1 * noise(), self.entropy, noise())
        self.old = self.objective.advantages(self.batch, before)
        self.plain = Objective.advantages(self.objective, self.batch, before)
        self.new = replace(before, logprobs=(before.logprobs + 0.4 * noise()).requires_grad_())
        self.lengths = self.batch.steps.lengths
        # Of each response: (token, step) pairs of its tokens, in order.
        steps = [
            [s for s, n in enumerate(row) for _ in range(int(n))] for row in self.lengths.tolist()
        ]
        self.tokens = [list(enumerate(row)) for row in steps]

    def loss(self, sizes):
        """The policy's loss in micro-batches of `sizes`, and its gradient."""
        count, total, start = self.objective.counts(self.batch)[0], 0.0, 0
        for size in sizes:
            rows = torch.arange(start, start + size)
            part = ModelOutputs(**{name: x[rows] for name, x in vars(self.new).items()})
            total, start = (
                total
                + self.objective.policy_loss(
                    self.batch.select(rows), part, self.old.select(rows), count
                )[0],
                start + size,
            )
        (gradient,) = torch.autograd.grad(total, self.new.logprobs)
        return total.item(), gradient

    def ratio(self, row, t):
        return math.exp(self.new.logprobs[row, t].item() - self.old.logprobs[row, t].item())

    def check(self, terms, count, sizes=(6,)):
        loss, gradient = self.loss(sizes)
        assert loss == pytest.approx(-math.fsum(terms) / count, rel=1e-5, abs=1e-7)
        return gradient


def bounded(ratio, gain, low=0.2, high=0.2):
    return min(ratio * gain, max(min(ratio, 1 + high), 1 - low) * gain)


@pytest.fixture(params=[1, 3])
def n(request):
    return request.param


@pytest.mark.parametrize("sizes", [(6,), (1, 4, 1)])
def test_clip_higher(folder, batch, n, sizes):
    case = Case(batch, FixedNGram(n), objective="objectives:ClipHigher")
    pairs = [(row, t, s) for row, tokens in enumerate(case.tokens) for t, s in tokens]
    gains = case.old.advantages.double().tolist()
    terms = [bounded(case.ratio(row, t), gains[row][s], high=0.28) for row, t, s in pairs]
    gradient = case.check(terms, len(pairs), sizes)
    between = [
        (row, t) for row, t, s in pairs if gains[row][s] > 0 and 1.2 < case.ratio(row, t) < 1.28
    ]
    beyond = [(row, t) for row, t, s in pairs if gains[row][s] > 0 and case.ratio(row, t) > 1.28]
    assert between and beyond  # some tokens that PPO clips still move, and others do not
    assert all(gradient[at] for at in between) and not any(gradient[at] for at in beyond)


@pytest.mark.parametrize("sizes", [(6,), (2, 3, 1)])
def test_only_the_fifth_of_the_steps_with_the_highest_entropy_moves_the_policy(
    folder, batch, n, sizes
):
    case = Case(batch, FixedNGram(n), objective="objectives:EntropyMask")
    entropies = {}  # of each step: the mean of its tokens
    for row, tokens in enumerate(case.tokens):
        for s in {s for _, s in tokens}:
            own = [case.entropy[row, t].item() for t, step in tokens if step == s]
            entropies[row, s] = math.fsum(own) / len(own)
    # at or above the 80 % point
    kept = sorted(entropies, key=entropies.get)[math.ceil(0.8 * (len(entropies) - 1)) :]
    gains, count = case.plain.advantages.double().tolist(), sum(map(len, case.tokens))
    terms = [
        bounded(case.ratio(row, t), gains[row][s])
        for row, tokens in enumerate(case.tokens)
        for t, s in tokens
        if (row, s) in kept
    ]
    gradient = case.check(terms, count, sizes)
    moved = {
        (row, s) for row, tokens in enumerate(case.tokens) for t, s in tokens if gradient[row, t]
    }
    assert moved and moved <= set(kept) and torch.equal(case.old.returns, case.plain.returns)


@pytest.mark.parametrize("sizes", [(6,), (5, 1)])
def test_dr_grpo_divides_by_a_constant(folder, batch, n, sizes):
    case = Case(batch, FixedNGram(n), objective="objectives:DrGRPO")
    gains = case.old.advantages.double().tolist()
    terms = [
        bounded(case.ratio(row, t), gains[row][s])
        for row, tokens in enumerate(case.tokens)
        for t, s in tokens
    ]
    case.check(terms, 6 * 12, sizes)


@pytest.mark.parametrize("sizes", [(6,), (1, 3, 2)])
def test_sampler_weights(folder, batch, n, sizes):
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(5)).masked_fill(
        ~batch.mask, 0.0
    )
    sampled = batch.ref_logprobs + noise
    case = Case(
        replace(batch, sampled_logprobs=sampled),
        FixedNGram(n),
        objective="objectives:SamplerWeights",
    )
    pairs = [(row, t, s) for row, tokens in enumerate(case.tokens) for t, s in tokens]
    gains, gaps = (
        case.old.advantages.double().tolist(),
        (case.old.logprobs - sampled).double().tolist(),
    )
    weights = {(row, t): min(math.exp(gaps[row][t]), 3.0) for row, t, _ in pairs}
    terms = [weights[row, t] * bounded(case.ratio(row, t), gains[row][s]) for row, t, s in pairs]
    case.check(terms, len(pairs), sizes)
    assert max(weights.values()) == 3.0 and min(weights.values()) < 0.5


def test_gspo_is_two_options(folder, batch):
    """One ratio a response: exp of the mean log-ratio of its tokens, against its advantage; a mean over responses."""
    case = Case(batch, Whole(), termination="whole", ratio="macro_mean", cliprange=0.05)
    terms = []
    for row, tokens in enumerate(case.tokens):
        mean = math.fsum(math.log(case.ratio(row, t)) for t, _ in tokens) / len(tokens)
        terms.append(bounded(math.exp(mean), case.old.advantages[row, 0].item(), 0.05, 0.05))
    case.check(terms, 6)
    case.check(terms, 6, (2, 4))


def test_an_answer_without_an_end_scores_less(folder, batch, n):
    """By the penalty, once, on its last macro action; the others as before."""
    mixed = replace(batch, ended=torch.tensor([True, False, True, False, False, True]))
    case = Case(mixed, FixedNGram(n), objective="objectives:MissingEOS")
    outputs = ModelOutputs(case.old.logprobs, case.entropy, case.old.values)
    plain = Objective.rewards(case.objective, case.batch, outputs)
    found = case.objective.rewards(case.batch, outputs)
    for row, steps in enumerate(case.batch.steps.mask.sum(1).tolist()):
        expected = plain[row].tolist()
        if not mixed.ended[row] and steps:
            expected[steps - 1] -= 1.0
        assert found[row].tolist() == pytest.approx(expected)


def test_without_log_probabilities_sampler_weights_are_1(folder, batch, n):
    ours, plain = (
        Case(batch, FixedNGram(n), objective=name) for name in ("objectives:SamplerWeights", "")
    )
    assert ours.loss((6,))[0] == plain.loss((6,))[0] and torch.equal(
        ours.loss((6,))[1], plain.loss((6,))[1]
    )


def with_logprobs(model, *args):
    """`generate`, with the log-probabilities that a server would give."""
    rollout = generate(model, *args)
    with torch.no_grad():
        logprobs = PolicyModel(model)(
            rollout.tokens, rollout.attention_mask, rollout.mask.shape[1]
        )[0]
    return replace(rollout, sampled_logprobs=logprobs)


@pytest.mark.parametrize(
    "name", ["ClipHigher", "EntropyMask", "DrGRPO", "SamplerWeights", "MissingEOS"]
)
def test_each_is_twelve_lines_and_trains(folder, make, name):
    text = (folder / "objectives.py").read_text().split(f"class {name}(")[1].split("\n\n\n")[0]
    assert len([line for line in text.splitlines() if line.strip()]) <= 12
    rows = make(
        objective=f"objectives:{name}", sampler=with_logprobs, updates=2, micro_batch_size=1
    ).train()
    assert len(rows) == 2 and all(math.isfinite(row["policy_loss"]) for row in rows)


def test_lesson_11_shows_the_classes_of_the_examples():
    lesson = json.loads(
        (EXAMPLES.parent / "notebooks" / "11_baselines.ipynb").read_text(encoding="utf-8")
    )
    (cell,) = [
        "".join(cell["source"]) for cell in lesson["cells"] if cell["id"] == "recipes-classes"
    ]
    classes = [
        {
            node.name: ast.dump(node)
            for node in ast.parse(text).body
            if isinstance(node, ast.ClassDef)
        }
        for text in (cell, (EXAMPLES / "objectives.py").read_text(encoding="utf-8"))
    ]
    assert len(classes[0]) == 3 and classes[0].items() <= classes[1].items()


# -- checked answers --------------------------------------------------------------------------------------------------


def test_reasoning_from_an_empty_folder(folder, capsys):
    """The data file, then two updates with the checked reward, in this process."""
    gym = pytest.importorskip("reasoning_gym", reason="pip install 'marlhf-lite[examples]'")
    subprocess.run([sys.executable, "reasoning.py"], check=True, timeout=300)
    rows = [json.loads(line) for line in (folder / "reasoning.jsonl").read_text().splitlines()]
    kinds = {"chain_sum", "leg_counting", "countdown", "gsm_symbolic"}
    assert len(rows) == 400 and {row["kind"] for row in rows} == kinds
    small = "--updates 2 --batch_size 4 --micro_batch_size 4 --max_response_length 4 --sft_epochs 0.2 --eval_prompts 8"
    data = "--dataset reasoning.jsonl --reward reasoning:right --output_dir run"
    assert main(["run", *data.split(), *small.split()]) == 0
    assert "not used" not in capsys.readouterr().out
    updates = [
        json.loads(line)
        for line in (folder / "run" / "ma-ppo" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(updates) == 2 and all(0 <= row["score_mean"] <= 1 for row in updates)
    by_prompt = {row["prompt"]: row for row in rows}
    for row in map(json.loads, (folder / "run" / "samples.jsonl").read_text().splitlines()):
        known = by_prompt[row["prompt"]]
        words = (row["response"].strip().splitlines() or [""])[-1].removeprefix("Answer:").strip()
        right = gym.get_score_answer_fn(known["kind"])(words, known["task"])
        assert row["reasoning:right"] == pytest.approx(right)  # stored in float32


def test_the_checked_reward_knows_right_from_wrong(folder):
    pytest.importorskip("reasoning_gym", reason="pip install 'marlhf-lite[examples]'")
    import reasoning

    rows = list(reasoning.rows(40))
    columns = {name: [row[name] for row in rows] for name in ("kind", "task")}
    answers = [row["answer"] for row in rows]
    assert (
        reasoning.right(answers, [f"I think.\n{answer}\n" for answer in answers], **columns)
        == [1.0] * 40
    )
    assert max(reasoning.right(answers, ["no idea"] * 40, **columns)) <= 0.05
    assert reasoning.right([""], [""], [rows[0]["kind"]], [rows[0]["task"]]) == [0.0]
    attack = "__import__('pathlib').Path('broken').touch()"
    for text in (attack, "9**9**9**9**9", "(" * 90, "1e9", "lambda: 0"):
        reasoning.right([""], [text], ["countdown"], [{"metadata": {"numbers": [1], "target": 1}}])
        assert not (folder / "broken").exists()


# -- a reward behind an endpoint --------------------------------------------------------------------------------------


class Grader(BaseHTTPRequestHandler):
    """Speaks chat completions: the grade is the number of words of the answer."""

    def do_POST(self):
        body, server = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        server.requests.append(body)
        answer = body["messages"][-1]["content"].rpartition("Answer:\n")[2]
        text = server.reply(answer)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        data = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
        }
        busy = len(server.requests) == 1  # the first request has to be made again
        data = b"{}" if busy else json.dumps(data).encode()
        self.send_response(503 if busy else 200)
        for header in (
            ("Content-Type", "application/json"),
            ("Content-Length", len(data)),
            ("retry-after-ms", 1),
        ):
            self.send_header(*map(str, header))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def grader(folder, monkeypatch):
    pytest.importorskip("openai")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Grader)
    server.requests, server.reply = [], lambda answer: f"Grade: {len(answer.split())}"
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    monkeypatch.setenv("GRADER_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("GRADER_MODEL", "small")
    yield server
    server.shutdown()
    server.server_close()


def test_a_remote_reward(grader, make):
    from remote_reward import grade

    texts = ["word " * n for n in range(1, 21)]
    assert grade(["Why?"] * 20, texts) == [min(n, 10) / 10 for n in range(1, 21)]
    assert len(grader.requests) == 21 and {body["model"] for body in grader.requests} == {"small"}
    assert len(make(reward=FunctionReward(grade, "remote_reward:grade"), updates=1).train()) == 1
    grader.reply = lambda answer: "I would rather not"
    fails(
        make(reward=FunctionReward(grade, "remote_reward:grade")).train,
        "reward remote_reward:grade: raised ValueError",
        "rather not",
    )
