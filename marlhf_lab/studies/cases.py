"""When macro actions help, when they harm, and when we found no difference: fourteen cases of the stored studies."""

from collections.abc import Mapping

from marlhf_lab.studies.contrasts import ratio_of_updates
from marlhf_lab.studies.learning import learning_table
from marlhf_lab.studies.mean_reward import difference_of_means
from marlhf_lab.studies.paper import say, table
from marlhf_lab.studies.results import stored_results, study_table
from marlhf_lab.studies.study import load_study

NO, YES = "uninformed", "informed"  # what a critic knows about the score
ONE_WORD = (  # tokens between the word and the score, critic, study, PPO, MA-PPO
    ("8 tokens before the score", NO, "umbrella", "L8 first E0", "L8 first E4"),
    ("32 tokens", NO, "umbrella", "L32 first E0", "L32 first E4"),
    ("64 tokens", NO, "n_sweep", "n=1", "n=5"),
    ("64 tokens, noise", NO, "critic_confirm", "blind PPO", "blind MA-PPO"),
    ("128 tokens", NO, "umbrella", "L128 first E0", "L128 first E4"),
    ("at the end", NO, "umbrella", "L32 last E0", "L32 last E4"),
    ("32 tokens", YES, "umbrella_seeing", "L32 first E0", "L32 first E4"),
    ("32 tokens, noise", YES, "noise_confirm", "E0", "E4"),
    ("64 tokens, noise", YES, "critic_confirm", "seeing PPO", "seeing MA-PPO"),
)
SCORES = (  # task, critic, study, number, its name
    ("programs", "hardly predicts", "programs", "pass@1", "share of right programs"),
    ("summaries", "noisy", "main", "rm_score", "score of the reward model"),
)
LANGUAGE_MODEL = (  # the rewarded words, study
    ("SmolLM2, first words", "sentiment_settle"),
    ("SmolLM2, last words", "sentiment_near"),
)


def cases_table() -> str:
    """The cases as a Markdown table: MA-PPO with n = 5 against PPO with λ = 0.95, with 95 % intervals over seeds."""
    lines = []
    for text, critic, study, ppo, ours in ONE_WORD:
        rows = learning_table({"": [ppo, ours]}, stored_results(study), 0.8)
        gap = rows[1]["updates_difference"]
        lines.append(_line(f"one word, {text}", critic, "updates, MA-PPO − PPO", gap, "+.1f", -1))
    ratio = ratio_of_updates(stored_results("steps_confirm"), ["MA-PPO", "PPO"], 0.6, 5)
    lines.append(
        _line("arithmetic", NO, "updates to 60 % right, MA-PPO / PPO", ratio, ".2f", -1, 1)
    )
    for text, critic, study, key, measure in SCORES:
        rows = {row["method"]: row for row in study_table(stored_results(study))}
        lines.append(
            _line(
                text,
                critic,
                f"{measure}, MA-PPO − PPO",
                rows["MA-PPO"][f"{key}_difference"],
                "+.3f",
                1,
            )
        )
    for text, study in LANGUAGE_MODEL:
        gap = difference_of_means(
            stored_results(study), ["MA-PPO", "PPO"], load_study(study).mean_updates
        )
        measure = "mean reward, before the KL penalty, MA-PPO − PPO"
        lines.append(_line(text, "hardly predicts", measure, gap, "+.3f", 1))
    heads = {
        "case": "task",
        "critic": "critic",
        "measure": "measure",
        "gap": "MA-PPO, n = 5",
        "is": "macro actions",
    }
    return table(lines, heads)


def _line(
    case: str, critic: str, measure: str, gap: Mapping, form: str, good: int, beside: float = 0
) -> dict:
    """A row; `good` is +1 if a number above `beside` is an improvement, else −1."""
    low, high = sorted(good * (gap[end] - beside) for end in ("low", "high"))
    found = "help" if low > 0 else "harm" if high < 0 else "no difference found"
    return {
        "case": case,
        "critic": critic,
        "measure": measure,
        "gap": say(gap, form, beside),
        "is": found,
    }
