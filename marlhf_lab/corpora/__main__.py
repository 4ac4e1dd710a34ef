"""Make the embedded data anew: `python -m marlhf_lab.corpora FOLDER` writes what is in data/."""

import gzip
import json
import sys
from pathlib import Path

from marlhf_lab.corpora import make_rows, sentiment

SEED = 1234
SIZES = {
    "tiny-tldr": 5000,
    "tiny-hh": 3000,
    "tiny-webgpt": 3000,
    "tiny-steps": 5000,
    "tiny-code": 4000,
}


def json_lines(name: str) -> bytes:
    """Return the rows of an embedded data set as JSON lines."""
    rows = make_rows(name, SIZES[name], SEED)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sentiment.write_prompts(folder / "sentiment")
    for name in SIZES:
        # Without the time in gzip's header, the same rows always make the same file.
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(json_lines(name), mtime=0))
