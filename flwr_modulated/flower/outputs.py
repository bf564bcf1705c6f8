"""The files that a run of the reference app leaves."""

from __future__ import annotations

import csv
import json
import math
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from logging import INFO, getLogger
from pathlib import Path
from typing import Any, TypeAlias

from .. import __version__
from ..errors import InvalidParameterError
from ..inference import Results
from ..run_status import RECORDS_FILE

__all__ = ["Record", "versions", "write_outputs"]

Record: TypeAlias = dict[str, Any]


def write_outputs(directory: Path, record: Record, results: Results) -> Path:
    """Write summary, coefficients, rounds and a figure, and append the record last.

    Parameters
    ----------
    directory : pathlib.Path
        Of all runs; the record goes to its ``records.jsonl``.
    record : dict
        What the run was and what came out.
    results : Results
        The fit.

    Returns
    -------
    pathlib.Path
        The run's own directory.

    Raises
    ------
    InvalidParameterError
        If the directory cannot be written to.
    """
    folder = directory / f"run-{record['run_id']}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.txt").write_text(f"{results.summary()}\n", encoding="utf-8")
        intervals = results.conf_int()
        _write_table(
            folder / "coefficients.csv",
            [
                {
                    "name": name,
                    "coefficient": results.params[j],
                    "standard_error": results.bse[j],
                    "low": intervals[j, 0],
                    "high": intervals[j, 1],
                    "pvalue": results.pvalues[j],
                    "predicting_coefficient": results.shrunk_params[j],
                }
                for j, name in enumerate(results.names)
            ],
        )
        _write_table(folder / "rounds.csv", record["rounds"])
        _write_tensorboard(folder / "tensorboard", record["rounds"])
        _draw(folder / "diagnostics.png", results)
        with (directory / RECORDS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
    except OSError as error:
        raise InvalidParameterError(
            f"output must be a directory that can be written to on the machine of the SuperLink, "
            f"got {directory} ({type(error).__name__})"
        ) from None
    return folder


def versions() -> dict[str, str]:
    """Versions of what a run depends on, as far as they are installed."""
    found = {"python": platform.python_version(), "flwr-modulated": __version__}
    for name in ("flwr", "numpy", "scipy", "dp-accounting", "opendp", "ray"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    columns = dict.fromkeys(key for row in rows for key in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _write_tensorboard(path: Path, rounds: list[dict[str, Any]]) -> None:
    """Write the metrics of each round for TensorBoard, where it is installed."""
    if find_spec("tensorboard") is None:
        return
    from tensorboard.summary import Writer

    writer = Writer(str(path))
    for metrics in rounds:
        for name, value in metrics.items():
            if name != "round":
                writer.add_scalar(name, value, metrics["round"])
    writer.close()


def _draw(path: Path, results: Results) -> None:
    """Draw the diagnostics, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        getLogger("flwr").log(INFO, "No figure: pip install matplotlib to get %s", path.name)
        return
    from ..diagnostics import plot_diagnostics

    plot_diagnostics(results).savefig(path, dpi=150)


def _plain(value: Any) -> Any:
    """What JSON has words for; numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
