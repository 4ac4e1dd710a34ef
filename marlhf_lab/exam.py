"""Draw an exam with new numbers, and its answers: `python -m marlhf_lab.exam --seed 7` (or `make exam SEED=7`).

The questions are those of docs/teaching.md. Their numbers come from the seed, and the library computes the answers, so
each class can have a different exam of the same difficulty. Two pages are written: one to print, one for the teacher.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from marlhf_lite.macro import (
    FixedNGram,
    gae,
    kl_rewards,
    macro_rewards,
    macro_values,
    policy_loss,
    value_loss,
)

MINUTES = 90


@dataclass(frozen=True)
class Question:
    """One question with its answer and its points, as lines of Markdown."""

    text: str
    answer: str
    points: int


def number(value: float, digits: int = 3) -> str:
    """Write a number without trailing zeros, with a real minus sign."""
    text = f"{value:.{digits}f}".rstrip("0").rstrip(".")
    if text in ("-0", ""):  # a negative number that was rounded to 0, or a 0 that was stripped
        text = "0"
    return text.replace("-", "−")


def numbers(values: Tensor) -> str:
    """Write a row of numbers as `(0.1, −0.2)`."""
    return "(" + ", ".join(number(value) for value in values.flatten().tolist()) + ")"


def response_of(tokens: int) -> Tensor:
    """Return the mask [1, tokens] of one response."""
    return torch.ones(1, tokens, dtype=torch.bool)


def advantages_of(values: Tensor, score: float, *, n: int, lam: float) -> tuple[Tensor, Tensor]:
    """Return the advantages of macro actions of n tokens [1, S] and of their tokens [1, T], without a KL penalty.

    values: [1, T] of one response; γ is 1.
    """
    macro = FixedNGram(n)(response_of(values.shape[1]))
    rewards = macro_rewards(torch.zeros_like(values), torch.tensor([score]), macro)
    advantages, _ = gae(rewards, macro_values(values, macro), macro.mask, gamma=1.0, lam=lam)
    return advantages, macro.broadcast(advantages)


def draw_values(draw: random.Random) -> Tensor:
    """Return what a critic says of four tokens [1, 4]: tenths from 0.1 to 0.8."""
    return torch.tensor([[draw.randrange(1, 9) / 10 for _ in range(4)]])


def ask_gradient_of_logits(draw: random.Random) -> Question:
    """Ask for the gradient of three logits at the first step, and which words become more probable."""
    tenths = draw.choice([(5, 3, 2), (6, 3, 1), (5, 4, 1), (7, 2, 1)])
    probabilities = torch.tensor(tenths) / 10
    names = ("first", "second", "third")
    sampled = draw.randrange(3)
    advantage = draw.choice([-2.0, -1.0, 1.0, 2.0])
    logits = probabilities.log().requires_grad_()  # their softmax is the probabilities
    # At the first step the ratio is 1, so PPO's gradient is the advantage times that of the log-probability.
    (advantage * logits.log_softmax(-1)[sampled]).backward()
    # The derivative of a softmax: a probability p changes by p · (the rise of its logit − the mean rise of all logits,
    # weighted by the probabilities). So a word whose logit rises by less than this mean becomes less probable.
    mean_rise = (probabilities * logits.grad).sum()
    change = probabilities * (logits.grad - mean_rise)
    rising = [names[word] for word in range(3) if change[word] > 0]
    return Question(
        text=f"A policy gives three words the probabilities {numbers(probabilities)}. "
        f"The {names[sampled]} is sampled, and its advantage is {number(advantage)}. "
        "What is the gradient of PPO's objective with respect to the three logits at the first "
        "step? Which words become more probable after a small step?",
        answer=f"The gradient is {numbers(logits.grad)}: "
        "the advantage times (1 for the sampled word, 0 for the others, minus the "
        "probabilities). A probability rises if its logit rises by more than the mean of all "
        "logits' changes, weighted by the probabilities: "
        f"the {' and the '.join(rising)} word. "
        "*Points:* 3 for the numbers, 2 for the words.",
        points=5,
    )


def ask_what_a_baseline_does(draw: random.Random) -> Question:
    """Ask why a baseline changes only the noise. The question has no numbers, so nothing is drawn."""
    return Question(
        text="Why does a baseline leave the mean of the policy gradient unchanged? "
        "What does it change? Which property must the baseline have?",
        answer="The mean of the gradient of the log-probability, over all actions, is 0. If you "
        "multiply it by a number that does not depend on the action, the mean is still 0: "
        "this is the property. What the baseline changes is the noise. "
        "*Points:* 2 for the mean, 1 for the noise, 2 for the property.",
        points=5,
    )


def ask_advantages_of_tokens(draw: random.Random) -> Question:
    """Ask for GAE over single tokens."""
    values = draw_values(draw)
    lam = draw.choice([0.5, 0.8])
    _, by_token = advantages_of(values, 1.0, n=1, lam=lam)
    return Question(
        text="A response has four tokens. "
        f"The critic says {numbers(values)}, and the score 1 arrives at the last token, without a "
        f"KL penalty. Compute the four advantages of PPO with λ = {number(lam)}.",
        answer=f"{numbers(by_token)}. From the last token to the first: "
        "δ_t = r_t + V(t+1) − V(t), Â_t = δ_t + λ Â_(t+1). "
        "*Points:* 1 for δ, 1 for each advantage.",
        points=5,
    )


def ask_advantages_of_macro_actions(draw: random.Random) -> Question:
    """Ask for GAE over macro actions of two tokens."""
    values = draw_values(draw)
    lam = draw.choice([0.5, 0.8])
    by_action, by_token = advantages_of(values, 1.0, n=2, lam=lam)
    return Question(
        text=f"Another response of four tokens has the values {numbers(values)} and the score 1. "
        f"Compute the advantages of macro actions of two tokens (λ = {number(lam)}, values "
        "averaged). Which advantage trains each token?",
        answer=f"The macro actions have the advantages {numbers(by_action)}, so the tokens get "
        f"{numbers(by_token)}. *Points:* 1 for the values, 2 for the macro advantages, 2 for the "
        "tokens.",
        points=5,
    )


def ask_share_that_arrives(draw: random.Random) -> Question:
    """Ask which share of a score arrives at the first token, with single tokens and with macro actions."""
    n = draw.choice([4, 5])
    # 4 to 6 whole macro actions and a last one of a single token: so tokens − 1 is a multiple of n.
    tokens = n * draw.choice([4, 5, 6]) + 1
    lam = draw.choice([0.9, 0.95])
    actions_after_first = (tokens - 1) // n
    by_token = number(lam ** (tokens - 1))
    by_action = number(lam**actions_after_first)
    lam_that_fades_as_slowly = number(lam ** (1 / n), 4)
    return Question(
        text=f"A critic predicts nothing, λ = {number(lam)}, and a response has {tokens} tokens. "
        "Which share of the score arrives at the first token under PPO, and which with macro "
        f"actions of {n} tokens? With which λ do single tokens fade as slowly? "
        "Name one other thing that macro actions change.",
        answer=f"PPO: {number(lam)}^{tokens - 1} = {by_token}. "
        f"Macro actions: {actions_after_first} steps, {number(lam)}^{actions_after_first} = "
        f"{by_action}. Single tokens: "
        f"{number(lam)}^(1/{n}) = {lam_that_fades_as_slowly}. "
        "With macro actions several tokens also share one value and one advantage. "
        "*Points:* 1, 2, 1, 1.",
        points=5,
    )


def ask_clip(draw: random.Random) -> Question:
    """Ask for PPO's clipped term for one ratio, with an advantage of each sign."""
    ratio = draw.choice([0.6, 0.7, 1.3, 1.4])
    size = draw.choice([1.0, 2.0])
    lines = []
    for advantage in (size, -size):
        # The old log-probability is 0, so the new one is the logarithm of the ratio.
        now = torch.tensor([[ratio]]).log().requires_grad_()
        one_token = FixedNGram(1)(response_of(1))
        loss, _ = policy_loss(
            now, torch.zeros(1, 1), torch.tensor([[advantage]]), one_token, clip=0.2
        )
        loss.backward()
        has_gradient = now.grad.abs().item() > 0
        words = "a gradient" if has_gradient else "no gradient"
        # The term in the objective, which is maximised, is minus the loss.
        lines.append(f"for {number(advantage)} it is {number(-loss.item())}, with {words}")
    return Question(
        text=f"ε = 0.2, and the ratio of a token is {number(ratio)}. "
        f"What is its term in PPO's objective for an advantage of {number(size)}, and what for "
        f"{number(-size)}? In which case is the gradient 0?",
        answer="The term is the smaller of ratio · Â and clip(ratio) · Â: "
        f"{'; '.join(lines)}. *Points:* 2 for each term, 1 for the case.",
        points=5,
    )


