"""SFT and reward model where memory ends: they start again with half the rows a pass, and learn the same."""

import datasets
import pytest
import torch
from safetensors.torch import load_file

from marlhf_lite.config.options import DataConfig, RewardModelConfig, SFTStageConfig, TrainerConfig
from marlhf_lite.models.loading import new_policy, new_reward_model
from marlhf_lite.training.reward_model import train_reward_model
from marlhf_lite.training.sft import train_sft
from marlhf_lite.utils.errors import InputError

LENGTHS = DataConfig(max_prompt_length=20, max_response_length=8)
ROWS = datasets.Dataset.from_dict(
    {
        "prompt": [f"Say {'so ' * i}" for i in range(11)],
        "chosen": [f"yes {'I do ' * (i % 3)}" for i in range(11)],
        "rejected": [f"no {'never ' * (i % 2)}" for i in range(11)],
    }
)


@pytest.fixture
def train(base, sft, tiny, tokenizer, tmp_path):
    """Two epochs of two steps, of 6 rows and of 5; passes of more than `fits` rows fail from the second one on."""

    def run(stage, fits, rows_a_pass=0):
        torch.manual_seed(0)
        model = new_policy(base, tiny) if stage == "sft" else new_reward_model(base, sft)
        sequences, tried = 1 if stage == "sft" else 2, []

        def allocate(_, args):
            tried.append(len(args[0]) // sequences)
            if len(tried) > 1 and tried[-1] > fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        hook = model.get_input_embeddings().register_forward_pre_hook(allocate)
        folder = tmp_path / f"{stage}-{fits}-{rows_a_pass}"
        given = (ROWS, stage_options(stage), LENGTHS, folder, 0, TrainerConfig(per_device_train_batch_size=rows_a_pass))
        try:
            log = (train_sft if stage == "sft" else train_reward_model)(model, tokenizer, *given)
        finally:
            hook.remove()
        return log, load_file(folder / "adapter_model.safetensors"), tried

    return run


def stage_options(stage):
    kind = SFTStageConfig if stage == "sft" else RewardModelConfig
    return kind(**{f"{stage}_batch_size": 6, f"{stage}_epochs": 2.0, f"{stage}_learning_rate": 1e-2})


@pytest.mark.parametrize("fits", [3, 2, 1])
@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_half_the_rows_a_pass_learn_the_same(train, stage, fits):
    log, weights, tried = train(stage, 99)
    assert tried == [6, 5, 6, 5]
    again, others, tried = train(stage, fits)
    assert max(tried[-4:]) <= fits and tried[:2] == [6, 5] and len(again) == len(log) == 4
    assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in log], rel=1e-4)
    assert others.keys() == weights.keys()
    moved = max(float((value - others[name]).abs().max()) for name, value in weights.items())
    assert moved < 1e-3  # rounding, which Adam makes larger where a gradient is near 0; a step is 1e-2


def test_one_row_that_does_not_fit_is_one_line(train):
    with pytest.raises(InputError, match="--per_device_train_batch_size 1: shorten"):
        train("sft", 0)
