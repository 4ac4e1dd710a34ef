"""Options of evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from marlhf_lite.config.option import option


@dataclass
class EvaluationConfig:
    """Evaluation on held-out prompts."""

    eval_prompts: int = option(256, "Held-out prompts to answer.", least=1)
    eval_batch_size: int = option(128, "Responses per generation batch.", least=1)


@dataclass
class SweepConfig:
    """Several temperatures and samples, stored and used again."""

    eval_temperatures: str = option(
        "", "Sampling temperatures, comma-separated, such as 0,0.4,0.8; 0 is greedy. Default: --temperature alone."
    )
    eval_samples: int = option(1, "Responses to each prompt at each temperature.", least=1)
    best_of: str = option(
        "", "Best-of-N: each N, comma-separated, such as 1,4,8. Needs as many --eval_samples. Default: none."
    )
    thresholds: str = option(
        "",
        "Count responses below these RM scores, as in --thresholds=-1,0. Default: the 5th and 25th percentile of SFT.",
    )
    responses: str = option(
        "",
        "Folder of stored responses: those there are used again, others are added. Default: responses/ inside the run.",
    )


@dataclass
class CompareConfig:
    """Stored answers side by side, paired by prompt."""

    answers: str = option("", "Runs of evaluate, folders of responses, or samples.jsonl files, comma-separated.")
    baseline: str = option("", "Whom the others are compared with. Default: SFT where it is there, else the first.")