def ask_kl_of_a_macro_action(draw: random.Random) -> Question:
    """Ask for the KL reward of a macro action, summed and averaged."""
    log_ratios = torch.tensor([[draw.choice([-2, -1, 1, 2, 3]) / 10 for _ in range(4)]])
    beta = draw.choice([0.02, 0.05, 0.1])
    one_action = FixedNGram(4)(response_of(4))
    penalties = kl_rewards(log_ratios, torch.zeros(1, 4), response_of(4), beta)
    no_score = torch.zeros(1)
    total = macro_rewards(penalties, no_score, one_action, pooling="sum").item()
    mean = macro_rewards(penalties, no_score, one_action, pooling="mean").item()
    return Question(
        text=f"The four tokens of a macro action have the log-ratios {numbers(log_ratios)} to the "
        f"reference; β = {number(beta)}. "
        "What is its KL reward if you sum the log-ratios, and if you average them? "
        "With which β does the sum penalise as much as the mean?",
        answer=f"The sum is {number(total, 5)}, the mean {number(mean, 5)}. "
        f"A sum with a quarter of β, {number(beta / 4, 5)}, penalises as much as the mean: "
        "averaging makes the penalty about n times smaller. "
        "*Points:* 2, 2, 1.",
        points=5,
    )


def ask_value_loss(draw: random.Random) -> Question:
    """Ask for the clipped value loss of one token."""
    old = draw.choice([0.3, 0.4, 0.5])
    now = old + draw.choice([0.3, 0.4])  # more than 0.2 above: the clipped value is old + 0.2
    target = draw.choice([1.0, 1.2])
    value = torch.tensor([[now]], requires_grad=True)
    one_token = FixedNGram(1)(response_of(1))
    loss, _ = value_loss(
        value, torch.tensor([[old]]), torch.tensor([[target]]), one_token, clip=0.2
    )
    loss.backward()
    words = "a gradient" if value.grad.abs().item() > 0 else "no gradient"
    return Question(
        text=f"A value was {number(old)} when the response was written and is {number(now)} now; its "
        f"return is {number(target)}. "
        "Values are clipped at 0.2. "
        "What is the token's value loss, and does it have a gradient?",
        answer=f"Kept within 0.2 of its old value, the value is {number(old + 0.2)}. The loss is half of the larger "
        f"of the two squared errors, {number(loss.item(), 4)}, with {words}. "
        "*Points:* 3 for the loss, 2 for the gradient.",
        points=5,
    )


