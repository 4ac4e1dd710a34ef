"""Options of pairwise judging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marlhf_lite.config.option import option


@dataclass
class JudgeConfig:
    """Which judge compares which answers, and its limits."""

    judge: Literal["gold", "rm", "endpoint", "local", "human"] = option(
        "gold",
        "gold (embedded task), rm (--rm), endpoint (OpenAI-compatible), local (--model reads A against B), human.",
    )
    human: bool = option(False, "The same as --judge human: you compare, side by side and blind.")
    judge_answers: str = option("", "Folders that `marlhf evaluate` wrote, or files of answers, comma-separated.")
    judge_methods: str = option("", "The two methods to compare, comma-separated, as the answers name them.")
    judge_criteria: Literal["tldr", "hh", "webgpt"] = option("tldr", "What is judged by (section 4.1, Appendix F).")
    judge_order: Literal["random", "both"] = option(
        "random", "Which response is shown first: random, by --seed; or both orders, two verdicts a pair."
    )
    judge_size: int | None = option(None, "Compare this many pairs, drawn by --seed. Default: all. Paper: 50.", least=1)
    judge_folder: str = option("runs/judging", "Where verdicts are kept; what is there is never asked again.")
    judge_batch_size: int = option(16, "Pairs per forward pass, for rm and local.", least=1)
    judge_tie_margin: float = option(0.0, "Scores no further apart than this are a tie, for gold and rm.", least=0)
    annotator: str = option("annotator-1", "Who compares, for human; each name has verdicts of its own.")


@dataclass
class EndpointConfig:
    """An OpenAI-compatible endpoint as judge: where it is, how it is asked, what it may cost."""

    judge_url: str = option("https://api.openai.com/v1", "Base URL of the endpoint, without /chat/completions.")
    judge_model: str = option("", "The model's name at the endpoint.")
    judge_key_env: str = option(
        "OPENAI_API_KEY", "Environment variable that holds the key; an empty name for an endpoint without keys."
    )
    judge_temperature: float = option(0.0, "Of the judge's sampling.", least=0)
    judge_max_tokens: int = option(400, "A verdict is cut here, and is then malformed.", least=1)
    judge_request: str = option(
        "", "More fields of the request, as a JSON object; null leaves a field out, such as temperature or max_tokens."
    )
    judge_instructions: Literal["system", "user"] = option(
        "system", "Which message holds the instructions: user for models without a system message."
    )
    judge_workers: int = option(4, "Requests at the same time.", least=1, most=256)
    judge_rpm: float = option(0.0, "Requests a minute at most; 0 is no limit.", least=0)
    judge_timeout: float = option(60.0, "Seconds to wait for a verdict.", above=0)
    judge_retries: int = option(5, "Tries after the first, on 429, 5xx, time-outs and cut answers.", least=0)
    judge_backoff: float = option(1.0, "Seconds before the second try; doubles with each, with jitter.", least=0)
    judge_patience: float = option(
        120.0, "Longest wait between tries, in seconds; an endpoint that asks for more ends the run.", least=0
    )
    judge_token_limit: int = option(0, "Tokens this run may use, prompts and verdicts; 0 is no limit.", least=0)
    judge_cost_limit: float = option(0.0, "What this run may cost, in the prices' currency; 0 is no limit.", least=0)
    judge_price_in: float = option(0.0, "Price of a million prompt tokens.", least=0)
    judge_price_out: float = option(0.0, "Price of a million tokens of verdicts.", least=0)
