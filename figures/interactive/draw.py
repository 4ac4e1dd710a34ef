"""Fill the figures to play with: `python figures/interactive/draw.py` writes style and data into the HTML pages here.

Each page stands alone, because JupyterLab shows it in a sandbox that may load no second file. For macro_actions.html
the library cuts each response once with every setting of every rule; for one_update.html it computes the update.
"""

import json
import re
from pathlib import Path

import torch

from marlhf_lab.figures.macro_actions import token_pieces
from marlhf_lab.figures.one_update import page_data
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.macro import FixedNGram, LargestChange, Perplexity, RandomizedNGram, Whole
from marlhf_lite.models.actor_critic import PolicyModel
from marlhf_lite.models.loading import load_base, load_tokenizer
from marlhf_lite.parsing import GrammarParser, Parsing, Sentence
from marlhf_lite.training.rollout import from_texts

HERE = Path(__file__).parent
# title -> prompt and response
POSTS = {
    "two sentences": (
        "POST Subreddit: r/family\nMy sister Marla moved to Tolwick and waited 34 days. I do not know what to do. "
        "She sold the teapot for 12 euros.\nTL;DR:",
        " My sister Marla moved to Tolwick and waited 34 days. She sold the teapot for 12 euros.",
    ),
    "three sentences": (
        "POST Subreddit: r/tifu\nMy niece Bruna owed me 88 dollars. For some reason she lost the old scarf. "
        "She sold the blender for 81 euros. She left on Tuesday.\nTL;DR:",
        " My niece Bruna left on Tuesday and lost the old scarf. She sold the blender for 81 euros. "
        "She owed me 88 dollars.",
    ),
}
LENGTHS = [*range(1, 13), float("inf")]
# name of a rule: (its parameter, or "" without one; the rule for each setting; what it looks at)
RULES = {
    "fixed": ("n", {str(n): FixedNGram(n) for n in LENGTHS}, "Counts tokens."),
    "randomized": (
        "seed",
        {str(s): RandomizedNGram(seed=s) for s in range(10)},
        "Draws lengths from 2, 3, 5 and 10.",
    ),
    "perplexity": (
        "",
        {"": Perplexity()},
        "Ends where the next token surprises the reference model.",
    ),
    "cutpoints": (
        "n",
        {str(n): LargestChange("logprobs", n) for n in LENGTHS},
        "Begins at the least certain tokens.",
    ),
    "parsing": (
        "C",
        {str(c): Parsing(GrammarParser(), c) for c in range(2, 31)},
        "Takes phrases of fewer than C tokens.",
    ),
    "sentence": ("", {"": Sentence()}, "Ends with the sentence."),
    "whole": ("", {"": Whole()}, "Never cuts: a contextual bandit."),
}


def cut_responses() -> dict:
    """Return the data of macro_actions.html.

    `responses`: title and texts of the tokens of each response. `rules`: of each rule, its parameter, what it looks at,
    and `cuts`: for each response, setting -> the lengths of its macro actions.
    """
    tokenizer, policy = load_tokenizer("tiny-gemma"), PolicyModel(load_base(ModelConfig()))
    responses, cuts = [], {name: [] for name in RULES}
    for title, (post, text) in POSTS.items():
        rollout = from_texts(tokenizer, [post], [text], limit=96)
        with torch.no_grad():
            logprobs = policy(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])[0]
        # What rules may look at. Policy and reference are the same model here.
        context = {
            "token_ids": rollout.response_ids,
            "tokenizer": tokenizer,
            "ref_logprobs": logprobs,
            "logprobs": logprobs,
        }
        responses.append(
            {"title": title, "pieces": token_pieces(tokenizer, rollout.response_ids[0])}
        )
        for name, (_, settings, _) in RULES.items():
            made = {key: rule(rollout.mask, **context) for key, rule in settings.items()}
            cuts[name].append(
                {key: [b - a for a, b in macro.spans()[0]] for key, macro in made.items()}
            )
    rules = {
        name: {"parameter": RULES[name][0], "says": RULES[name][2], "cuts": cuts[name]}
        for name in RULES
    }
    return {"responses": responses, "rules": rules}


def pages() -> dict[str, str]:
    """Return file name -> text of each page, with the shared style and the page's data filled in, one line each."""
    style = " ".join((HERE / "style.css").read_text(encoding="utf-8").split())
    data = {"macro_actions.html": cut_responses(), "one_update.html": page_data()}
    found = {}
    for page in sorted(HERE.glob("*.html")):
        text = fill('<style id="shared">', style, "</style>", page.read_text(encoding="utf-8"))
        # A page without data has no place for them either, so `fill` changes nothing.
        numbers = json.dumps(data.get(page.name), ensure_ascii=False, separators=(",", ":"))
        found[page.name] = fill(
            '<script type="application/json" id="data">', numbers, "</script>", text
        )
    return found


def fill(start: str, new: str, end: str, text: str) -> str:
    """Replace what stands between `start` and `end` in `text`; if they are not there, return it unchanged."""
    return re.sub(
        f"(?<={re.escape(start)}).*?(?={re.escape(end)})",
        lambda _: new,  # a function, because `re.sub` would read backslashes in a text as escapes
        text,
        count=1,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")
