"""Put what `gpu.py` needs on a machine without a network into one folder, and weigh it: build/gpu.

It holds a reduced tree (library, benchmarks, the tests of kernels, the tokenizer), wheels that a machine with torch
lacks (two TRLs: ours needs the newer one), and `run.sh`, which takes the options of `gpu.py`:

    python benchmarks/carry.py            # here
    sh build/gpu/run.sh --rows 0-3,5,4    # there; its log and its record are in $OUT, or in build/gpu/found

A later call of run.sh goes on after the log in build/gpu/found. Of bitsandbytes only the library for `--cuda` is kept,
because those of all other CUDAs together are larger than the rest.
"""

import argparse
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRACKED = [
    "marlhf_lite",
    "marlhf_lab",
    "benchmarks",
    "tests/test_on_card.py",
    "tests/conftest.py",
    "tests/small_runs.py",
    "data/tiny-gemma",
    "pyproject.toml",
]
# Versions of constraints.txt; what these need besides is what a machine with torch and transformers has.
PINNED = [
    "accelerate",
    "datasets",
    "defusedxml",
    "dill",
    "multiprocess",
    "nltk",
    "peft",
    "pydantic-monty",
    "pydantic-monty-client",
    "pydantic-monty-runtime",
    "transformers",
    "trl",
    "xxhash",
]
UNPINNED = ["liger-kernel>=0.8,<1", "bitsandbytes>=0.46,<1"]
TRL_WITH_PPO = "trl==1.12.0"
LIMIT_MIB = 64
RUN = """\
# Unpacks the wheels once, and measures: options are those of gpu.py.
cd "$(dirname "$0")" || exit 1
out=${OUT:-$PWD/found}
mkdir -p "$out"
if [ ! -d site ]; then
    for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" site; done
    python3 -m zipfile -e trl/*.whl site_trl
fi
[ -e "$out/gpu.jsonl" ] || { [ -e found/gpu.jsonl ] && cp found/gpu.jsonl "$out"; }
[ -d /dev/shm ] && export TMPDIR=/dev/shm
export PYTHONPATH="$PWD/tree:$PWD/site" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec python3 tree/benchmarks/gpu.py --trl "$PWD/site_trl" --commit "$(cat commit)" \\
    --log "$out/gpu.jsonl" --out "$out/gpu.json" "$@"
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default="3.12", help="of the machine with the card")
    parser.add_argument(
        "--cuda", default="130", help="CUDA of its torch, as bitsandbytes writes it"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "gpu", help="made anew by each call"
    )
    return parser.parse_args()


def copy_tracked_files(folder: Path) -> None:
    """Copy the files of `TRACKED` that git tracks, and write the name of the commit.

    Other files that lie there, such as caches, are left out, because the folder may not be heavier than `LIMIT_MIB`.
    """
    for name in git("ls-files", *TRACKED).splitlines():
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    (folder / "commit").write_text(git("rev-parse", "HEAD"), encoding="utf-8")


def git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def download(python: str, folder: Path, *wanted: str) -> None:
    """Download wheels for that Python on Linux, which may differ from the Python and the system of this machine."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += [f"--python-version={python}", "--implementation=cp", f"--dest={folder}"]
    # pip takes no wheel for an older glibc unless that one is named, too.
    for platform in ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014"):
        pip.append(f"--platform={platform}_x86_64")
    if subprocess.run([*pip, *wanted], check=False).returncode:
        raise SystemExit(
            f"{', '.join(wanted)}: could not be downloaded: see above, fix it and start again"
        )


def keep_one_cuda(wheel: Path, cuda: str) -> None:
    """Write the wheel of bitsandbytes again without its libraries for other CUDAs and for cards of other makers."""
    whole = wheel.rename(wheel.with_suffix(".whole"))
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            is_library = item.filename.endswith(".so")
            is_wanted = item.filename.endswith((f"_cuda{cuda}.so", "_cpu.so"))
            if is_wanted or not is_library:
                new.writestr(item, old.read(item))
    whole.unlink()


def main() -> int:
    """Fill the folder anew, and return the exit status: 1 if the folder is too heavy to be carried, else 0."""
    args = arguments()
    shutil.rmtree(args.folder, ignore_errors=True)
    copy_tracked_files(args.folder)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line.partition("==")[0] in PINNED]
    wheels = args.folder / "wheels"
    download(args.python, wheels, *pins, *UNPINNED)
    # This TRL gets a separate folder, because it must not stand beside the newer TRL on Python's path.
    download(args.python, args.folder / "trl", TRL_WITH_PPO)
    (bitsandbytes,) = wheels.glob("bitsandbytes-*.whl")
    keep_one_cuda(bitsandbytes, args.cuda)
    (args.folder / "run.sh").write_text(RUN, encoding="utf-8")
    sizes = {part.name: mib_of(part) for part in sorted(args.folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size:6.1f} MiB {name}")
    total = sum(sizes.values())
    print(f"{total:6.1f} MiB in {args.folder}, of {LIMIT_MIB} at most")
    return int(total > LIMIT_MIB)


def mib_of(path: Path) -> float:
    """Return the MiB of a file, or of all files in a folder."""
    files = [path, *path.rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file()) / 2**20


if __name__ == "__main__":
    sys.exit(main())
