"""One update with contexts of 1,700 tokens on a pretrained model, beside TRL's: time and peak memory.

Four prompts of 1,500 tokens and responses of 200, LoRA, one row in a pass, one epoch; `run.py` says what else both
sides share, and what they do not (TRL's critic trains in full). The two processes run one after the other, because 24
GiB do not hold both, and each one's memory is its largest resident set. The end token cannot be sampled, so every
response has its full length; the words of prompts are drawn at random, because only their number matters here.

    python benchmarks/trl_ppo/long_context.py --model FOLDER

Writes JSON. Interrupted, the benchmark goes on with the side that is missing. Nothing else may run meanwhile.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from run import Case, Side, install_their_trl

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
    parser.add_argument("--updates", type=int, default=3, help="the first warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmark_long_context.json")
    return parser.parse_args()


def measure(case: Case, side: str, args: argparse.Namespace, models: Path) -> dict:
    """Run one side, "ours" or "theirs", and return its record."""
    with tempfile.TemporaryDirectory() as folder:
        started = Side(case, side, args, models, folder)
        try:
            return started.record()
        finally:
            started.process.kill()


def summarise(records: dict[str, dict]) -> dict:
    """TRL's processor time over ours, by the median of the updates; our peak memory over TRL's."""
    medians = {side: statistics.median(record["cpu_seconds"]) for side, record in records.items()}
    return {
        "speed_up": medians["theirs"] / medians["ours"],
        "memory": records["ours"]["peak_mib"] / records["theirs"]["peak_mib"],
    }


def table(records: dict[str, dict]) -> str:
    """Markdown: each side's updates one by one, and its memory."""
    lines = []
    for name, side in (("marlhf_lite", "ours"), ("TRL", "theirs")):
        record = records[side]
        processor = ", ".join(f"{seconds:.0f}" for seconds in record["cpu_seconds"])
        clock = ", ".join(f"{seconds:.0f}" for seconds in record["seconds"])
        lines.append([name, processor, clock, f"{record['peak_mib'] / 1024:.1f}"])
    return markdown(["", "processor seconds of each update", "seconds", "peak, GiB"], lines)


def main() -> None:
    args = parse()
    install_their_trl()
    cells = Cells(args.out, args)
    case = Case(
        "long context",
        shape="pretrained",
        finetune="lora",
        updates=args.updates,
        memory=True,  # the sides do not wait for each other
        flags={"scored_rows": args.micro_batch},
    )
    with tempfile.TemporaryDirectory() as top:
        folder = write_pretrained(Path(top, case.shape), args.model)
        tokenizer = load_tokenizer(str(folder))
        prompts = make_prompts_of(tokenizer, 4 * args.batch, args.prompt, args.seed)
        (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
        records = {
            side: cells.measure(side, measure, case, side, args, Path(top))
            for side in ("ours", "theirs")
        }
    found = summarise(records)
    cells.finish(**found)
    print(table(records))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
