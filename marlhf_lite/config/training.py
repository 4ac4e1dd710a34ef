"""Options of the training stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marlhf_lite.config.option import option


@dataclass
class SFTStageConfig:
    """Supervised fine-tuning on prompt and chosen response, loss on the response alone."""

    sft_epochs: float = option(1.5, "Passes over the SFT part.", above=0)
    sft_batch_size: int = option(32, "Sequences per update.", least=1)
    sft_micro_batch_size: int = option(
        0, "Sequences per forward and backward pass, added up to a batch; 0: a process's whole share.", least=0
    )
    sft_learning_rate: float = option(2e-3, "Peak learning rate (cosine, for LoRA).", above=0)
    sft_warmup_ratio: float = option(0.1, "Share of updates that warm up.", least=0, below=1)
    sft_lr_scheduler: str = option("cosine", "Learning-rate schedule, by transformers' name for it.")


@dataclass
class RewardModelConfig:
    """Reward model: Bradley-Terry on preference pairs, from the SFT adapter."""

    rm_epochs: float = option(1.0, "Passes over the reward-model part.", above=0)
    rm_batch_size: int = option(32, "Pairs per update.", least=1)
    rm_micro_batch_size: int = option(
        0, "Pairs per forward and backward pass, added up to a batch; 0: a process's whole share.", least=0
    )
    rm_learning_rate: float = option(1.5e-3, "Peak learning rate (cosine, for LoRA).", above=0)
    rm_warmup_ratio: float = option(0.1, "Share of updates that warm up.", least=0, below=1)
    rm_lr_scheduler: str = option("cosine", "Learning-rate schedule, by transformers' name for it.")
    rm_loss: Literal["last", "all"] = option(
        "last",
        "last: compare scores at the last token. all: as the released code, the mean over all tokens from where the "
        "pair diverges.",
    )


@dataclass
class MacroConfig:
    """What a macro action is, what it is worth and how it enters the losses."""

    termination: Literal["fixed", "randomized", "whole", "perplexity", "sentence", "parsing"] = option(
        "fixed", "Rule that ends a macro action (section 3.2.1)."
    )
    n: str = option("5", "Tokens per macro action for fixed: an integer, or inf. 1 is token-level PPO.")
    lengths: str = option("2,3,5,10", "Lengths for randomized (released code: 1,2,3,5,10).")
    repeats: int = option(3, "How often randomized repeats its lengths.", least=1)
    perplexity_rule: Literal["macro", "prefix", "token"] = option(
        "macro",
        "Whose perplexity may not rise, for perplexity: the macro action's (section 3.2.1), the response's so far "
        "(Appendix B.4), or a token's own (released code).",
    )
    parser: Literal["grammar", "stanza", "link", "python"] = option(
        "grammar",
        "For parsing: grammar (embedded task), stanza or link (link-grammar) for English, or python (tree-sitter).",
    )
    cutoff: int = option(5, "For parsing: phrases of fewer tokens stay whole.", least=1)
    inclusive: bool = option(False, "For parsing: so do phrases of just cutoff tokens (the text of section 3.2.1).")
    sigma: Literal["equal", "unit", "position", "position_reversed"] = option(
        "equal", "Weights of token values in a macro action's value (Appendix D.1)."
    )
    reward_pooling: Literal["sum", "mean"] = option(
        "sum",
        "KL reward inside a macro action: sum (paper), or mean (released code; this shrinks beta by about the macro "
        "length).",
    )
    rho: float = option(1.0, "Discount inside a macro action, for sum.", above=0, most=1)
    ratio: Literal["token", "macro"] = option(
        "token", "Importance ratio: of each token (Appendix E), or of the macro action (section 3.2.2)."
    )
    value_target: Literal["token", "macro"] = option(
        "token", "What regresses to the return: every token's value (Appendix E), or the macro value (Algorithm 1)."
    )
