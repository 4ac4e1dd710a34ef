"""A benchmark's measurements in a JSON file, written one by one: an interrupted benchmark goes on where it stopped."""

import argparse
import json
import tempfile
from pathlib import Path

from marlhf_lite.utils.jsonl import write_json
from marlhf_lite.utils.run_folder import environment

RESULTS = Path(__file__).parents[1] / "data" / "results"


def arguments(doc: str, name: str) -> argparse.ArgumentParser:
    """A parser with the options that programs on a pretrained model share; `name` is that of the folder and record."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or hub name"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / name, help="of what is trained"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / f"benchmark_{name}.json")
    return parser


class Cells:
    """Measurements by name, in a file.

    If the file is that of an unfinished benchmark with the same options, its measurements are kept.
    """

    def __init__(self, path: Path, args: argparse.Namespace):
        self.path = path
        self.cells = {}
        # Where a record and a figure are written changes no measurement.
        options = {name: x for name, x in vars(args).items() if name not in ("out", "figure")}
        self.options = json.loads(json.dumps(options, default=str))  # as they are read from a file
        old = self._read_old_record()
        if old.get("complete") is False and old.get("options") == self.options:
            self.cells = old["cells"]
            print(
                f"going on after {len(self.cells)} measurements in {path}; delete it to start anew",
                flush=True,
            )

    def measure(self, name: str, run, *args) -> dict:
        """The measurement `name`; `run(*args)` makes it if it is not there yet."""
        if name not in self.cells:
            self.cells[name] = run(*args)
            self._write(complete=False)
        return self.cells[name]

    def finish(self, **summary) -> None:
        """Write the record as complete, with a summary of the measurements, which are all made."""
        self._write(complete=True, **summary)

    def _write(self, **more) -> None:
        record = {"options": self.options, "environment": environment(), "cells": self.cells}
        write_json(self.path, more | record)

    def _read_old_record(self) -> dict:
        """The record that the file holds; empty if there is none, or if it is no JSON."""
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
