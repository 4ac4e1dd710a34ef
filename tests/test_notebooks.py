"""Every notebook and every solution: executed in the smoke profile, and tidy as committed."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from base64 import b64decode
from functools import cache
from io import BytesIO
from pathlib import Path

import matplotlib
import nbformat
import pytest
from figure_checks import unlabelled
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from nbclient import NotebookClient
from PIL import Image

from marlhf_lite.lab.figures.notebook import Profile, _sized, profile
from marlhf_lite.utils.errors import InputError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NOTEBOOKS = sorted(p for folder in ("notebooks", "notebooks/solutions") for p in (ROOT / folder).glob("*.ipynb"))
LESSONS = [p for p in NOTEBOOKS if p.parent.name == "notebooks"]
CELL_SECONDS = 600  # against a cell that hangs; a busy machine is slow
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|tmp|home/[a-z_][\w-]*)/")

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: str(p.relative_to(ROOT / "notebooks")))


@cache
def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def prose(path: Path) -> str:
    return "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")


def errors(cells: list) -> list[str]:
    outputs = [o for cell in cells for o in cell.outputs]
    return [f"{o.ename}: {o.evalue}" for o in outputs if o.output_type == "error"]


# Execution


@pytest.fixture
def execute(monkeypatch, tmp_path):
    """Executes a notebook in the smoke profile: from an empty folder, with this very interpreter."""
    monkeypatch.setenv("MARLHF_PROFILE", "smoke")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("MPLBACKEND", raising=False)

    def run(*cells: str, allow_errors: bool = False) -> list:
        """The cells after execution; every figure that they showed has its axis labels."""
        watched = (
            "import figure_checks; _unlabelled = figure_checks.watch()",
            *cells,
            "assert not _unlabelled, _unlabelled",
        )
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in watched])
        # Without kernel folders the only kernel is the native one, whatever the user has registered.
        kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        where = {"metadata": {"path": str(tmp_path)}}
        client = NotebookClient(notebook, km=kernel, timeout=CELL_SECONDS, allow_errors=allow_errors, resources=where)
        client.execute(cleanup_kc=True)  # else the kernel lives, with its memory, until the last test has ended
        return notebook.cells[1:] if allow_errors else notebook.cells[1:-1]

    return run


@pytest.mark.long
@every_notebook
def test_runs_in_the_smoke_profile(path, execute):
    cells = execute(*[cell.source for cell in code_cells(path)])
    assert not errors(cells)
    assert "profile smoke" in str(cells), "the set-up cell calls marlhf_lite.lab.figures.notebook.setup"


SETUP = (
    "import sys; from matplotlib import pyplot as plt; "
    "from marlhf_lite.lab.figures.notebook import setup, show; setup()"
)


def test_a_students_own_figure_is_shown_without_labels(execute):
    *cells, check = execute(
        SETUP, "sys.executable", "plt.plot([1, 2]); plt.show()", "plt.plot([1]);", allow_errors=True
    )
    assert not errors(cells) and sys.executable in str(cells[1].outputs)
    assert [str(cell.outputs).count("image/svg+xml") for cell in cells[2:]] == [1, 1]
    assert errors([check])[0].count("no label") == 2, "the lessons' own figures are held to labels by these tests"


DRAW = "ax = plt.subplots()[1]; ax.set(xlabel='x', ylabel='y'); "


def test_show_draws_one_sharp_picture_and_closes_the_figure(execute):
    line = "plt.rcParams['svg.fonttype'] = 'none'; ax.plot([1, 2]); ax.set_title('β = 0.0123'); "
    cloud = "ax.plot(__import__('numpy').random.rand(9000), '.', color='#de8f05'); "
    cells = execute(SETUP, *(DRAW + what + "show(ax); plt.get_fignums()" for what in (line, cloud)))[1:]
    for cell, kind in zip(cells, ("image/svg+xml", "image/png"), strict=True):
        (data,) = [o.data for o in cell.outputs if "image/png" in o.get("data", {}) or "image/svg+xml" in o.data]
        assert kind in data and "'[]'" in str(cell.outputs)
        if kind == "image/png":
            picture = Image.open(BytesIO(b64decode(data[kind]))).convert("RGB")
            assert picture.width > 1200 and (0xDE, 0x8F, 0x05) in [colour for _, colour in picture.getcolors(10_000)]
        else:
            assert "β = 0.0123" in data[kind], "points lose decimals, text does not"
            assert not re.search(r'd="[^"]*\d\.\d\d', data[kind])
            assert re.search(r'<svg [^>]*width="691"', data[kind]) and not re.search(r"<svg [^>]*height=", data[kind])


@pytest.mark.parametrize("fonttype", ["path", "none"])
def test_shorter_points_leave_the_letters_as_they_are(fonttype):
    """Outlined letters keep their two scales, and written text keeps its digits."""
    figure = Figure()
    figure.add_subplot(title="β = 0.0123", xlabel="updates").plot([0.1, 0.7], [0.3, 0.9])
    drawing = BytesIO()
    with matplotlib.rc_context({"svg.fonttype": fonttype, "font.size": 7}):
        figure.savefig(drawing, format="svg")
    whole = drawing.getvalue().decode()
    small = _sized(whole, 640)
    scales = [re.findall(r"scale\([^)]+\)", svg) for svg in (whole, small)]
    assert len(small) < len(whole) and scales[0] == scales[1] and bool(scales[0]) == (fonttype == "path")
    assert ">β = 0.0123<" in small or fonttype == "path"


def test_a_figure_drawn_again_is_the_same_text(execute):
    cells = execute(SETUP, *["ax = plt.subplots()[1]; ax.plot([1]); ax.set(xlabel='x', ylabel='y'); show(ax)"] * 2)
    assert cells[1].outputs == cells[2].outputs


def test_progress_is_visible_and_stays_on_stdout(execute):
    bar = "from tqdm.auto import tqdm\nfor _ in tqdm(range(3), desc='three steps'): pass"
    streams = execute(SETUP, bar)[1].outputs
    assert {o.name for o in streams} == {"stdout"} and "three steps: 100%" in str(streams)


# As committed


def test_there_are_notebooks_and_each_lesson_has_solutions():
    assert LESSONS
    missing = [p.name for p in LESSONS if not (p.parent / "solutions" / p.name).is_file()]
    assert not missing


@every_notebook
def test_outputs_are_of_one_run_from_top_to_bottom(path):
    filled = [cell for cell in code_cells(path) if cell.source.strip()]
    assert [cell.execution_count for cell in filled] == list(range(1, len(filled) + 1))
    assert not errors(filled)
    streams = [o for cell in filled for o in cell.outputs if o.output_type == "stream"]
    assert not [o.text for o in streams if o.name == "stderr"]
    assert any("profile cpu" in o.text for o in streams), "commit the outputs of `make notebooks`"


@every_notebook
def test_file_is_small_and_says_nothing_of_its_machine(path):
    assert path.stat().st_size <= 400_000
    text = path.read_text(encoding="utf-8")
    assert not MACHINE_PATH.search(text), MACHINE_PATH.search(text)
    assert '"iopub.execute_input"' not in text, "execute without record_timing: times make noisy diffs"
    assert not re.search(r"\bif\s+.*smoke", "\n".join(cell.source for cell in code_cells(path)))


@every_notebook
def test_cells_are_short(path):
    lines = [len(cell.source.splitlines()) for cell in code_cells(path)]
    assert statistics.median(lines) <= 8
    assert max(lines) <= 40
    widest = max((line for cell in code_cells(path) for line in cell.source.splitlines()), key=len)
    assert len(widest) <= 120, widest
    if path in LESSONS:
        assert 15 <= len(lines) <= 45


@every_notebook
def test_sections_and_figures_are_counted_without_a_gap(path):
    prose = "\n".join(cell.source for cell in read(path).cells)
    for kind in (r"^## (\d+) ·", r"\*Figure (\d+)\. "):
        numbers = [int(number) for number in re.findall(kind, prose, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1)), f"{path.name}: {kind}: {numbers}"


@every_notebook
def test_badges_lead_to_this_file(path):
    first = read(path).cells[0].source
    where = path.relative_to(ROOT).as_posix()
    for site in ("colab.research.google.com/github/", "kaggle.com/kernels/welcome?src=https://github.com/"):
        found = re.findall(re.escape(site) + r"([\w.-]+/[\w.-]+)/blob/main/([^)\s]+)", first)
        assert [file for _, file in found] == [where], site


@every_notebook
def test_opens_as_every_notebook_does(path):
    text = prose(path)
    assert text.startswith("# " + path.name[:2])
    for words in ("You will", "CPU", "T4", "**Paper**"):
        assert words in text, words


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.name)
def test_lessons_have_exercises_and_symbols(path):
    text = prose(path)
    assert f"solutions/{path.name}" in text
    assert re.search(r"^## .*Exercises", text, re.M) and re.search(r"^## .*Symbols", text, re.M)
    words = len(text.split())
    code = sum(len(cell.source.split()) for cell in code_cells(path))
    assert words > 0.5 * code, f"{words} words of prose to {code} of code"


# marlhf_lite.lab.figures.notebook


def test_profile_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("MARLHF_PROFILE", raising=False)
    assert profile() == Profile("cpu")
    for name, expected in (("smoke", 1), ("cpu", 2), ("gpu", 3), ("", 2)):
        monkeypatch.setenv("MARLHF_PROFILE", name)
        assert profile().pick(smoke=1, cpu=2, gpu=3) == expected
    assert Profile("gpu").pick(1, 2) == 2
    monkeypatch.setenv("MARLHF_PROFILE", "fast")
    with pytest.raises(InputError, match="smoke, cpu, gpu, got 'fast'"):
        profile()


@pytest.fixture
def figure():
    plt.close("all")
    yield plt.figure()
    plt.close("all")


def test_figures_need_labels(figure):
    left, right = figure.subplots(1, 2)
    assert not unlabelled(figure), "nothing drawn yet"
    left.plot([1, 2])
    left.set_xlabel("something")
    assert unlabelled(figure) == ["figure 1, axes 0: no label on y"]
    left.set_ylabel("something")
    assert not unlabelled(figure)
    right.imshow([[1]])
    assert unlabelled(figure) == ["figure 1, axes 1: no label on x"]
    right.axis("off")
    assert not unlabelled(figure)


def test_shared_axes_and_colour_bars_need_one_label(figure):
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    images = [ax.imshow([[1, 2], [3, 4]]) for ax in axes.flat]
    axes[1, 0].set(xlabel="x", ylabel="y")
    assert not unlabelled(figure)
    bar = figure.colorbar(images[0], ax=axes)
    assert unlabelled(figure)
    bar.set_label("height")
    assert not unlabelled(figure)


# make badges

BADGES = (
    "[![Colab](a.svg)](https://colab.research.google.com/github/OWNER/REPO/blob/main/notebooks/x.ipynb)\n"
    "[![Kaggle](b.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/OWNER/REPO/blob/main/notebooks/x.ipynb)"
    "\n%pip install -q git+https://github.com/OWNER/REPO torch\nsee https://github.com/huggingface/trl/blob/main/x.py\n"
)


def test_badges_are_rewritten_everywhere_and_nothing_else(tmp_path):
    def make(repository):
        command = ["make", "-f", str(ROOT / "Makefile"), "badges", f"REPO={repository}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    (tmp_path / "notebooks" / "solutions").mkdir(parents=True)
    files = [tmp_path / name for name in ("README.md", "notebooks/x.ipynb", "notebooks/solutions/x.ipynb")]
    for file in files:
        file.write_text(BADGES)
    for repository in ("ann-b/c.d", "OWNER/REPO"):
        assert make(repository).returncode == 0
        assert all(file.read_text() == BADGES.replace("OWNER/REPO", repository) for file in files)
        assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(files)
    for bad in ("https://github.com/a/b", ""):
        refused = make(bad)
        assert refused.returncode == 2 and "give the repository as REPO=owner/name" in refused.stderr


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.name)
def test_lessons_name_the_paper_and_lead_to_their_neighbours(path):
    first, last = (read(path).cells[place].source.strip() for place in (0, -1))
    assert "https://arxiv.org/abs/2410.02743" in first and "**Licence** MIT" in first
    line, place = first.splitlines()[-1], LESSONS.index(path)
    assert last.splitlines()[-1] == line
    neighbours = [LESSONS[i].name for i in (place - 1, place + 1) if 0 <= i < len(LESSONS)]
    assert re.findall(r"\]\(([^)]+)\)", line) == neighbours
