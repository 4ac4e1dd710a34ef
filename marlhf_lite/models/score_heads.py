"""A scalar head over the backbone of any causal LM: the form of a reward model and a critic."""

import copy
from typing import Literal

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from marlhf_lite.models.fast.switch import levers_of_model, set_levers
from marlhf_lite.utils.errors import InputError


class ScoreHead(nn.Linear):
    """A float32 head that takes hidden states of any dtype, such as those of a base in bfloat16."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.to(self.weight.dtype))


class _LastScore:
    """Scores at the last token, also over a backbone that keeps no keys and values (Mamba)."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs
    ):
        """Return the score of each text [B, 1] for tokens and mask [B, L], which may be padded on both sides."""
        backbone = getattr(self, self.base_model_prefix)
        hidden = backbone(input_ids, attention_mask=attention_mask, **inputs).last_hidden_state
        # The last token is the first place at which the count of tokens so far is largest.
        last = -1 if attention_mask is None else attention_mask.cumsum(-1).argmax(-1)
        return SequenceClassifierOutput(logits=self.score(hidden)[torch.arange(len(hidden)), last])


def with_head(
    causal_lm: PreTrainedModel, seed: int, head: Literal["normal", "zero"] = "normal"
) -> PreTrainedModel:
    """Put the backbone of a causal LM under a score head of one output, as a sequence classifier of its family.

    The weights of the backbone are shared with `causal_lm`, not copied. The head's weights are normal numbers drawn
    from `seed`, with the standard deviation 0.1 / √hidden size, so that scores are about 0.1 at first. With
    `head="zero"` they are 0. All weights are frozen.
    Raises `InputError` if the family's classifier has a head of another form.
    """
    config = copy.deepcopy(causal_lm.config)
    config.num_labels = 1
    text_config = config.get_text_config()
    if text_config.pad_token_id is None:  # transformers wants one; here masks say what is padding
        text_config.pad_token_id = 0
    ensure_classifier(causal_lm)
    with torch.device("meta"):  # only the shell: the weights are the base's
        model = transformers.AutoModelForSequenceClassification.from_config(
            config, trust_remote_code=False
        )
    if not hasattr(model, "score"):
        raise InputError(
            f"{type(model).__name__}: it has no linear layer `score`: give another base model"
        )
    backbone = getattr(causal_lm, causal_lm.base_model_prefix)
    setattr(model, model.base_model_prefix, backbone)
    set_levers(model, levers_of_model(causal_lm))  # the choices of --fast stay those of the base
    width = causal_lm.get_output_embeddings().weight.shape[1]  # hidden_size, except in OPT-350m
    deviation = 0.1 / width**0.5 if head == "normal" else 0.0
    weight = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) * deviation
    model.score = ScoreHead(width, 1, bias=False)
    model.score.weight = nn.Parameter(weight.to(next(causal_lm.parameters()).device))
    return model.requires_grad_(False)


def check_gives_one_score(source: str, config: PreTrainedConfig) -> None:
    """Raise `InputError`, which begins with `source`, unless a classifier of this config gives one number per text."""
    if config.num_labels != 1:
        what = f"it gives {config.num_labels} numbers a text (num_labels)"
        raise InputError(f"{source}: {what}: give one with 1")


def ensure_classifier(causal_lm: PreTrainedModel) -> None:
    """Let `AutoModelForSequenceClassification` know a classifier for the family of this causal LM.

    transformers has one for most families. For the others, such as Granite, its general form is made into a class of
    the family and registered.
    """
    config_class = type(causal_lm.config)
    if config_class in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return
    # The family's base class, such as GranitePreTrainedModel: the nearest model among the parents of the causal LM.
    parents = type(causal_lm).__mro__[1:]
    family = next(parent for parent in parents if issubclass(parent, PreTrainedModel))
    name = type(causal_lm).__name__.removesuffix("ForCausalLM") + "ForSequenceClassification"
    attributes = {
        "base_model_prefix": causal_lm.base_model_prefix,
        "config_class": config_class,
        # transformers reads the source of this module to learn what the class can do, as for mixtures of experts.
        "__module__": family.__module__,
    }
    classifier = type(name, (_LastScore, GenericForSequenceClassification, family), attributes)
    transformers.AutoModelForSequenceClassification.register(
        config_class, classifier, exist_ok=True
    )
