"""The release workflow: pinned, without secrets, and with no more rights than it needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PATH = ROOT / ".github" / "workflows" / "wheels.yml"
TEXT = PATH.read_text(encoding="utf-8")
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, Any] = WORKFLOW["jobs"]
ON = WORKFLOW[True]  # YAML takes the word for a boolean


def steps() -> list[dict[str, Any]]:
    return [step for job in JOBS.values() for step in job["steps"]]


def test_actions_are_pinned_by_digest_and_say_their_version() -> None:
    used = re.findall(r"^\s*-? ?uses: (.*)$", TEXT, re.MULTILINE)
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_there_is_no_secret() -> None:
    assert "secrets." not in TEXT
    assert "password" not in TEXT


def test_rights_are_given_where_they_are_needed() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job} == {
        "publish": {"id-token": "write"},
        "notes": {"contents": "write"},
    }
    checkouts = [s for s in steps() if s.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@pytest.mark.parametrize(
    "step", [step for step in steps() if "run" in step], ids=lambda s: s["run"][:30]
)
def test_no_expression_is_pasted_into_a_shell(step: dict[str, Any]) -> None:
    assert "${{" not in step["run"]


def test_only_a_tag_publishes_and_only_what_was_tried() -> None:
    publish = JOBS["publish"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert set(publish["needs"]) == {"release", "trials"}
    assert publish["environment"] == "pypi"
    assert JOBS["notes"]["needs"] == "publish"
    (upload,) = (s for s in publish["steps"] if "gh-action-pypi-publish" in s.get("uses", ""))
    assert upload["with"] == {"packages-dir": "dist/pypi", "attestations": True}


def test_it_runs_every_night() -> None:
    assert ON["schedule"]
    assert ON["push"] == {"tags": ["v*"]}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_hangs_is_ended(name: str) -> None:
    assert JOBS[name]["timeout-minutes"] <= 60


def test_what_jobs_run_is_there() -> None:
    for script in re.findall(r"python3 (\S+\.py)", TEXT):
        assert (ROOT / script).is_file(), script
