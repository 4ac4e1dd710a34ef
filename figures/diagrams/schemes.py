"""Diagrams that show how parts stand to each other: loop, models, clip, rooms, estimators, sandbox."""

from __future__ import annotations

from canvas import (
    ALL,
    CALIBRATED,
    CRITIC,
    FAINT,
    FIRST,
    GREY,
    INK,
    LONGER,
    MACRO,
    PPO,
    REFERENCE,
    REWARD,
    SAE,
    Canvas,
    alternate,
    diagram,
    tint,
)


@diagram(height=500)
def rlhf_loop(c: Canvas) -> None:
    """The RLHF loop, and where macro actions enter

    The policy answers a prompt. Reference model, critic and reward model read the response. A termination rule
    cuts the response into macro actions; rewards, values and advantages are those of macro actions. The optimiser
    then makes a step for the policy and one for the critic, and the loop begins again.
    """
    c.box(28, 68, 110, 62, "prompt")
    c.box(184, 68, 140, 62, "policy\nwrites a response", PPO, size=13)
    c.arrow((138, 99), (180, 99))
    c.arrow((324, 99), (366, 99))
    words = "Ben lost his keys and called Mia .".split()
    c.text(570, 68, "response: T tokens")
    c.cells(370, 84, [50] * 8, words, alternate([5, 3]), h=30, size=12.5)
    c.line([(570, 114), (570, 142)])
    c.line([(315, 142), (685, 142)])
    c.box(
        230,
        168,
        170,
        68,
        "reference model\nlog-probability\nof each token",
        REFERENCE,
        dashed=True,
        size=13,
    )
    c.box(415, 168, 170, 68, "critic\nvalue of each token", CRITIC, size=13)
    c.box(600, 168, 170, 68, "reward model\none score at the end", REWARD, dashed=True, size=13)
    for x, word in ((315, "KL penalty"), (500, "values V"), (685, "score")):
        c.arrow((x, 142), (x, 165))
        c.arrow((x, 236), (x, 282))
        c.text(x + 12, 258, word, anchor="start")
    c.box(
        230,
        286,
        540,
        62,
        "A termination rule cuts the response into macro actions.\n"
        "n enters here: n = 5 tokens each; n = 1 is token-level PPO",
        MACRO,
        bold=True,
    )
    c.arrow((665, 348), (665, 390))
    c.box(560, 394, 210, 64, "one reward R and one value V\nfor each macro action", MACRO, size=13)
    c.box(312, 394, 206, 64, "GAE: one advantage Â\nfor each macro action", MACRO, size=13)
    c.box(64, 394, 206, 64, "each token takes the Â of its\nmacro action; losses", PPO, size=13)
    c.arrow((560, 426), (522, 426))
    c.arrow((312, 426), (274, 426))
    c.arrow((206, 394), (206, 134))
    c.arrow((218, 394), (218, 149), (440, 149), (440, 165), colour=CRITIC)
    c.text(194, 264, "optimiser steps\nfor policy\nand critic", anchor="end")
    c.note(480, "Dashed frames: models that stay as they are while PPO trains.")


@diagram(height=424)
def four_models(c: Canvas) -> None:
    """Four models over one frozen base

    Policy, reference, reward model and critic are four LoRA adapters over the same frozen base weights. Policy and
    critic are trained by PPO, the other two stay as they are.
    """
    roles = (
        ("policy", "log-probability\nof each token", "LoRA adapter\ntrained, starts from SFT", PPO),
        ("reference", "log-probability\nof each token", "LoRA adapter\nfixed, from SFT", REFERENCE),
        ("reward model", "one score for\neach response", "LoRA adapter, score head\nfixed", REWARD),
        (
            "critic",
            "value V before\neach token",
            "LoRA adapter, value head\ntrained, starts\nfrom the reward model",
            CRITIC,
        ),
    )
    for i, (name, output, adapter, colour) in enumerate(roles):
        x, fixed = 28 + 188 * i, "fixed" in adapter  # a fixed adapter has a dashed frame
        c.text(x + 90, 72, name, size=15, bold=True)
        c.cells(x + 15, 90, [150], [""], h=48)
        c.text(x + 90, 114, output)
        c.arrow((x + 90, 186), (x + 90, 142), colour=colour)
        c.box(x, 188, 180, 72, adapter, colour, dashed=fixed, size=13)
        c.arrow((x + 90, 306), (x + 90, 264), colour=FAINT)
    c.box(
        28,
        308,
        744,
        56,
        "base weights: loaded once, frozen, shared by all four",
        INK,
        size=15,
        bold=True,
    )
    c.note(
        386,
        "Adapters with a solid frame are trained by PPO, those with a dashed one stay fixed. Each role has its own, "
        "so a gradient of the policy never reaches the critic or the reference.",
    )


