"""Print the site's lessons and the cheat sheet to PDF: `python book/print_pdf.py build/book build/pdf`.

A Chromium browser prints. Environment variable BROWSER: its command, if it is none of those that are looked for.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "microsoft-edge",
)


def find_browser() -> str | None:
    """The path of a Chromium browser, BROWSER's or else the first of `BROWSERS` that is installed; None if none is."""
    asked = os.environ.get("BROWSER")
    names = [asked] if asked else BROWSERS
    for name in names:
        command = shutil.which(name)
        if command:
            return command
    return None


def browse(browser: str, page: Path, *arguments: str) -> str:
    """Open a local page without a window, wait until its scripts have run, and return what the browser prints."""
    options = ["--headless", "--disable-gpu", "--virtual-time-budget=20000", *arguments]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--no-sandbox")  # as root, Chromium refuses to run with its sandbox
    done = subprocess.run(
        [browser, *options, page.resolve().as_uri()], capture_output=True, text=True, timeout=300
    )
    done.check_returncode()
    return done.stdout


def main(site: Path, target: Path) -> None:
    browser = find_browser()
    if browser is None:
        print(
            f"No browser among {', '.join(BROWSERS)}: install one, or set BROWSER to its command.",
            file=sys.stderr,
        )
        sys.exit(2)
    target.mkdir(parents=True, exist_ok=True)
    for page in [*sorted((site / "notebooks").glob("*.html")), site / "docs" / "cheat_sheet.html"]:
        file = target / page.with_suffix(".pdf").name
        browse(browser, page, "--no-pdf-header-footer", f"--print-to-pdf={file}")
        print(file)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
