"""The workflows: pinned, without secrets, and with no more rights than they need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yml")}
WORKFLOWS: dict[str, dict[Any, Any]] = {name: yaml.safe_load(TEXTS[name]) for name in TEXTS}
JOBS: dict[str, Any] = WORKFLOWS["wheels"]["jobs"]
every_workflow = pytest.mark.parametrize("name", WORKFLOWS)


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]


def test_the_workflows_are_the_release_the_checks_and_the_site() -> None:
    assert set(WORKFLOWS) == {"wheels", "checks", "thorough", "site"}


@every_workflow
def test_actions_are_pinned_by_digest_and_say_their_version(name: str) -> None:
    used = re.findall(r"^\s*-? ?uses: (.*)$", TEXTS[name], re.MULTILINE)
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


@every_workflow
def test_there_is_no_secret(name: str) -> None:
    assert "secrets." not in TEXTS[name]
    assert "password" not in TEXTS[name]


@every_workflow
def test_workflows_read_and_leave_no_credentials(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    checkouts = [s for s in steps(name) if s.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_only_jobs_that_publish_have_more_rights() -> None:
    jobs = {name: job for workflow in WORKFLOWS.values() for name, job in workflow["jobs"].items()}
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "publish": {"id-token": "write"},
        "notes": {"contents": "write"},
        "pages": {"pages": "write", "id-token": "write"},
    }


@every_workflow
def test_no_expression_is_pasted_into_a_shell(name: str) -> None:
    assert all("${{" not in step.get("run", "") for step in steps(name))


def test_what_checks_workflows_is_pinned() -> None:
    pins = (ROOT / "ci" / "workflows.txt").read_text(encoding="utf-8").splitlines()
    packages = [line for line in pins if not line.startswith("#")]
    assert len(packages) == 2
    assert all(
        re.fullmatch(r"[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", line) for line in packages
    )


def test_only_a_tag_publishes_and_only_what_was_tried() -> None:
    publish = JOBS["publish"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert set(publish["needs"]) == {"release", "trials"}
    assert publish["environment"] == "pypi"
    assert JOBS["notes"]["needs"] == "publish"
    (upload,) = (s for s in publish["steps"] if "gh-action-pypi-publish" in s.get("uses", ""))
    assert upload["with"] == {"packages-dir": "dist/pypi", "attestations": True}


@every_workflow
def test_a_job_that_hangs_is_ended(name: str) -> None:
    assert all(job["timeout-minutes"] <= 60 for job in WORKFLOWS[name]["jobs"].values())


@every_workflow
def test_what_jobs_run_is_there(name: str) -> None:
    for script in re.findall(r"(?:python3|bash) (\S+)", TEXTS[name]):
        assert (ROOT / script).is_file(), script
