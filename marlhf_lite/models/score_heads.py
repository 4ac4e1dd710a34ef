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
        backbone = getattr(self, self.base_model_prefix)
        hidden = backbone(input_ids, attention_mask=attention_mask, **inputs).last_hidden_state
        last = -1 if attention_mask is None else attention_mask.cumsum(-1).argmax(-1)
        return SequenceClassifierOutput(logits=self.score(hidden)[torch.arange(len(hidden)), last])


def with_head(
    causal_lm: PreTrainedModel, seed: int, head: Literal["normal", "zero"] = "normal"
) -> PreTrainedModel:
    """Put the backbone of a causal LM under a score head of one output, as a sequence classifier of its family."""
    config = copy.deepcopy(causal_lm.config)
    config.num_labels = 1
    config.get_text_config().pad_token_id = config.get_text_config().pad_token_id or 0
    ensure_classifier(causal_lm)
    with torch.device("meta"):  # only the shell: the weights are the base's
        model = transformers.AutoModelForSequenceClassification.from_config(
            config, trust_remote_code=False
        )
    if not hasattr(model, "score"):
        raise InputError(
            f"{type(model).__name__}: it has no linear layer `score`: give another base model"
        )
    setattr(model, model.base_model_prefix, getattr(causal_lm, causal_lm.base_model_prefix))
    set_levers(model, levers_of_model(causal_lm))
    width = causal_lm.get_output_embeddings().weight.shape[1]  # hidden_size, except in OPT-350m
    deviation = 0.1 / width**0.5 if head == "normal" else 0.0
    weight = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) * deviation
    model.score = ScoreHead(width, 1, bias=False)
    model.score.weight = nn.Parameter(weight.to(next(causal_lm.parameters()).device))
    return model.requires_grad_(False)


def check_gives_one_score(source: str, config: PreTrainedConfig) -> None:
    """Raise `InputError` unless a classifier of this config gives one number; `source` begins the line."""
    if config.num_labels != 1:
        what = f"it gives {config.num_labels} numbers a text (num_labels)"
        raise InputError(f"{source}: {what}: give one with 1")


def ensure_classifier(causal_lm: PreTrainedModel) -> None:
    """Give a family without a sequence classifier in transformers (Granite) one of the general form."""
    config = type(causal_lm.config)
    if config in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return
    family = next(kind for kind in type(causal_lm).__mro__[1:] if issubclass(kind, PreTrainedModel))
    name = type(causal_lm).__name__.removesuffix("ForCausalLM") + "ForSequenceClassification"
    # In the family's module, where transformers reads what the class can do (mixtures of experts).
    attributes = {"base_model_prefix": causal_lm.base_model_prefix, "config_class": config}
    attributes["__module__"] = family.__module__
    kind = type(name, (_LastScore, GenericForSequenceClassification, family), attributes)
    transformers.AutoModelForSequenceClassification.register(config, kind, exist_ok=True)
