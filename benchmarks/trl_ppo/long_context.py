"""One update with contexts of 1,700 tokens on a pretrained model, beside TRL's: time and peak memory.

Four prompts of 1,500 tokens and responses of 200, LoRA, one row in a pass, one epoch; `run.py` says what else both
sides share, and what they do not (TRL's critic trains in full). The two processes take turns, update by update, and
each one's memory is its own largest resident set. The end token cannot be sampled, so every response has its full
length; the words of prompts are drawn at random, because only their number matters here.

    python benchmarks/trl_ppo/long_context.py --model FOLDER

Writes JSON. Interrupted, the benchmark has to start again, since the two sides take turns.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from run import Case, install, measure

sys.path.append(str(Path(__file__).parents[1]))
from cells import RESULTS, Cells
from synthetic import make_prompts_of, write_pretrained

from marlhf_lite.models.loading import load_tokenizer
from marlhf_lite.utils.tables import markdown


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or hub name"
    )
    parser.add_argument("--prompt", type=int, default=1500, help="tokens in every prompt")
    parser.add_argument("--response", type=int, default=200, help="tokens in every response")
    parser.add_argument("--batch", type=int, default=4, help="responses in an update")
    parser.add_argument("--micro_batch", type=int, default=1, help="responses in a pass")
    parser.add_argument("--updates", type=int, default=4, help="the first warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_long_context.json")
    return parser.parse_args()


def summarise(records: dict[str, dict]) -> dict:
    """TRL's processor time over ours, update by update and their median; our peak memory over TRL's."""
    ours = records["ours"]
    theirs = records["other"]
    pairs = zip(ours["cpu_seconds"], theirs["cpu_seconds"], strict=True)
    speed_ups = [their_seconds / our_seconds for our_seconds, their_seconds in pairs]
    return {
        "speed_ups": speed_ups,
        "median_speed_up": statistics.median(speed_ups),
        "memory": ours["peak_mib"] / theirs["peak_mib"],
    }


def table(records: dict[str, dict]) -> str:
    """Markdown: each side's updates one by one, and its memory."""
    lines = []
    for side, record in zip(("marlhf_lite", "TRL"), records.values(), strict=True):
        processor = ", ".join(f"{seconds:.0f}" for seconds in record["cpu_seconds"])
        clock = ", ".join(f"{seconds:.0f}" for seconds in record["seconds"])
        lines.append([side, processor, clock, f"{record['peak_mib'] / 1024:.1f}"])
    return markdown(["", "processor seconds of each update", "seconds", "peak, GiB"], lines)


def main() -> None:
    args = parse()
    install()
    cells = Cells(args.out, args)
    case = Case("long context", shape="pretrained", finetune="lora", updates=args.updates)
    with tempfile.TemporaryDirectory() as top:
        folder = write_pretrained(Path(top, case.shape), args.model)
        tokenizer = load_tokenizer(str(folder))
        prompts = make_prompts_of(tokenizer, 4 * args.batch, args.prompt, args.seed)
        (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
        records = cells.measure("update", measure, case, args, Path(top))
    found = summarise(records)
    cells.finish(**found)
    print(table(records))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
