"""The Python code that README and guide print runs as it stands, in the order of the page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_printed_code_runs(page, base, sft, rm, tokenizer, texts):
    # What the guide says is there already; and fewer updates.
    names = {"base": base, "sft_folder": sft, "rm_folder": rm, "tokenizer": tokenizer, "prompts": texts.prompts}
    text = (ROOT / page).read_text(encoding="utf-8").replace("updates=20, batch_size=32", "updates=1, batch_size=4")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, names)
