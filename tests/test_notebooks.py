"""Every notebook and every solution runs in the smoke profile, alone: in an empty folder, with an installed wheel."""

import base64
import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import exercise_answers
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from marlhf_lab.figures import notebook
from marlhf_lite.utils.errors import InputError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NOTEBOOKS = sorted([*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("notebooks/solutions/*.ipynb")])
CELL_SECONDS = 600  # against a cell that hangs; a busy machine is slow
SETUP = "import sys; from matplotlib import pyplot as plt; from marlhf_lab.figures.notebook import *; setup()"
DRAW = "ax = plt.subplots()[1]; ax.set(xlabel='x', ylabel='y', title='β = 0.0123'); "


def errors(cells: list) -> list[str]:
    return [
        f"{o.ename}: {o.evalue}" for cell in cells for o in cell.outputs if o.output_type == "error"
    ]


@pytest.fixture(scope="session")
def warm(installed):
    """The socket of a process that forks kernels; it ends with the tests."""
    folder = tempfile.TemporaryDirectory(prefix="warm")  # a socket's path must be short
    path = Path(folder.name) / "socket"
    command = [sys.executable, "-P", str(HERE / "warm_kernel.py"), "serve", str(path)]
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, start_new_session=True
    )
    while server.poll() is None and not path.exists():
        time.sleep(0.1)
    yield path
    server.communicate()  # ends its standard input, and waits
    folder.cleanup()


@pytest.fixture
def execute(monkeypatch, tmp_path, installed, warm):
    """Executes a notebook in the smoke profile: from an empty folder, with this very interpreter and the wheel.

    The kernel has a name that no notebook asks for, as those of course servers and conda environments have.
    """
    kernels = tmp_path / "kernels"
    (kernels / "course").mkdir(parents=True)
    started = [sys.executable, "-P", str(HERE / "warm_kernel.py"), str(warm), "{connection_file}"]
    kernel = {"argv": started, "language": "python"}
    (kernels / "course" / "kernel.json").write_text(
        json.dumps(kernel | {"display_name": "A course"})
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("MARLHF_PROFILE", "smoke")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.delenv("MPLBACKEND", raising=False)

    def run(*cells: str, allow_errors: bool = False) -> list:
        """The cells after execution; the last one, added here, fails where a figure had no axis labels."""
        watched = [
            "import figure_checks; _seen = figure_checks.watch()",
            *cells,
            "assert not _seen, _seen",
        ]
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in watched]
        )
        specs = KernelSpecManager(kernel_dirs=[str(kernels)], ensure_native_kernel=False)
        kernel = AsyncKernelManager(kernel_name="course", kernel_spec_manager=specs)
        where = {"metadata": {"path": str(empty)}}
        client = NotebookClient(
            notebook, km=kernel, timeout=CELL_SECONDS, allow_errors=allow_errors, resources=where
        )
        # else the kernel lives, with its memory, until the last test has ended
        client.execute(cleanup_kc=True)
        return notebook.cells[1:]

    return run


def with_answers(path: Path) -> list[str]:
    """The code cells of a notebook; in a lesson each exercise's check is tried with a right answer and wrong ones."""
    sources = []
    # Answers are listed by the number of a lesson, or by its file if two files share the number.
    number = path.stem if path.stem in exercise_answers.ANSWERS else path.name.partition("_")[0]
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type == "code":
            sources.append(cell.source)
            answers = (
                exercise_answers.ANSWERS.get(number, {}) if path.parent.name == "notebooks" else {}
            )
            if exercise_answers.name_of(cell.source) in answers:
                tried = f"exercise_answers.faults({number!r}, {cell.source!r}, globals())"
                sources.append(
                    f"import exercise_answers; _wrong = {tried}; assert not _wrong, _wrong"
                )
    return sources


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: str(p.relative_to(ROOT / "notebooks")))
def test_runs_in_the_smoke_profile(path, execute):
    cells = execute(*with_answers(path))
    assert not errors(cells)
    assert "profile smoke" in str(cells), "the set-up cell calls marlhf_lab.figures.notebook.setup"


def test_a_notebook_alone_reads_the_wheel_and_has_diagrams_and_figures_to_play_with(
    execute, installed
):
    shown = (
        "diagram('sigma')",
        "play('signal_kept', height=700)",
        "import marlhf_lite; marlhf_lite.__file__",
    )
    _, drawing, page, where = execute(SETUP, *shown)[:4]
    assert (
        "<title>" in drawing.outputs[0].data["image/svg+xml"]
        and "image/png" in drawing.outputs[0].data
    )
    (packed,) = re.findall(r"atob\(&quot;(.*?)&quot;", page.outputs[0].data["text/html"])
    assert b"accent-color" in gzip.decompress(base64.b64decode(packed))
    assert "image/png" in page.outputs[1].data, "a picture for where no page can be"
    assert str(installed) in str(where.outputs)


