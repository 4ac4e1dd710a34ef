"""The reward model: Bradley-Terry on preference pairs, through `trl.RewardTrainer` (section 2.2, Appendix B.2)."""

import math
from pathlib import Path

import datasets
import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel
from trl import RewardConfig, RewardTrainer

from marlhf_lite.config.options import LengthConfig, RewardModelConfig, TrainerConfig
from marlhf_lite.models.actor_critic import position_ids, score_states, unwrap_peft
from marlhf_lite.tasks.training_rows import pair_dataset
from marlhf_lite.training.half_precision import ScaledGradients
from marlhf_lite.training.rewards import ModelReward
from marlhf_lite.training.rollout import from_texts
from marlhf_lite.training.trl_trainers import EvenPairs, StageSteps, stage_arguments, train_stage


def last_scores(scores: Tensor, mask: Tensor) -> Tensor:
    """Read scores [B, L] at the last token of each right-padded row: [B]. The mask marks it: the pad may be EOS."""
    return scores.gather(1, mask.long().sum(1, keepdim=True) - 1).squeeze(1)


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """−log σ(r⁺ − r⁻), mean over pairs (section 2.2). Both are [B]."""
    return -logsigmoid(chosen - rejected).mean()


def bradley_terry_all(
    chosen: Tensor,
    rejected: Tensor,
    chosen_ids: Tensor,
    rejected_ids: Tensor,
    masks: tuple[Tensor, Tensor],
) -> Tensor:
    """The released code's loss: −log σ(r⁺_t − r⁻_t) at each token t, not only at the last one.

    For each pair it is the mean over the tokens from the first at which the two texts differ to the end of the longer
    one; then the mean over pairs. This also shapes the scores before the last token, which the critic starts from.

    Args:
        chosen, rejected: [B, L] the scores of the two texts of each pair at every token, padded on the right.
        chosen_ids, rejected_ids: [B, L] their token ids.
        masks: [B, L] of the chosen and of the rejected texts, True on tokens.
    """
    chosen_mask, rejected_mask = masks

    # 1. The tokens that count. Texts differ where their ids do, and also after the end of one of them: its padding may
    # have the id of the other's token.
    differs = (chosen_ids != rejected_ids) | (chosen_mask != rejected_mask)
    from_first_difference = differs.long().cumsum(1) > 0
    counted = from_first_difference & (chosen_mask | rejected_mask)

    # 2. After its end the shorter text keeps its last score; the released code reads scores of padding there.
    chosen_held = torch.where(chosen_mask, chosen, last_scores(chosen, chosen_mask)[:, None])
    rejected_held = torch.where(
        rejected_mask, rejected, last_scores(rejected, rejected_mask)[:, None]
    )

    # 3. Each pair weighs the same, however many tokens are compared; two equal texts have none, and the loss 0.
    terms = -logsigmoid(chosen_held - rejected_held)
    per_pair = (terms * counted).sum(1) / counted.sum(1).clamp(min=1)
    return per_pair.mean()


def have_equal_responses(inputs: dict[str, Tensor]) -> Tensor:
    """Which pairs of a pass have two equal responses, [pairs] of truth values; nothing can be learned from them.

    In `inputs` the chosen texts of all pairs come first, then the rejected ones.
    """
    chosen, rejected = inputs["input_ids"].chunk(2)  # both halves are padded to one length
    chosen_mask, rejected_mask = inputs["attention_mask"].chunk(2)
    have_same_tokens = (chosen == rejected).all(1)
    return have_same_tokens & (chosen_mask == rejected_mask).all(1)


