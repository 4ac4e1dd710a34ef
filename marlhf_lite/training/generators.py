"""What samples responses, behind one interface: `(model, tokenizer, prompts, sampling) -> Rollout`.

`transformers` is the default. `vllm` needs a GPU and the package; its engine is TRL's, and it has been run by this
project on no machine yet: what is tested is that it gets the right weights and makes the right rollout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence

from accelerate import Accelerator
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel

from marlhf_lite.tasks.tokenization import encode_prompts
from marlhf_lite.training.rollout import Rollout, Sampling, end_of_text, from_tokens, generate
from marlhf_lite.utils.errors import InputError


def make_generator(name: str) -> Callable:
    """The generator that `--generator` names. Raises `InputError` where vllm is missing."""
    if name == "transformers":
        return generate
    if importlib.util.find_spec("vllm") is None:
        raise InputError("--generator vllm: the package is missing: pip install vllm (it needs a GPU)")
    return VLLMGenerator()


def merged_weights(model: PeftModel | PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the model with its adapter added in, one at a time.

    Nothing is changed: the usual merge and unmerge would do it in place, where the base belongs to four roles, and in
    bfloat16 would not quite undo it.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    for name, weight in model.named_parameters():
        place, _, rest = name.rpartition(".base_layer.")
        if any(f".{part}" in name for part in ("lora_A", "lora_B", "lora_embedding")):
            continue
        if place in layers and rest == "weight":
            weight = weight + sum(layers[place].get_delta_weight(a) for a in layers[place].active_adapters)
        yield name.removeprefix("base_model.model.").replace(".base_layer", ""), weight.detach()


class VLLMGenerator:
    """vLLM in this process, beside the training (TRL's colocate mode); it gets the policy's weights before each batch.

    `share`: of the GPU's memory, for vLLM.
    """

    def __init__(self, share: float = 0.3):
        self.share, self.engine = share, None

    def __call__(self, model, tokenizer, prompts: Sequence[str], sampling: Sampling) -> Rollout:
        """As `rollouts.generate`."""
        if self.engine is None:
            self.engine = _engine(model, tokenizer, sampling, self.share)
        self.engine.sync_weights()
        _, responses, *_ = self.engine.generate(encode_prompts(tokenizer, prompts), None, 1)
        return from_tokens(tokenizer, prompts, responses, end_of_text(model, tokenizer)).to(model.device)


def _engine(model, tokenizer, sampling: Sampling, share: float):
    from trl.generation.vllm_generation import VLLMGeneration

    class Engine(VLLMGeneration):
        def _iter_named_params(self):
            for name, weight in merged_weights(self.model):
                yield self._fix_param_name_to_vllm(name), weight

    return Engine(
        model,
        Accelerator(),
        tokenizer,
        mode="colocate",
        gpu_memory_utilization=share,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_completion_length=sampling.max_new_tokens,
    )
