"""The audit of stored results: its facts, from a small history, and the page that the project keeps of its own."""

import gzip
import json
import subprocess

import pytest
import yaml
from conftest import fails

from marlhf_lab.studies import audit
from marlhf_lab.studies.results import JOINED
from marlhf_lab.studies.study import STUDIES

ROOT = STUDIES.parents[2]
PROTOCOL = "marlhf_lab/studies/protocols/s.yaml"


@pytest.fixture
def project(git, tmp_path):
    """A function that writes files, commits them with a date, and returns the commit."""

    def commit(hour, **files):
        for name, text in files.items():
            path = tmp_path / (PROTOCOL if name == "protocol" else f"data/results/s/{name}.json.gz")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode() if name == "protocol" else gzip.compress(text.encode()))
        git("init", "-q")
        git("add", ".")
        git("commit", "-q", "--allow-empty", "-m", "-", f"--date=2030-01-01T{hour}:00+00:00")
        return git("rev-parse", "HEAD")

    return commit


def protocol(text="# A prediction.", methods="AB"):
    keys = {"seeds": [0, 1], "methods": {name: {"command": "ppo"} for name in methods}}
    return f"{text}\n{yaml.safe_dump(keys)}"


def run(commit, hour, dirty=False, **more):
    environment = {
        "date": f"2030-01-01T{hour}:00+00:00",
        "git_commit": commit,
        "git_dirty": dirty,
    } | more
    return json.dumps({"environment": environment})


def test_a_study_by_the_rules_has_no_facts(project, tmp_path):
    fixed = project("01:00", protocol=protocol())
    project(
        "03:00", **{f"{name}-seed{seed}": run(fixed, "02:00") for name in "AB" for seed in (0, 1)}
    )
    (row,) = audit.audit(tmp_path, {})
    assert row["facts"] == {} and (row["protocol"], row["runs"]) == (
        f"2030-01-01 01:00, {fixed[:7]}",
        4,
    )


def test_every_departure_is_a_fact(project, tmp_path):
    before = project("00:00")
    fixed = project("01:00", protocol=protocol())
    runs = {"A-seed0": run(fixed, "02:00"), "B-seed0": run(before, "00:30", gpu="x")}
    runs |= {"B-seed1": run(fixed, "02:30", dirty=True)}
    project("03:00", **runs)
    project("04:00", protocol=protocol("# A softer one.", methods="ABC"))
    project("05:00", **{"A-seed0": run(fixed, "04:30"), "C-seed0": run(fixed, "04:40")})
    (row,) = audit.audit(tmp_path, {})
    assert row["facts"] == {
        "older": "1 of 4",
        "lacking": "1 of 4",
        "changed": "methods, text (2030-01-01 04:00)",
        "dirty": "1 of 4",
        "rerun": "1 of 4",
        "added": "C (1)",
        "missing": "A (1)",
        "order": "0",
        "hardware": "0",
    }
    notes = tmp_path / "data" / "results" / "history.yaml"
    (tmp_path / "docs").mkdir()
    notes.write_text(yaml.safe_dump({"s": dict.fromkeys(audit.FACTS, "Why.")}))
    assert audit.write_page(tmp_path).count("Why.") == 10
    notes.write_text(
        yaml.safe_dump({"s": dict.fromkeys([*audit.FACTS][1:], "Why."), "t": {"dirty": "Why."}})
    )
    fails(lambda: audit.write_page(tmp_path), "s: older; t: dirty")


def test_seeds_out_of_order_and_of_two_machines_are_facts(project, tmp_path):
    """Two at a time is order; a run of the first seed after all of the second is not."""
    fixed = project("01:00", protocol=protocol())
    hours = {"A-seed0": "02:00", "B-seed0": "02:10", "A-seed1": "02:05", "B-seed1": "02:15"}
    for late, machine, facts in (
        ("02:10", "x", {}),
        ("02:20", "x", {"order": "0"}),
        ("02:10", "y", {"hardware": "0"}),
    ):
        runs = {name: run(fixed, hour, processor="x", gpu=None) for name, hour in hours.items()}
        project("03:00", **runs | {"B-seed0": run(fixed, late, processor=machine, gpu=None)})
        found = audit.audit(tmp_path, {})[0]["facts"]
        assert {name: text for name, text in found.items() if name != "rerun"} == facts


def test_a_study_of_one_file_has_the_facts_of_its_runs(project, tmp_path):
    fixed = project("01:00", protocol=protocol())
    runs = {(name, seed): run(fixed, "02:00") for name in "AB" for seed in (0, 1)}
    project("03:00", **{f"{name}-seed{seed}": text for (name, seed), text in runs.items()})

    def lines():
        facts = (
            {"method": name, "seed": seed} | json.loads(text) for (name, seed), text in runs.items()
        )
        return "\n".join(json.dumps(fact) for fact in facts)

    for path in (tmp_path / "data/results/s").iterdir():
        path.unlink()
    joined = tmp_path / "data/results/s" / JOINED
    joined.write_bytes(gzip.compress(lines().encode()))
    project("04:00")
    (row,) = audit.audit(tmp_path, {})
    assert row["facts"] == {} and row["runs"] == 4
    runs["B", 1] = run(fixed, "04:30", dirty=True)
    joined.write_bytes(gzip.compress(lines().encode()))
    (row,) = audit.audit(tmp_path, {})
    assert row["facts"] == {"dirty": "1 of 4", "rerun": "1 of 4"}


def test_the_page_has_every_stored_study_and_is_what_the_history_says():
    """And every fact has its note."""
    stored = (ROOT / audit.PAGE).read_text(encoding="utf-8")
    files = [
        path for name in ("*-seed*.json.gz", JOINED) for path in (ROOT / audit.RESULTS).rglob(name)
    ]
    studies = {path.parent.relative_to(ROOT / audit.RESULTS) for path in files}
    assert all(f"\n| {study} | " in stored for study in studies)
    shallow = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "-e", "1ff7260"], capture_output=True
    )
    if shallow.returncode:
        pytest.skip("a clone with all the project's history is needed")
    notes = yaml.safe_load((ROOT / audit.RESULTS / "history.yaml").read_text("utf-8"))
    rows = audit.audit(ROOT, notes)
    assert stored == audit.page(rows, notes), "run `marlhf study --audit`"
    assert {(row["study"], fact) for row in rows for fact in row["facts"]} == {
        (s, f) for s in notes for f in notes[s]
    }
