"""Make the embedded data anew: `python -m marlhf_lite.lab.corpora FOLDER` writes what stands in data/."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

from marlhf_lite.lab.corpora import tiny_code, tiny_hh, tiny_steps, tiny_tldr, tiny_webgpt

SEED = 1234
# Name -> function of (rows, seed), and the number of rows; tiny-umbrella is made where it is loaded, since its `--part`
# chooses how long the stories are.
MAKERS: dict[str, tuple[Callable[[int, int], list[dict[str, str]]], int]] = {
    "tiny-tldr": (tiny_tldr.make_pairs, 5000),
    "tiny-hh": (tiny_hh.make_pairs, 3000),
    "tiny-webgpt": (tiny_webgpt.make_pairs, 3000),
    "tiny-steps": (tiny_steps.make_rows, 5000),
    "tiny-code": (tiny_code.make_rows, 4000),
}


def json_lines(name: str) -> bytes:
    """Return the rows of an embedded data set as JSON lines."""
    make, size = MAKERS[name]
    return "".join(json.dumps(row) + "\n" for row in make(size, SEED)).encode()


def main(folder: str) -> None:
    """Write `<name>.jsonl.gz` for each; without the time in gzip's header, so that the same rows are the same file."""
    for name in MAKERS:
        (Path(folder) / f"{name}.jsonl.gz").write_bytes(gzip.compress(json_lines(name), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
