"""The README's code runs, its map names what is there, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulations.engines import run_federation
from simulations.settings import Engine

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"the README no longer says {old}"
    return text.replace(old, new)


@pytest.mark.global_rng
def test_example_runs_with_forty_devices(
    rng: np.random.Generator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what differs between devices is replaced: the row, and where the ledger lies."""
    client, server = blocks("python")[:2]
    rows = rng.standard_normal((40, 3))
    device: dict[str, Any] = {"FOLDER": tmp_path}
    exec(replaced(client, 'Ledger("ledger.db")', 'Ledger(FOLDER / f"{context.node_id}.db")'), device)
    example_fn = device["client_fn"]

    def client_fn(context: Any) -> Any:
        node = int(context.node_config["partition-id"])
        device["load"] = lambda: (rows[node : node + 1], rows[node, :1])
        return example_fn(context)

    app = type(device["app"])(client_fn)
    study: dict[str, Any] = {}
    exec(replaced(server, "min_available_nodes=1000", "min_available_nodes=40"), study)
    run_federation(lambda grid: study["main"](grid, None), app, Engine("inprocess", 40))
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("age", "steps", "sleep"))
    assert re.search(r"\b40\b", printed)


def test_map_names_every_file_of_the_package() -> None:
    (house,) = [block for block in blocks("text") if "flwr_modulated/" in block]
    for folder in ("flwr_modulated", "flwr_modulated/flower", "simulations"):
        for path in (ROOT / folder).glob("*.py"):
            if path.name != "__init__.py":
                assert re.search(rf"\b{path.name}\b", house), (
                    f"{folder}/{path.name} is not on the README's map"
                )
    for name in re.findall(r"\b(\w+\.py)\b", house):
        assert list(ROOT.rglob(name)), f"the README's map names {name}, which is not there"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", README):
        assert (ROOT / target).exists(), f"the README links to {target}, which is not there"


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m (simulations\.\w+)", README))))
def test_modules_of_commands_exist(module: str) -> None:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
