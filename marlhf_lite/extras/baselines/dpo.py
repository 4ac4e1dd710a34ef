"""Direct preference optimisation through `trl.DPOTrainer` (Appendix C.3)."""

import math
from pathlib import Path

import datasets
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from trl import DPOConfig, DPOTrainer

from marlhf_lite.config.commands import DPOCommand
from marlhf_lite.config.options import DPOStageConfig
from marlhf_lite.tasks.answers import encode_answers
from marlhf_lite.training.half_precision import ScaledGradients
from marlhf_lite.training.trl_trainers import EvenPairs, StageSteps, check_adapter, stage_arguments


class PairsTrainer(ScaledGradients, StageSteps, EvenPairs, DPOTrainer):
    """TRL's trainer, which here learns from our token ids.

    TRL itself would tokenise prompt and response together, and add EOS to responses that were cut.
    """

    of_pairs = tuple(f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins"))

    loss_of_padding = math.log(2)  # −log σ(0): both log-ratios of such a pair are 0

    def padding_row(self, row: dict) -> dict:
        """Return a row with a prompt and no responses: both log-ratios are sums over no tokens, so they are 0."""
        return row | {"chosen_ids": [], "rejected_ids": []}

    def is_padding(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return which pairs [B] are padding: they have no token of a response."""
        chosen, rejected = inputs["completion_mask"].chunk(2)
        return ~(chosen.any(1) | rejected.any(1))

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset


def dpo_trainer(
    model: PeftModel, tokenizer, rows: datasets.Dataset, options: DPOCommand, output: Path
) -> PairsTrainer:
    """Return a trainer of `model` on pairs, with the columns prompt, chosen and rejected.

    Responses of more than --max_response_length tokens are cut. A copy of the model's present adapter becomes the
    reference. Checkpoints go to `output`/checkpoints.
    """
    encoded = {}
    for side in ("chosen", "rejected"):
        prompt_ids, answer_ids = encode_answers(
            tokenizer, rows["prompt"], rows[side], options.max_response_length
        )
        encoded["prompt_ids"] = prompt_ids  # the same for both sides
        encoded[f"{side}_ids"] = answer_ids
    arguments = stage_arguments(
        output / "checkpoints",
        options.seed,
        config=options,
        trainer_config=options,
        stage="dpo",
    )
    check_adapter(model)
    trainer = PairsTrainer(
        model=model,
        # `max_length`: responses are cut already, and prompts stay whole.
        args=DPOConfig(beta=options.dpo_beta, max_length=None, **arguments),
        train_dataset=datasets.Dataset.from_dict(encoded),
        processing_class=tokenizer,
    )
    complete_reference(trainer.model)  # what TRL leaves out of its copy of the adapter
    return trainer


def complete_reference(model: PeftModel | PreTrainedModel) -> None:
    """Copy adapters of the embedding and of single tokens to TRL's reference adapter, `ref`: TRL leaves them out.

    Nothing happens if TRL has made no such adapter.
    """
    if "ref" not in getattr(model, "peft_config", {}):
        return
    for name, parameter in model.named_parameters():
        # Such a name has no ".weight" after the adapter's name: PEFT keeps these parameters themselves in a dictionary
        # by adapter. TRL copies only modules.
        if name.endswith(".default"):
            model.get_parameter(name.removesuffix("default") + "ref").data.copy_(parameter.data)


def dpo_row(logs: dict, config: DPOStageConfig) -> dict[str, float]:
    """Return a row of metrics from TRL's log of a step, means over pairs. Log-ratios to the reference are in nats.

    `accuracy` is the share of pairs whose chosen response has the larger log-ratio, `margin` is β times the gap.
    """
    return {
        "policy_loss": logs["loss"],
        "policy_grad_norm": logs["grad_norm"],
        "accuracy": logs["rewards/accuracies"],
        "margin": logs["rewards/margins"],
        # TRL's implicit rewards are β times the log-ratios.
        "log_ratio_chosen": logs["rewards/chosen"] / config.dpo_beta,
        "log_ratio_rejected": logs["rewards/rejected"] / config.dpo_beta,
        "tokens": 0,  # DPO samples nothing to learn from
    }
