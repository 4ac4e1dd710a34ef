"""What README and guide print runs as it stands: their Python code, in the order of the page, and the example."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_printed_code_runs(page, base, sft, rm, tokenizer, texts):
    # What the guide says is there already; and fewer updates.
    names = {"base": base, "sft_folder": sft, "rm_folder": rm, "tokenizer": tokenizer, "prompts": texts.prompts}
    text = (ROOT / page).read_text(encoding="utf-8").replace("updates=20, batch_size=32", "updates=1, batch_size=4")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, names)


def test_the_example_trains_saves_and_draws(tmp_path):
    words = f"--updates 2 --batch_size 4 --size 60 --output_dir {tmp_path}".split()
    command = [sys.executable, str(ROOT / "examples" / "ma_ppo.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(tmp_path / "reward.png")]
    for folder in ("sft", "rm", "policy", "critic"):
        assert (tmp_path / folder / "adapter_model.safetensors").is_file()