class _PairLoss(RewardTrainer):
    """TRL's trainer with the score read by the mask, and with the released code's loss as an option."""

    loss_kind = "last"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # In the inputs the chosen texts of all pairs come first, then the rejected ones: `chunk(2)` takes them apart.
        mask = inputs["attention_mask"].bool()
        scores = self._scores(model, inputs["input_ids"], mask)
        chosen, rejected = last_scores(scores, mask).chunk(2)
        if self.loss_kind == "last":
            loss = bradley_terry(chosen, rejected)
        else:
            loss = bradley_terry_all(
                *scores.chunk(2), *inputs["input_ids"].chunk(2), masks=mask.chunk(2)
            )
        # Two equal responses may differ in the last digit of their scores: such a pair is not counted as right.
        is_true_pair = ~have_equal_responses(inputs)
        is_accurate = (chosen > rejected) & is_true_pair
        margins = (chosen - rejected).detach() * is_true_pair
        # TRL averages these over the micro-batches of a step, but logs those of the main process only: so they are
        # averaged over processes here.
        means = torch.stack([is_accurate.float().mean(), margins.mean()])
        accuracy, margin = self.accelerator.reduce(means, reduction="mean").tolist()
        metrics = self._metrics["train" if model.training else "eval"]
        metrics["accuracy"].append(accuracy)
        metrics["margin"].append(margin)
        if return_outputs:
            return loss, {"chosen": chosen.detach(), "rejected": rejected.detach()}
        return loss

    def _scores(self, model, tokens: Tensor, mask: Tensor) -> Tensor:
        """[B, L] scores at every position."""
        # Calling the full model lets DDP or FSDP see the pass. It returns the score of one position only, so a hook
        # keeps the hidden states of the backbone.
        classifier = unwrap_peft(self.accelerator.unwrap_model(model))
        backbone = getattr(classifier, classifier.base_model_prefix)
        states: list[Tensor] = []  # of the one pass

        def keep_states(module, arguments, output) -> None:
            states.append(output.last_hidden_state)

        hook = backbone.register_forward_hook(keep_states)
        try:
            model(
                input_ids=tokens,
                attention_mask=mask.long(),
                position_ids=position_ids(mask),
                use_cache=False,
            )
        finally:
            hook.remove()
        return score_states(classifier, states[0])


class PairTrainer(ScaledGradients, StageSteps, EvenPairs, _PairLoss):
    """Trains on the loss of pairs, in float16 too."""

    of_pairs = ("accuracy", "margin")

    def is_padding(self, inputs: dict[str, Tensor]) -> Tensor:
        """Which pairs have equal responses, also if they are the data's: both have weight 0."""
        return have_equal_responses(inputs)

    def padding_row(self, row: dict) -> dict:
        """Two equal responses: whatever the scores are, their gradients cancel."""
        return row | {"rejected_ids": row["chosen_ids"]}


def train_reward_model(
    model: PeftModel | PreTrainedModel,
    tokenizer,
    rows: datasets.Dataset,
    config: RewardModelConfig,
    lengths: LengthConfig,
    output: Path,
    seed: int = 0,
    trainer_config: TrainerConfig | None = None,
    resume: bool = False,
) -> list[dict]:
    """Train a score model on pairs (columns prompt, chosen, rejected), and save adapter and head to `output`.

    Returns TRL's log, a row per step. `resume` and errors are those of `train_sft`.
    """

    def make(trainer_config: TrainerConfig) -> PairTrainer:
        trainer = PairTrainer(
            model=model,
            args=RewardConfig(
                max_length=None, **stage_arguments(output, seed, config, trainer_config, "rm")
            ),
            train_dataset=pair_dataset(tokenizer, rows, lengths.max_response_length),
            processing_class=tokenizer,
        )
        trainer.loss_kind = config.rm_loss
        # What two equal responses add to the loss: −log σ(0) = log 2. The released code's loss is over the tokens from
        # where the two differ, of which equal ones have none.
        trainer.loss_of_padding = math.log(2) if config.rm_loss == "last" else 0.0
        return trainer

    if trainer_config is None:
        trainer_config = TrainerConfig()  # type: ignore[call-arg]  # mypy sees no defaults by place
    return train_stage(
        make,
        model,
        trainer_config,
        rows_per_step=config.rm_batch_size,
        tokenizer=tokenizer,
        output=output,
        name="reward model",
        resume=resume,
    )


def pair_accuracy(reward: ModelReward, tokenizer, rows: datasets.Dataset, limit: int) -> float:
    """Return the share of pairs whose chosen response scores higher; ties count half.

    `limit` is the longest response, in tokens: longer ones are cut.
    """
    chosen = reward(from_texts(tokenizer, rows["prompt"], rows["chosen"], limit))
    rejected = reward(from_texts(tokenizer, rows["prompt"], rows["rejected"], limit))
    # 1 if the pair is ranked rightly, ½ for a tie, 0 otherwise.
    counts = torch.sign(chosen - rejected) / 2 + 0.5
    return counts.mean().item()
