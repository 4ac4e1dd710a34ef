"""The four models of PPO: policy, reference, reward model and critic (paper, section 2.2)."""

from dataclasses import dataclass
from typing import Literal

from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlhf_lite.models.fast.last_layer import last_states, position_ids
from marlhf_lite.models.fast.switch import levers_of_model
from marlhf_lite.models.logprobs import from_hidden, from_logits, has_plain_head


def unwrap_peft(model: PeftModel | PreTrainedModel) -> PreTrainedModel:
    """The model whose layers contain the adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


class PolicyModel(nn.Module):
    """A causal LM that returns the log-probabilities of response tokens: the policy or the reference.

    If the head is one linear layer, memory does not grow with T times the vocabulary (see `logprobs`). Other heads, and
    heads with an adapter, give full logits.
    """

    def __init__(self, model: PeftModel | PreTrainedModel):
        super().__init__()
        self.model = model
        # Accelerate reads this name: FSDP2 shards each module of these classes by itself, then all other weights.
        self._no_split_modules = unwrap_peft(model)._no_split_modules

    def forward(
        self, tokens: Tensor, attention_mask: Tensor, length: int, temperature: float = 1.0
    ):
        """`(logprobs [B, T], entropy [B, T])` of the last `length` = T tokens of `tokens` [B, L], float32, in nats.

        Gradients flow only through the log-probabilities; the entropy is a metric.
        """
        causal_lm = unwrap_peft(self.model)
        targets = tokens[:, -length:]
        # The model predicts each target from the tokens before it, so it need not read the last one.
        tokens = tokens[:, :-1]
        attention_mask = attention_mask[:, :-1]
        # A head that is more than one linear layer, or has an adapter, must compute its logits itself.
        if not has_plain_head(causal_lm):
            output = self.model(
                input_ids=tokens,
                attention_mask=attention_mask,
                position_ids=position_ids(attention_mask),
                use_cache=False,
                logits_to_keep=length,
            )
            # Some families ignore `logits_to_keep` and return logits at every position.
            return from_logits(output.logits[:, -length:], targets, temperature)
        # Otherwise logits are made from the last hidden states, a tile at a time, to save memory.
        levers = levers_of_model(causal_lm)  # the choices of --fast that the model was loaded with
        hidden = last_states(causal_lm.base_model, length, tokens, attention_mask, levers=levers)
        softcap = getattr(causal_lm.config.get_text_config(), "final_logit_softcapping", None)
        return from_hidden(hidden, causal_lm.get_output_embeddings(), targets, temperature, softcap)


def score_states(classifier: PreTrainedModel, hidden: Tensor) -> Tensor:
    """[B, L] scores in float32 from the backbone's states [B, L, D], in the head's own dtype."""
    return classifier.score(hidden.to(classifier.score.weight.dtype)).squeeze(-1).float()


class ScalarHeadModel(nn.Module):
    """A backbone with a scalar head: the reward model or the critic."""

    def __init__(self, model: PeftModel | PreTrainedModel):
        super().__init__()
        self.model = model
        self._no_split_modules = unwrap_peft(model)._no_split_modules

    def forward(self, tokens: Tensor, attention_mask: Tensor, length: int | None = None) -> Tensor:
        """Return [B, L] scores in float32, one at each token.

        A reward model's score is read at the last response token, a critic's V(s_t) at the token before action t. With
        `length` = T only the last T tokens and the one before them get scores, and all others 0, which saves computing.
        """
        classifier = unwrap_peft(self.model)
        width = tokens.shape[1]
        # `+ 1`: the token before the last `length`, at which a critic gives the value of the first action.
        kept = width if length is None else min(length + 1, width)
        # The model without its head; families give it different names, such as `model` or `transformer`.
        backbone = getattr(classifier, classifier.base_model_prefix)
        levers = levers_of_model(classifier)  # the choices of --fast that the model was loaded with
        hidden = last_states(backbone, kept, tokens, attention_mask, levers=levers)
        scores = score_states(classifier, hidden)
        zeros_before = width - kept
        return nn.functional.pad(scores, (zeros_before, 0))


class ActorCritic(nn.Module):
    """Policy and critic as one module, which the optimizer trains and DDP or FSDP wraps."""

    def __init__(self, policy: PolicyModel, critic: ScalarHeadModel):
        super().__init__()
        self.policy = policy
        self.critic = critic
        self._no_split_modules = [
            *policy._no_split_modules,
            PolicyModel.__name__,
            ScalarHeadModel.__name__,
        ]

    def forward(
        self, tokens: Tensor, attention_mask: Tensor, length: int, temperature: float = 1.0
    ):
        """Return `(logprobs, entropy, values)` of the last `length` = T tokens, each [B, T]: see `PolicyModel`.

        The critic's score at a token is the value of the state in which the next one is chosen, so the critic reads all
        tokens but the last.
        """
        logprobs, entropy = self.policy(tokens, attention_mask, length, temperature)
        # The critic gives scores at the last T − 1 tokens that it reads and at the one before them: T in all.
        values = self.critic(tokens[:, :-1], attention_mask[:, :-1], length - 1)
        return logprobs, entropy, values[:, -length:]


@dataclass(frozen=True)
class PPOModels:
    """Policy and critic train; reference and reward model are frozen. With LoRA all share one base."""

    policy: PolicyModel
    reference: PolicyModel
    reward: ScalarHeadModel | None  # None if the reward is a function
    critic: ScalarHeadModel
    # of policy and critic; "auto": the trainer decides
    gradient_checkpointing: bool | Literal["auto"] = False


def without_dropout(model: nn.Module) -> None:
    """Switch off dropout: PPO's ratio compares two passes, and noise would look like a change of the policy."""
    for module in unwrap_peft(model).modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Some families call dropout as a function, with a rate from an attribute: dropout, attn_pdrop, layerdrop.
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def checkpoint_activations(model: PeftModel | PreTrainedModel) -> None:
    """Recompute activations in the backward pass; the non-reentrant way works with a frozen base and under DDP."""
    unwrap_peft(model).activation_checkpointing_enable(
        activation_checkpointing_kwargs={"use_reentrant": False}
    )


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters for an optimizer. Raises `RuntimeError` if there are none."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise RuntimeError(
            f"{type(model).__name__} has no trainable parameters: its adapter is frozen"
        )
    return parameters
