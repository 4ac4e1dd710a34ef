"""One right and three wrong answers to each exercise, and a function that tries a lesson's check with them.

An answer is code that is run among the names of its lesson, where the check stands. Where the right answer takes
long training, it is made up: the check looks at nothing but the numbers.
"""

import re

ANSWERS = {
    "00": {
        "bandit": (
            "import math; bandit = train('n = inf', math.inf)[1]",
            "bandit = []",
            "bandit = histories['PPO']",
            "bandit = histories['MA-PPO']",
        ),
        "perfect": (
            "perfect = train('gold', 1, lambda some: torch.tensor(task.gold(some.prompts, some.responses)))[1]",
            "perfect = []",
            "perfect = histories['PPO']",
            "perfect = [row | {'rm_score_mean': row['gold_mean']} for row in histories['MA-PPO']]",
        ),
        "second": (
            "second = train('PPO, seed 1', 1, seed=1)[1]",
            "second = []",
            "second = histories['PPO']",
            "second = histories['MA-PPO']",
        ),
    },
    "01": {
        "best_baseline": (
            """
low, high = 0.0, 1.5
for _ in range(14):
    third = (high - low) / 3
    noises = [bias_and_noise(all_scores - x)[1] for x in (low + third, high - third)]
    low, high = (low, high - third) if noises[0] < noises[1] else (low + third, high)
best_baseline = (low + high) / 2
""",
            "best_baseline = 0.0",
            "best_baseline = expected",
            "best_baseline = 1.2",
        ),
        "k_step": (
            """
def k_step(rewards, values, k):
    values = torch.cat([values, torch.zeros(1)])
    return torch.stack([rewards[t : t + k].sum() + values[min(t + k, 6)] - values[t] for t in range(6)])
""",
            "k_step = lambda rewards, values, k: rewards",
            "k_step = lambda rewards, values, k: deltas[0]",
            "k_step = lambda rewards, values, k: torch.stack([rewards[t : t + k].sum() - values[t] for t in range(6)])",
        ),
        "two_by_two": (
            """
rows, ahead, after = [], 0.0, 0.0
for reward, value in zip(rewards.reshape(3, 2).sum(1).flip(0), values.reshape(3, 2).mean(1).flip(0)):
    ahead, after = reward + after - value + 0.95 * ahead, value
    rows.insert(0, ahead)
two_by_two = torch.stack(rows).repeat_interleave(2)
""",
            "two_by_two = ppo_advantages[0]",
            "two_by_two = torch.zeros(6)",
            "two_by_two = ppo_advantages[0].reshape(3, 2).mean(1).repeat_interleave(2)",
        ),
    },
    "02": {
        "lam_tokens": (
            "lam_tokens, lam_five = 0.5 ** (1 / 200), 0.5 ** (1 / 40)",
            "lam_tokens, lam_five = 0.5 ** (1 / 200), 0.5 ** (1 / 200)",
            "lam_tokens, lam_five = 0.95, 0.95",
            "lam_tokens, lam_five = 0.5 ** (1 / 100), 0.5 ** (1 / 20)",
        ),
        "break_even_noise": (
            "break_even_noise = 0.8",
            "break_even_noise = 0.0",
            "break_even_noise = 0.2",
            "break_even_noise = 5.0",
        ),
        "phrase_advantages": (
            """
def phrase_advantages(actions, c, p):
    first, second = actions[:, 0::2], actions[:, 1::2]
    return torch.stack([c * p * (first - p), c * first * (second - p)], 2).reshape(actions.shape)
""",
            "phrase_advantages = lambda actions, c, p: torch.zeros_like(actions)",
            "phrase_advantages = lambda actions, c, p: c * (actions - p)",
            """
def phrase_advantages(actions, c, p):
    pairs = c * (actions[:, 0::2] * actions[:, 1::2] - p**2)
    return torch.stack([0 * pairs, pairs], 2).reshape(actions.shape)
""",
        ),
    },
    "03": {
        "mean_length": (
            """
def mean(C, inclusive):
    return macro.describe(Parsing(GrammarParser(), C, inclusive)(mask, **context))["mean_length"]
mean_length = {False: {C: mean(C, False) for C in range(2, 31)}, True: {C: mean(C, True) for C in range(2, 31)}}
""",
            "mean_length = {inclusive: dict.fromkeys(range(2, 31), 5.0) for inclusive in (False, True)}",
            "mean_length = {False: {C: 40.0 - C for C in range(2, 31)}, True: {C: 40.0 - C for C in range(2, 31)}}",
            "mean_length = {False: {C: 40.0 - C for C in range(2, 31)}, True: {C: 39.0 - C for C in range(2, 31)}}",
        ),
        "clauses": tuple(
            f"""
def clauses(mask, *, token_ids, tokenizer, **context):
    word, stop = tokenizer.convert_tokens_to_ids(["▁and", "."])
    behind = torch.nn.functional.pad((token_ids == stop)[:, :-1], (1, 0))
    return MacroActions.from_starts({starts}, mask)
"""
            for starts in (
                "(token_ids == word) | behind & (token_ids != tokenizer.eos_token_id)",
                "token_ids == word",
                "(token_ids == word) | behind",
                "(token_ids == word) | (token_ids == stop)",
            )
        ),
        "early": (
            "early = Perplexity(early=True)(mask, **context)",
            "early = perplexity",
            "early = FixedNGram(3)(mask)",
            "early = FixedNGram(1)(mask)",
        ),
    },
    "04": {
        "geometric": (
            """
def geometric(macro, g):
    first = macro.lengths.cumsum(1) - macro.lengths
    i = (torch.arange(macro.ids.shape[1]) - macro.broadcast(first)) * macro.token_mask
    i = i - (macro.broadcast(macro.lengths) - 1) * (g > 1)
    raw = torch.as_tensor(g, dtype=torch.float32) ** i * macro.token_mask
    return raw / macro.broadcast(macro.sum(raw)).clamp(min=1e-30)
""",
            "geometric = lambda macro, g: macro.weights('equal')",
            "geometric = lambda macro, g: macro.weights('unit' if g > 1 else 'equal')",
            "geometric = lambda macro, g: macro.weights('equal') * g",
        ),
        "factor": (
            """
from marlhf_lite.macro import RandomizedNGram
cut = RandomizedNGram()(torch.ones(500, 66, dtype=torch.bool))
factor = float(cut.lengths.sum() / cut.mask.sum())
""",
            "factor = 1.0",
            "factor = 2.5",
            "factor = 10.0",
        ),
        "token_norm": (
            "token_norm = lambda macro, advantages: macro.broadcast(advantages).square().sum(1).sqrt()",
            "token_norm = lambda macro, advantages: torch.zeros(len(advantages))",
            "token_norm = lambda macro, advantages: (advantages * macro.mask).square().sum(1).sqrt()",
            "token_norm = lambda macro, advantages: torch.full((len(advantages),), 0.3)",
        ),
    },
    "05": {
        "rloo_advantages": (
            "rloo_advantages = (scores - (scores.sum() - scores) / 3)[:, None]",
            "rloo_advantages = (scores - scores.mean())[:, None]",
            "rloo_advantages = scores[:, None]",
            "rloo_advantages = ((scores.sum() - scores) / 3 - scores)[:, None]",
        ),
        "macro_epsilon": (
            """
often = ((moves[:, 0].exp() - 1).abs() > 0.1).float().mean()
macro_epsilon = (moves[:, :20].sum(1).exp() - 1).abs().quantile(1 - often)
""",
            "macro_epsilon = 0.1",
            "macro_epsilon = 0.3",
            "macro_epsilon = 2.0",
        ),
        "pulls": tuple(
            f"""
from marlhf_lite.macro import MacroActions
run = MacroActions.from_lengths([[4]])
pulls = {{sigma: -run.weights(sigma)[0] for sigma in ("equal", "unit", "position")}}
{change}
"""
            for change in (
                "",
                "pulls['equal'] = pulls['unit']",
                "pulls = {sigma: -pull for sigma, pull in pulls.items()}",
                "pulls['position'] = run.weights('position_reversed')[0] * -1",
            )
        ),
    },
    "06": {
        "stiennon": tuple(
            f"""
from dataclasses import replace
from marlhf_lite.tasks.paper_datasets import TLDR, tldr_row
def convert(row):
    info = row["info"]
    title = f"SUBREDDIT: r/{{info['subreddit']}}\\n\\n{title}"
    return tldr_row(row) | {{"prompt": f"{{title}}POST: {{info['post'].strip()}}\\n\\nTL;DR:{end}"}}
stiennon = replace(TLDR, convert=convert)
"""
            for title, end in (
                ("TITLE: {info['title']}\\n\\n", ""),
                ("TITLE: {info['title']}\\n\\n", " "),
                ("", ""),
                ("TITLE: {info['title']}\\n", ""),
            )
        ),
        "key": (
            "key = lambda prompt: prompt[:90]",
            "key = lambda prompt: prompt",
            "key = lambda prompt: ''",
            "key = lambda prompt: prompt[-40:]",
        ),
        "by_comparisons": (
            "by_comparisons = {0: 0.5, 1: 0.52, 2: 0.55, 4: 0.6, 8: 0.65, 16: 0.7}",
            "by_comparisons = {0: 0.6, 1: 0.61, 2: 0.62, 4: 0.63, 8: 0.64, 16: 0.7}",
            "by_comparisons = {0: 0.5, 1: 0.7, 2: 0.65, 4: 0.6, 8: 0.55, 16: 0.52}",
            "by_comparisons = {0: 0.5, 1: 0.6, 2: 0.7}",
        ),
    },
    "07": {
        "by_pairs": (
            "by_pairs = {len(splits['rm']) // part: p for part in (8, 4, 2, 1)}",
            "by_pairs = {len(splits['rm']) // part: 100 * p for part in (8, 4, 2, 1)}",
            "by_pairs = {len(splits['rm']) // part: 0.0 for part in (8, 4, 2, 1)}",
            "by_pairs = {1: 0.6, 2: 0.6, 3: 0.6, len(splits['rm']): p}",
        ),
        "fair": (
            "fair = plots.sigmoid(RATER_SHARPNESS * np.sign(margins) * gap).mean()",
            "fair = plots.sigmoid(-RATER_SHARPNESS * np.sign(margins) * gap).mean() - 0.01",
            "fair = plots.sigmoid(RATER_SHARPNESS * np.abs(gap)).mean() + 0.05",
            "fair = 1.0",
        ),
    },
    "08": {
        "clipped": (
            "clipped = [0, 0.1, 0.2, 0.3, 0.3]",
            "clipped = [0, 0, 0, 0, 0]",
            "clipped = [0.1, 0.1, 0.2, 0.3, 0.3]",
            "clipped = [0, 10, 20, 30, 30]",
        ),
        "brief": tuple(
            f"brief = [{{'rm_score_mean': {score}, 'response_length': {length}}} for k in range(8)]"
            for score, length in (("k / 10", "40 - k"), ("0.5", "40 - k"), ("k / 10", "30 + k"), ("-k / 10", "40 - k"))
        ),
        "starts": tuple(
            f"""
rows = [{{"rm_score_mean": 0.5, "kl_k1": 0.0, "score_explained_variance": 0.1}} for _ in range(6)]
starts = {starts}
"""
            for starts in (
                "{'rm': rows, 'sft': rows, 'warm-up': rows}",
                "{'rm': rows, 'sft': rows}",
                "{'rm': [rows[0] | {'rm_score_mean': 0.6}], 'sft': rows, 'warm-up': rows}",
                "{'rm': rows, 'sft': rows, 'warm-up': [row | {'kl_k1': 0.5} for row in rows]}",
            )
        ),
    },
    "09": {
        "errors": tuple(
            f"errors = {{'disjoint groups': {groups}, 'all subsets': 0.1}}" for groups in (0.12, 0.1, 0.08, 0.5)
        ),
        "leaning": tuple(
            f"""
class Longer(judgments.Judge):
    name = "made up {gap}"
    def __call__(self, prompt, a, b):
        gap = {gap}
        return judgments.Judgment("tie" if gap == 0 else "A" if gap > 0 else "B")
leaning = Longer()
"""
            for gap in (
                "len(a.split()) + 5 - len(b.split())",
                "len(a.split()) - len(b.split())",
                "len(a.split()) - 5 - len(b.split())",
                "len(b.split()) + 5 - len(a.split())",
            )
        ),
        "covered": tuple(
            f"covered = dict(zip((3, 5, 10, 20, 40), {shares}))"
            for shares in (
                (0.6, 0.7, 0.85, 0.9, 0.93),
                (1.0, 1.0, 1.0, 1.0, 1.0),
                (0.93, 0.9, 0.85, 0.7, 0.6),
                (0.6, 0.7),
            )
        ),
    },
    "10": {
        "correlation": tuple(
            f"""
names = [name for name in runs if name != "SFT"]
r = np.corrcoef(*([gaps(name, "SFT", score).mean() for name in names] for score in ("rm_score", "gold")))[0, 1]
correlation = {answer}
"""
            for answer in ("r", "-r", "r**2", "r + 0.1")
        ),
        "clipped": tuple(
            f"""
clipped = {{}}
for level, rate in (("token", 20.0), ("macro", {rate})):
    now, clipped[level] = old.clone(), []
    for _ in range({steps}):
        now = now.detach().requires_grad_()
        loss, found = policy_loss(now, old, A, macro, ratio=level)
        clipped[level].append(found["clip_fraction"].item())
        now = now - rate * torch.autograd.grad(loss, now)[0]
{change}
"""
            for rate, steps, change in (
                (4.0, 4, ""),
                (20.0, 4, ""),
                (4.0, 3, ""),
                (4.0, 4, "clipped['token'] = clipped['macro']"),
            )
        ),
        "without": (
            """
without = {}
for _, one, other in claims:
    left = [np.delete(gaps(one, other), s, axis=0) for s in range(len(study.seeds))]
    without[one, other] = [crossed_interval(some) for some in left]
""",
            "without = {(one, other): [crossed_interval(gaps(one, other))] * 3 for _, one, other in claims}",
            "without = {(one, other): [crossed_interval(gaps(one, other)[:2])] * 3 for _, one, other in claims}",
            "without = {(one, other): [crossed_interval(-gaps(one, other))] * 3 for _, one, other in claims}",
        ),
    },
    "11": {
        "left": tuple(
            f"left = {{K: {value} for K in (2, 4, 8, 32)}}" for value in ("K / (K - 1)", 1, "(K - 1) / K", 2)
        ),
        "went": tuple(
            f"went = {{0.1: 1.0, 0.5: {times} * kl(optimum(0.5)), 2.0: {times} * kl(optimum(2.0))}}"
            for times in (2.5, 1, 0, 1e6)
        ),
        "control": tuple(
            f"control = {{n: {lam} for n in (3, 10)}}" for lam in ("0.95 ** (1 / n)", 0.95, "0.95**n", 1.0)
        ),
    },
    "12": {
        "spread": tuple(
            f"""
spread = {{}}
for name, strict in (("B.5", False), ("all_tests", True)):
    paid = np.array([program_reward(outcome, strict) for outcome in outcomes]).reshape(-1, samples)
    spread[name] = paid.std(1).mean() {change}
"""
            for change in ("", "+ 0.1", "- 1", "+ 2 * (name == 'B.5')")
        ),
        "one_test": tuple(
            f"one_test = lambda outcome: float({pays})"
            for pays in (
                "outcome.status == 'ran' and any(outcome.passed)",
                "outcome.status == 'ran' and all(outcome.passed)",
                "outcome.status == 'ran'",
                "any(outcome.passed)",
            )
        ),
        "bias": tuple(
            f"""
import math
chance = [math.comb(10, c) * 0.2**c * 0.8 ** (10 - c) for c in range(11)]
exact = sum(x * (1 - (1 - c / 10) ** 5) for c, x in enumerate(chance)) - (1 - 0.8**5)
bias = {{"formula": {formula}, "estimator": {estimator}}}
"""
            for formula, estimator in (("exact", 0.0), (0.0, "exact"), ("-exact", 0.0), ("exact", "exact"))
        ),
        "mean_length": tuple(
            f"""
mean_length = {{}}
for C in (3, 5, 10, 20):
    spans = Parsing(PythonParser(), cutoff=C)(few.mask, token_ids=few.response_ids, tokenizer=tokenizer).spans()
    lengths = [end - start for row in spans for start, end in row]
    mean_length[C] = {mean}
"""
            for mean in ("sum(lengths) / len(lengths)", "C", "len(lengths) / len(few)", "max(lengths) + 1")
        ),
    },
    "13": {
        "plain_share": tuple(
            f"""
seen, truth = ((x[:, 1:] - x[:, :1]).double().numpy() for x in (values_at_cuts()[0], futures[..., :4].mean(-1)))
plain = np.cov(seen.ravel(), truth.ravel())[0, 1] / truth.var(ddof=1)
plain_share = {answer}
"""
            for answer in (
                "plain",
                "credit.credit_seen(values_at_cuts()[0], futures[..., :4]).mean",
                "-plain",
                "plain / 2",
            )
        ),
        "spread": tuple(
            f"spread = dict(zip(('E0', 'E1', 'E4'), {values}))"
            for values in ((0.506, 0.501, 0.226), (0.506, 0.501, 0.506), (1.01, 1.0, 0.45), (0.226, 0.224, 0.1))
        ),
        "at_end": tuple(
            f"""
found = {{name: cosine(*decisive_token("{part}"), n, 0.95, 0.0) for name, n in (("E0", 1), ("E4", 5))}}
at_end = {answer}
"""
            for part, answer in (
                ("L32-last", "found"),
                ("L32-first", "found"),
                ("L32-last", "{'E0': found['E4'], 'E4': found['E0']}"),
                ("L32-last", "{'E0': 1.0, 'E4': 0.9}"),
            )
        ),
    },
    "14": {
        "on_a_card": tuple(
            f"on_a_card = lambda weights, cards: {size} + 0.6 * GIB"
            for size in (
                "1.05 * (4 * weights + 20 * weights / cards)",
                "1.05 * 24 * weights / cards",
                "(4 * weights + 20 * weights / cards)",
                "1.05 * (8 * weights + 16 * weights / cards)",
            )
        ),
        "most": (
            """
def peak(rows):
    return estimate_memory(options_of("lora-t4-16gb", "--generation_batch_size", str(rows))).peak
most = max(rows for rows in range(1, 200) if peak(rows) <= 16e9)
""",
            "most = 1",
            "most = 150",
            "most = 1000",
        ),
        "chunked_entropy": (
            """
def chunked_entropy(hidden, weight, tile=1000):
    top = torch.full((len(hidden),), -torch.inf)
    total, weighted = torch.zeros(len(hidden)), torch.zeros(len(hidden))
    for start in range(0, len(weight), tile):
        z = hidden @ weight[start : start + tile].T
        new = torch.maximum(top, z.amax(-1))
        shrink, e = (top - new).exp(), (z - new[:, None]).exp()
        total, weighted, top = total * shrink + e.sum(-1), weighted * shrink + (z * e).sum(-1), new
    return top + total.log() - weighted / total
""",
            "chunked_entropy = lambda hidden, weight, tile=1000: torch.zeros(len(hidden))",
            "chunked_entropy = lambda hidden, weight, tile=1000: torch.full((len(hidden),), math.log(len(weight)))",
            "chunked_entropy = lambda hidden, weight, tile=1000: (hidden @ weight.T).logsumexp(-1)",
        ),
    },
    "15": {
        "needed": tuple(
            f"""
from marlhf_lite.lab.figures.agreement import pairs_for_win_rate
needed = {{rate: {pairs} for rate in (0.52, 0.56)}}
"""
            for pairs in (
                "pairs_for_win_rate(rate)",
                "50",
                "2 * pairs_for_win_rate(rate)",
                "pairs_for_win_rate(0.56) // 2",
            )
        ),
        "constant": tuple(f"constant = {value}" for value in (0.6, 0.0, 5.0, -10.0)),
        "area": tuple(
            f"""
mean = [[np.mean([row["rm_score_mean"] for row in runs[x][s]["curve"]]) for s in SEEDS] for x in ("PPO", "MA-PPO")]
area = {area}
"""
            for area in (
                "t_interval(np.subtract(mean[1], mean[0]).tolist())",
                "t_interval(np.subtract(mean[0], mean[1]).tolist())",
                "t_interval(np.subtract(mean[1], mean[0]).tolist()) | {'low': 0.0}",
                "t_interval(mean[1])",
            )
        ),
    },
}


def name_of(cell: str) -> str | None:
    """The name that an exercise's check in this cell looks at, or None."""
    found = re.search(r"^if (\w+) is \.\.\.|^(\w+) = \.\.\.  #", cell, re.M)
    return (found[1] or found[2]) if found and "assert" in cell else None


def faults(lesson: str, cell: str, names: dict) -> list[str]:
    """A line for each answer that the check in this cell judges wrongly; `names` are those of the lesson so far."""
    name, found = name_of(cell), []
    check = re.sub(r"^\w+ = \.\.\..*", "", cell, flags=re.M)
    for place, answer in enumerate(ANSWERS[lesson][name]):
        scope = dict(names)
        exec(answer, scope)
        try:
            exec(check, scope)
            refused = False
        except AssertionError:
            refused = True
        if refused != (place > 0):
            found.append(f"{lesson} {name}: {'refused' if refused else 'accepted'}: {answer.strip()}")
    return found