@diagram(height=464)
def clip_cases(c: Canvas) -> None:
    """The six cases of PPO's clip

    For a positive advantage the gradient is zero only where the ratio is above 1 + ε; for a negative one only
    where it is below 1 − ε. In the other four cases the policy learns.
    """
    left, w = 140, 210  # of the table's first column, and the width of each of its three
    heads = ("ratio below 1 − ε", "ratio from 1 − ε to 1 + ε", "ratio above 1 + ε")
    c.cells(left, 62, [w] * 3, heads, [GREY] * 3, h=34, bold=True)
    # A name, what happens in each column, and the corners of the thick line: in columns from the left edge, and in
    # pixels from the top of the row.
    rows = (
        (
            "Â > 0\nbetter than\nexpected",
            ("gradient: yes\nraise the probability",) * 2 + ("gradient: no\nit has risen enough",),
            [(0, 136), (2, 92), (3, 92)],
        ),
        (
            "Â < 0\nworse than\nexpected",
            ("gradient: no\nit has fallen enough",) + ("gradient: yes\nlower the probability",) * 2,
            [(0, 92), (1, 92), (3, 136)],
        ),
    )
    for i, (name, cases, curve) in enumerate(rows):
        y = 96 + 152 * i
        c.text(84, y + 74, name, bold=True)
        for j, words in enumerate(cases):
            learns = "yes" in words
            c.rect(left + w * j, y, w, 148, tint(PPO) if learns else GREY, "#8a857b", thick=1)
            c.text(left + w * (j + 0.5), y + 36, words, bold=not learns)
        c.line([(left + w * x, y + height) for x, height in curve], INK, thick=3)
    c.note(
        418,
        "Thick line: what is maximised, min(ratio · Â, clip(ratio) · Â). Where it is flat, there is no gradient. At "
        "the first optimiser step on new responses all ratios are 1, so only the middle column occurs.",
    )


