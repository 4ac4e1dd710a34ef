"""Peak memory and time of response log-probabilities: full logits against tiles, as vocabulary and length grow.

Both get the same random hidden states, frozen head and targets, and run forward and backward. Every case is a child
process, so its peak is its own: the figures are what it reached beyond its inputs. Seconds are of CPU time, in one
thread. Tiles are projected twice but stay in the cache, so the wider the hidden states, the more time they take.
Prints a Markdown table and one JSON line.

    python benchmarks/logprobs.py --hidden 256 --batch 1
"""

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import sys
import time

# Set before torch starts threads, which would not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import trl.trainer.utils  # noqa: F401 - the tiles' backward pass imports it, and modules are no part of its peak
from torch import Tensor, nn
from tqdm import tqdm

from marlhf_lite.models.logprobs import from_hidden, from_logits

WAYS = {
    "plain": lambda hidden, head, targets: from_logits(head(hidden), targets, 1.0),
    "chunked": from_hidden,
}


def peak() -> float:
    """The most memory that this process has held so far (resident set), in MiB."""
    # The system counts in bytes on macOS, and in KiB on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


def make_inputs(
    args: argparse.Namespace, vocabulary: int, length: int
) -> tuple[Tensor, nn.Linear, Tensor]:
    """Hidden states [B, T, H] with gradient, a frozen head whose logits have spread 1, and targets [B, T]."""
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    head = nn.Linear(args.hidden, vocabulary, bias=False, dtype=dtype).requires_grad_(False)
    head.weight.normal_(std=args.hidden**-0.5)
    hidden = torch.randn(args.batch, length, args.hidden, dtype=dtype).requires_grad_()
    return hidden, head, torch.randint(vocabulary, (args.batch, length))


def measure(case: tuple[argparse.Namespace, str, int, int]) -> dict[str, float]:
    """CPU seconds of the fastest pass forward and backward, peak MiB beyond the inputs, and sums of results.

    The sums are only there to compare the two ways, which must give the same.
    """
    args, way, vocabulary, length = case
    hidden, head, targets = make_inputs(args, vocabulary, length)
    before = peak()
    seconds = []
    for _ in range(args.repeats):
        hidden.grad = None
        start = time.process_time()
        logprobs, entropy = WAYS[way](hidden, head, targets)
        logprobs.sum().backward()
        seconds.append(time.process_time() - start)
    sums = [logprobs.sum().item(), entropy.sum().item(), hidden.grad.float().norm().item()]
    return {"seconds": min(seconds), "mib": peak() - before, "sums": sums}


def run(args: argparse.Namespace) -> list[dict]:
    """One row for each vocabulary and length, with both ways side by side."""
    sizes = list(itertools.product(args.vocabularies, args.lengths))
    cases = [(args, way, *size) for size in sizes for way in WAYS]
    # One process at a time, and a new one for each case, so that a case's peak memory is its own.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        results = list(
            tqdm(pool.imap(measure, cases), total=len(cases), desc="cases", disable=None)
        )
    rows = []
    # Of each size the results are there one after the other, "plain" and then "chunked".
    for (vocabulary, length), plain, chunked in zip(sizes, results[::2], results[1::2]):
        close = 1e-4 if args.dtype == "float32" else 2e-2
        torch.testing.assert_close(chunked.pop("sums"), plain.pop("sums"), rtol=close, atol=close)
        rows.append(
            {"vocabulary": vocabulary, "length": length, "plain": plain, "chunked": chunked}
        )
    return rows


def table(rows: list[dict]) -> str:
    """The rows as a table in Markdown; a ratio is that of chunked over plain."""
    head = "| vocabulary | length | plain MiB | chunked MiB | ratio | plain s | chunked s | ratio |"
    lines = [head, "|--:" * 8 + "|"]
    for row in rows:
        plain = row["plain"]
        chunked = row["chunked"]
        lines.append(
            f"| {row['vocabulary']} | {row['length']} | {plain['mib']:.0f} | {chunked['mib']:.0f} | "
            f"{chunked['mib'] / max(plain['mib'], 1):.2f} | {plain['seconds']:.4f} | {chunked['seconds']:.4f} | "
            f"{chunked['seconds'] / plain['seconds']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every case, then print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[2**11, 2**14, 2**16, 2**18])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[32, 128, 512], help="response tokens"
    )
    parser.add_argument("--batch", type=int, default=1, help="responses")
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden states")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(args)
    print(table(rows))
    print(json.dumps({**vars(args), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
