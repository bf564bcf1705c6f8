"""Whether a Flower run has really finished with results: ``flwr run`` exits 0 even on a failed run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InvalidParameterError

__all__ = ["DEFAULT_OUTPUT", "RECORDS_FILE", "RunStatus", "check_run"]

DEFAULT_OUTPUT = "~/flwr-modulated-results"
RECORDS_FILE = "records.jsonl"

_POLL_SECONDS = 1.0
_CLI_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What is known of a run.

    Attributes
    ----------
    run_id : str
        The run.
    status : str
        Flower's word, such as ``"running"`` or ``"finished:completed"``.
    details : str
        Flower's reason of a failure, or empty.
    record : dict or None
        The run's line in ``records.jsonl``.
    needs_record : bool
        Whether a completed run without a record counts as failed.
    """

    run_id: str
    status: str
    details: str
    record: dict[str, Any] | None
    needs_record: bool

    @property
    def exit_code(self) -> int:
        """0: finished with results; 1: failed, stopped, or no results; 3: not finished yet."""
        if not self.status.startswith("finished"):
            return 3
        if self.status != "finished:completed":
            return 1
        return 1 if self.needs_record and self.record is None else 0

    def __str__(self) -> str:
        lines = [f"Run {self.run_id}: {self.status}"]
        if self.details:
            lines.append(f"Reason: {self.details}")
        if self.record is not None:
            lines.append(f"Results of {self.record['num_rows']} rows from {self.record['num_nodes']} nodes")
        elif self.exit_code == 1 and self.status == "finished:completed":
            lines.append(
                "No record of it was found: give --output as in the run config, or --no-record if it is "
                "another app or the SuperLink runs on another machine"
            )
        return "\n".join(lines)


def check_run(
    superlink: str | None,
    run_id: str | None = None,
    *,
    output: str | None = DEFAULT_OUTPUT,
    wait: float = 0.0,
) -> RunStatus:
    """Ask Flower for a run's status, and look for its record.

    Parameters
    ----------
    superlink : str or None
        Name of the SuperLink connection in Flower's configuration; None is its default.
    run_id : str, optional
        The run; default the latest.
    output : str or None, default "~/flwr-modulated-results"
        Directory of the results; None does not look for a record.
    wait : float, default 0.0
        Seconds to wait for the run to finish.

    Returns
    -------
    RunStatus

    Raises
    ------
    InvalidParameterError
        If Flower's command line is missing, cannot reach the SuperLink, or does not
        know the run.
    """
    deadline = time.monotonic() + wait
    while not (run := _ask(superlink, run_id))["status"].startswith("finished"):
        if time.monotonic() >= deadline:
            break
        run_id = run["run-id"]  # the latest of now, not of later
        time.sleep(_POLL_SECONDS)
    details = run.get("status-details", "")
    return RunStatus(
        run_id=run["run-id"],
        status=run["status"],
        details="" if details == "N/A" else details,
        record=None if output is None else _find_record(Path(output).expanduser(), run["run-id"]),
        needs_record=output is not None,
    )


def _ask(superlink: str | None, run_id: str | None) -> dict[str, Any]:
    beside = Path(sys.executable).with_name("flwr")
    flwr = str(beside) if beside.is_file() else shutil.which("flwr")
    if flwr is None:
        raise InvalidParameterError("Flower's command `flwr` must be installed: pip install flwr")
    which = ["--limit", "1"] if run_id is None else ["--run-id", run_id]
    command = [flwr, "list", *([superlink] if superlink else []), *which, "--format", "json"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CLI_TIMEOUT, stdin=subprocess.DEVNULL
        )
        answer = json.loads(done.stdout)
        runs = answer["runs"] if answer.get("success") else []
        problem = " ".join(answer.get("error-message", "there is no run yet").split())
    except (OSError, ValueError, KeyError, AttributeError, subprocess.TimeoutExpired) as error:
        runs, problem = [], f"{type(error).__name__}; try `{' '.join(command[1:])}`"
    if not runs:
        raise InvalidParameterError(f"Flower does not tell the status of the run: {problem}")
    return dict(runs[0])


def _find_record(directory: Path, run_id: str) -> dict[str, Any] | None:
    """The last whole line of the records that is of this run."""
    try:
        lines = (directory / RECORDS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:  # cut short by a stop while it was written
            continue
        if isinstance(record, dict) and record.get("run_id") == run_id:
            return record
    return None