@diagram(height=444)
def house(c: Canvas) -> None:
    """How data walks through the rooms of the library

    Text becomes tokens, a rollout, macro actions, rewards and values, advantages, losses, an update, records and
    figures. Below each step stands the folder that does it. A folder imports only from folders before it.
    """
    steps = (
        ("text", "tasks/"),
        ("tokens", "tasks/"),
        ("rollout", "training/, models/"),
        ("macro actions", "macro/, parsing/"),
        ("rewards, values", "training/, macro/"),
        ("advantages", "macro/"),
        ("losses", "macro/"),
        ("update", "training/"),
        ("records", "utils/, evaluation/"),
        ("figures", "plotting/"),
    )
    # Steps 0 to 4 go from left to right, and steps 5 to 9 below them from right to left.
    for i, (step, room) in enumerate(steps):
        column, second = (i, False) if i < 5 else (9 - i, True)
        x, y = 28 + 152 * column, 178 if second else 70
        c.box(x, y, 136, 44, step, MACRO if "macro/" in room else PPO, size=14, bold=True)
        c.text(x + 68, y + 60, room, size=13, colour=FAINT)
        if i in (0, 1, 2, 3):
            c.arrow((x + 136, y + 22), (x + 151, y + 22))
        elif i in (5, 6, 7, 8):
            c.arrow((x, y + 22), (x - 15, y + 22))
    c.arrow((704, 142), (704, 175))  # from step 4 down to step 5
    c.text(28, 282, "A room imports only from rooms before it:", bold=True, anchor="start")
    names = "utils config macro tasks parsing models training evaluation plotting extras experiments cli.py marlhf_lab"
    for i, name in enumerate(names.split()):
        x, y = 28 + 107.4 * (i % 7), 300 + 44 * (i // 7)
        c.box(x, y, 100, 34, name, MACRO if name == "macro" else FAINT)
    c.note(
        404,
        "Orange: macro/, the idea itself, pure tensor functions without a model. extras/ is loaded only when an "
        "option asks, experiments/ strings the steps together into runs. marlhf_lab/ is what lessons and studies need.",
    )


@diagram(height=552)
def ladder(c: Canvas) -> None:
    """Estimators of advantages: one change at a time

    A grid of estimators. Rows say how credit fades on its path back, columns say what is subtracted as a baseline.
    PPO is at the top, MA-PPO at the right; PPO-0.99, SAE and MA-PPO-start are the steps between them.
    """
    columns = (
        "each token's\nown value",
        "value at the macro\naction's first token",
        "mean value of\nthe macro action",
    )
    c.text(112, 84, "credit fades by", bold=True)
    c.text(490, 62, "baseline that is subtracted", bold=True)
    for j, words in enumerate(columns):
        c.text(298 + 190 * j, 96, words)
    # How credit fades, and the estimators in the columns from the left: words and colour.
    rows = (
        ("λ at every token", [("PPO\nλ = 0.95", PPO)]),
        ("λ^(1/n) at every token", [("PPO-0.99\n0.95^(1/5) = 0.990", LONGER)]),
        (
            "λ only at the ends\nof macro actions",
            [
                ("SAE\nλ = 1 inside", SAE),
                ("MA-PPO-start", FIRST),
                ("MA-PPO", MACRO),
            ],
        ),
        ("nothing: λ = 1", [("PPO, λ = 1\nreturn minus V", ALL)]),
        (
            "λ = 1 − 1/(α · length)\nat every token",
            [("VC-PPO: critic trained\nfirst, with λ = 1", CALIBRATED)],
        ),
    )
    for i, (name, cells) in enumerate(rows):
        y = 124 + 74 * i
        c.text(112, y + 30, name)
        c.line([(28, y - 7), (772, y - 7)], "#cfcabf", thick=1)
        for j, (words, colour) in enumerate(cells):
            c.box(216 + 190 * j, y + 3, 164, 54, words, colour)
    for x, y in ((298, 181), (298, 255)):
        c.arrow((x, y), (x, y + 19))
    for x in (380, 570):
        c.arrow((x, 302), (x + 25, 302))
    c.note(
        512,
        "Follow the arrows from PPO to MA-PPO: first the horizon becomes longer, then λ acts only at the ends of macro "
        "actions, then each macro action has one baseline, and at last this baseline is a mean of values.",
    )


@diagram(height=372)
def sandbox(c: Canvas) -> None:
    """A program as a response: how tests become a reward

    A generated program runs in a worker process with limits. Plain outputs come back, and the parent process,
    which never runs the program, compares them with the expected ones. The share of
    tests passed gives the reward.
    """
    c.box(28, 113, 130, 74, "generated\nprogram", PPO, bold=True)
    c.rect(200, 76, 262, 206, "#ffffff", INK, radius=10, thick=1.8, dashed=True)
    c.arrow((158, 150), (214, 150))
    c.text(331, 96, "sandbox: a worker process", bold=True)
    c.box(218, 116, 226, 68, "runs the program\non the input of each test", FAINT)
    c.box(218, 200, 226, 66, "limits: time and memory;\nno network", FAINT, size=13)
    c.arrow((444, 150), (534, 150))
    c.text(497, 118, "plain\noutputs", size=13)
    parent = "parent process compares\nthem with the expected outputs\nand never runs the program"
    c.box(538, 104, 234, 84, parent, FAINT, size=13)
    c.arrow((655, 188), (655, 232))
    c.box(538, 236, 234, 58, "reward: −0.3 + 1.3 ·\nshare of tests passed", REWARD, bold=True)
    c.note(
        326,
        "What comes back is data: text and numbers. The expected outputs stay outside the sandbox. A program that "
        "fails while it runs, or runs too long, gets −0.6, one that does not compile −1.",
    )