def test_figures_and_progress_in_a_notebook(execute):
    line = DRAW + "ax.plot([1, 2]); show(ax); plt.get_fignums()"
    bar = "from tqdm.auto import tqdm\nfor _ in tqdm(range(3), desc='three steps'): pass"
    cells = execute(
        SETUP, line, line, bar, "sys.executable", "plt.plot([1, 2]); plt.show()", allow_errors=True
    )
    _, first, again, progress, interpreter, own, check = cells
    assert "image/png" in str(first.outputs) and "'[]'" in str(first.outputs), (
        "one picture, and the figure closed"
    )
    assert first.outputs[0] == again.outputs[0], "a figure that is drawn again is the same text"
    assert first.outputs[0].metadata["image/png"]["width"] > 500, "pixels on the page"
    assert {o.name for o in progress.outputs} == {"stdout"} and "three steps: 100%" in str(
        progress.outputs
    )
    assert sys.executable in str(interpreter.outputs)
    assert "image/png" in str(own.outputs), "a student's own figure is shown without labels,"
    assert errors([check])[0].count("no label") == 1, "and in the lessons it would be found"


def test_profile_is_the_parameter_or_comes_from_the_environment(monkeypatch):
    for name, expected in (("smoke", 1), ("cpu", 2), ("gpu", 3), ("", 2)):
        monkeypatch.setenv("MARLHF_PROFILE", name)
        assert notebook.pick(smoke=1, cpu=2, gpu=3) == expected
    assert notebook.pick(1, 2) == 2
    monkeypatch.setenv("MARLHF_PROFILE", "fast")
    with pytest.raises(InputError, match="profile: expected one of smoke, cpu, gpu, got 'fast'"):
        notebook.pick(1, 2)


def test_the_first_cells_of_a_lesson(execute):
    """As papermill runs them: the parameter that it sets behind the tagged cell counts."""
    _, tagged, started = [
        cell.source for cell in nbformat.read(NOTEBOOKS[0], 4).cells if cell.cell_type == "code"
    ][:3]
    assert "profile gpu" in str(execute(tagged, "profile = 'gpu'", started)[2].outputs)

    without = "import sys, importlib.util; importlib.util.find_spec = lambda name: None"
    [line] = errors(execute(tagged, without, started, allow_errors=True))
    assert (
        line.startswith("AssertionError: marlhf_lite is missing. Type")
        and "%pip install git+https://" in line
    )


def test_the_first_cell_installs_in_colab_and_only_from_an_address(tmp_path):
    first = next(
        cell.source for cell in nbformat.read(NOTEBOOKS[0], 4).cells if cell.cell_type == "code"
    )
    (tmp_path / "pip").write_text("#!/bin/sh\necho pip $@\n")
    (tmp_path / "pip").chmod(0o755)
    in_colab = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "COLAB_RELEASE_TAG": "release"}
    pointed = first.replace("OWNER/REPO", "ann/copy")
    for command, shown in (
        (first, ""),
        (pointed, "pip install -q git+https://github.com/ann/copy\n"),
    ):
        done = subprocess.run(
            ["bash", "-c", command[1:]], env=in_colab, capture_output=True, text=True
        )
        assert (done.stdout, done.stderr) == (shown, "")


@pytest.mark.parametrize("name", notebook.REPLACED)
def test_a_package_that_was_imported_before_its_replacement_asks_for_a_new_kernel(
    name, monkeypatch
):
    notebook.check_restart()
    module = importlib.import_module(name)
    notebook.check_restart()
    monkeypatch.setattr(module, "__version__", "0.1")
    with pytest.raises(InputError, match=rf"{name} 0\.1 was imported before .* restart the kernel"):
        notebook.check_restart()


def test_badges_are_rewritten_everywhere_and_nothing_else(tmp_path):
    place = "https://github.com/OWNER/REPO/blob/main/notebooks/x.ipynb"
    text = f"(https://colab.research.google.com/github/{place[19:]}) (https://kaggle.com/kernels/welcome?src={place})\n"
    text += "[All lessons](https://github.com/OWNER/REPO/tree/main/notebooks) and [TRL](https://github.com/huggingface/trl)\n"
    text += "%pip install -q git+https://github.com/OWNER/REPO torch; see https://github.com/huggingface/trl\n"

    (tmp_path / "notebooks" / "solutions").mkdir(parents=True)
    files = [
        tmp_path / name
        for name in ("README.md", "notebooks/x.ipynb", "notebooks/solutions/x.ipynb")
    ]
    for file in files:
        file.write_text(text)
    make = ["make", "-f", str(ROOT / "Makefile"), "badges"]
    for repository in ("ann-b/c.d", "OWNER/REPO"):
        subprocess.run([*make, f"REPO={repository}"], cwd=tmp_path, check=True)
        assert all(file.read_text() == text.replace("OWNER/REPO", repository) for file in files)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(files)
    # README's picture of one update leads to the page on the site, and never to its source.
    live = "before <!-- live -->download it<!-- /live --> after"
    files[0].write_text(live)
    for owner, name in (("ann-b", "c.d"), ("bob", "e")):
        subprocess.run([*make, f"REPO={owner}/{name}"], cwd=tmp_path, check=True)
        page = f"https://{owner}.github.io/{name}/figures/interactive/one_update.html"
        assert f"]({page})" in files[0].read_text() and "download" not in files[0].read_text()
    refused = subprocess.run(
        [*make, "REPO=https://github.com/a/b"], cwd=tmp_path, capture_output=True, text=True
    )
    assert refused.returncode == 2 and "REPO=" in refused.stderr
