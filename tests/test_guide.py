"""The guide's commands, as they stand in the document, run on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from deployment import BIN, ROOT, environment, free_port
from devices import read_releases

GUIDE = ROOT / "docs" / "deployment.md"


def blocks(path: Path) -> list[str]:
    """Shell commands of a document, without those that install."""
    return re.findall(r"^```bash\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)


def guide(ports: dict[str, str]) -> str:
    script = "set -eu -o pipefail\n" + "\n".join(blocks(GUIDE))
    for port, free in ports.items():
        assert port in script
        script = script.replace(port, free)
    return script


def test_the_guides_commands_are_shell() -> None:
    """The cheap half: blocks are found, and `bash -n` reads them."""
    assert len(blocks(GUIDE)) >= 12
    done = subprocess.run(["bash", "-n"], input=guide({}), text=True, capture_output=True, timeout=10)
    assert done.returncode == 0, done.stderr


@pytest.mark.deployment
@pytest.mark.nightly
def test_the_guide_runs(tmp_path: Path) -> None:
    ports = {port: str(free_port()) for port in ("8443", "9101", "9102", "9103")}
    env = environment(tmp_path / "flwr-home") | {"HOME": str(tmp_path)}
    del env["FLWR_HOME"]
    process = subprocess.Popen(
        ["bash", "-c", guide(ports)], cwd=ROOT, env=env, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=420)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the guide has left running
    folder = tmp_path / "sleep-study"
    logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in folder.rglob("*.log"))
    assert process.returncode == 0, f"{output[-6000:]}\n{logs}"
    first, second = map(json.loads, (folder / "results" / "records.jsonl").read_text().splitlines())
    assert (first["num_nodes"], first["num_rows"]) == (3, 3)
    assert first["iterate_standardised"] == second["iterate_standardised"]
    assert [len(read_releases(folder / f"device{n}" / "ledger.db")) for n in (1, 2, 3)] == [1, 1, 1]
    assert output.count("finished:completed") == 2
    assert "Left: 0 releases" in output


@pytest.mark.parametrize("name", ["app.md", "deployment.md"])
def test_links_inside_the_documents_lead_somewhere(name: str) -> None:
    """Files that exist, and headings that are there."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = ROOT / "docs" / (file or name)
        assert path.is_file(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, target


def test_flwr_and_this_package_are_beside_python() -> None:
    """What the guide calls must be this environment's."""
    for program in ("flwr", "flower-superlink", "flower-supernode", "flwr-modulated"):
        assert (BIN / program).is_file()
