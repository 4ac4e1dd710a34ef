"""A base in 4 bits, on a processor: what is frozen is small, adapters learn, and a run goes on as if never stopped."""

import pytest
import torch
from small_runs import timeless

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
from bitsandbytes.nn import Linear4bit

from marlhf_lite.cli import main
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.models.loading import load_base, load_tokenizer
from marlhf_lite.utils.run_folder import RunFolder

OPTIONS = (
    "--dataset tiny-tldr --size 60 --load_in_4bit true --lora_r 4 --sft_epochs 0.2 --sft_batch_size 4 --rm_epochs 0.2 "
    "--rm_batch_size 8 --batch_size 8 --eval_prompts 2 --max_response_length 16 --checkpoint_every 1"
).split()


def test_weights_are_near_those_in_full():
    base, full = (load_base(ModelConfig(load_in_4bit=bits)) for bits in (True, False))
    layers = [m for m in base.modules() if isinstance(m, Linear4bit)]
    assert len(layers) == sum(name.endswith("proj") for name, _ in full.named_modules())
    assert all(
        layer.weight.numel() * 8 == layer.in_features * layer.out_features * 4 for layer in layers
    )
    ids = load_tokenizer("tiny-gemma")(["SUBREDDIT: r/tea"], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        near, exact = base(ids).logits.float(), full(ids).logits
    assert (near - exact).pow(2).mean() < exact.var() / 10


def test_a_run_learns_and_goes_on(tmp_path, monkeypatch):
    """Two updates in one go, and one update with a second one resumed: the same metrics.

    On processors with AVX512-BF16 bitsandbytes packs the weights anew for every answer and rounds them, so that a
    resumed run is the same up to this rounding alone; here it does not.
    """
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(["run", *OPTIONS, "--updates", "2", "--output_dir", str(whole)]) == 0
    assert main(["run", *OPTIONS, "--updates", "1", "--output_dir", str(broken)]) == 0
    assert main(["run", "--resume", str(broken), "--updates", "2"]) == 0
    rows, others = (RunFolder.open(run / "ma-ppo").metrics() for run in (whole, broken))
    assert (
        len(rows) == 2
        and rows[0]["policy_grad_norm"] > 0
        and abs(rows[0]["kl_k3"]) < 1e-6 < rows[1]["kl_k3"]
    )
    assert timeless(rows) == timeless(others)
