"""Use a classifier from the hub as a reward: how sure it is that a response is positive.

With this file in the current folder: marlhf run --dataset prompts.jsonl --reward hf_reward_model:positive
CLASSIFIER and LABEL in the environment choose another classifier and label.
"""

import os
from functools import cache

from transformers import pipeline

CLASSIFIER = os.environ.get(
    "CLASSIFIER", "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
)
LABEL = os.environ.get("LABEL", "POSITIVE")


@cache
def classifier():
    """Load the classifier at the first call, on the GPU if there is one."""
    return pipeline("text-classification", CLASSIFIER)


def positive(prompts, responses):
    """Return the label's logit for each response; a probability would hardly change once the classifier is sure."""
    # For each response a list of all labels with their logits.
    found = classifier()(
        list(responses), top_k=None, function_to_apply="none", truncation=True, batch_size=16
    )
    logits = []
    for labels in found:
        score_of = {one["label"]: one["score"] for one in labels}
        logits.append(score_of[LABEL])
    return logits
