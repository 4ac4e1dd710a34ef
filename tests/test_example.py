"""The example of README, as a reader would run it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_example_trains_saves_and_draws(tmp_path):
    words = ["--updates", "2", "--batch_size", "4", "--size", "60", "--output_dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, str(ROOT / "examples" / "ma_ppo.py"), *words]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(tmp_path / "reward.png")]
    for folder in ("sft", "rm", "policy", "critic"):
        assert (tmp_path / folder / "adapter_model.safetensors").is_file()