def ask_kappa(draw: random.Random) -> Question:
    """Ask for Cohen's κ of a person and a judge."""
    person, judge = draw.choice([(60, 70), (55, 65), (40, 60), (50, 70)])
    agree = draw.choice([66, 70, 74])
    # The share of pairs in which both prefer the first, or both the second, if they chose independently.
    by_chance = (person * judge + (100 - person) * (100 - judge)) / 10_000
    kappa = (agree / 100 - by_chance) / (1 - by_chance)
    return Question(
        text=f"A person prefers the first of two answers in {person} of 100 pairs, a judge in {judge}, "
        f"and they agree on {agree} pairs. "
        "There are no ties. On which share of the pairs would they agree by chance? "
        "What is Cohen's κ?",
        answer=f"By chance they would agree on {number(by_chance)} of the pairs, so κ = ({agree / 100} − "
        f"{number(by_chance)}) / (1 − {number(by_chance)}) = {number(kappa, 2)}. "
        "*Points:* 2 for the share, 3 for κ.",
        points=5,
    )


def ask_what_an_interval_says(draw: random.Random) -> Question:
    """Ask what a confidence interval that includes 0 shows, and what two studies show together."""
    mean = draw.choice([-2, -3])
    half_width = draw.choice([4, 5])  # larger than the mean, so that the interval includes 0
    low = number(mean - half_width)
    high = number(mean + half_width)
    return Question(
        text=f"Five seeds give MA-PPO − PPO = {number(mean)} updates with the 95 % interval [{low}, "
        f"{high}]. May you say that both are equally fast? "
        "Another study, on another task, gives −4 [−7, −1]. "
        "May you say that macro actions help on the second task and not on the first?",
        answer=f"No: the interval includes a difference of {number(abs(mean - half_width))} updates, and "
        '"equally fast" needs a margin chosen beforehand. '
        "And no: that one study shows no difference does not show that the two studies differ. "
        "Compute the difference between them, with its own interval. "
        "*Points:* 2, 3.",
        points=5,
    )


QUESTIONS: tuple[Callable[[random.Random], Question], ...] = (
    ask_gradient_of_logits,
    ask_what_a_baseline_does,
    ask_advantages_of_tokens,
    ask_advantages_of_macro_actions,
    ask_share_that_arrives,
    ask_clip,
    ask_kl_of_a_macro_action,
    ask_value_loss,
    ask_kappa,
    ask_what_an_interval_says,
)


def draw_questions(seed: int) -> list[Question]:
    """Return the ten questions with the numbers of this seed."""
    draw = random.Random(seed)
    return [ask(draw) for ask in QUESTIONS]


def exam_page(seed: int, questions: list[Question]) -> str:
    """Return the page for students."""
    points = sum(question.points for question in questions)
    lines = [
        f"# Exam {seed}: PPO and macro actions",
        "",
        f"{MINUTES} minutes, {points} points. "
        "Paper and a calculator are allowed. "
        "γ = 1 everywhere.",
        "",
    ]
    for place, question in enumerate(questions, start=1):
        lines += [f"{place}. {question.text} ({question.points} points)", ""]
    return "\n".join(lines)


def answers_page(seed: int, questions: list[Question]) -> str:
    """Return the page for the teacher."""
    lines = [f"# Answers to exam {seed}", ""]
    for place, question in enumerate(questions, start=1):
        lines += [f"{place}. {question.answer}", ""]
    return "\n".join(lines)


def main() -> None:
    """Write both pages, and print where they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seed", type=int, default=1, help="the exam's number: the same seed draws the same exam"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("build/exam"), help="folder of both pages"
    )
    args = parser.parse_args()
    questions = draw_questions(args.seed)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    pages = {
        f"exam_{args.seed}.md": exam_page(args.seed, questions),
        f"answers_{args.seed}.md": answers_page(args.seed, questions),
    }
    for name, text in pages.items():
        path = args.output_dir / name
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
