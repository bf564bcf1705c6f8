"""Tables and figures say what the records say."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from flwr_modulated import InvalidDataError
from simulations.comparison import comparison_figure, comparison_sheets
from simulations.insert import insert_tables
from simulations.records import Record, find_records
from simulations.report import BUILDERS, build_report, records_table, report_directory, write_report
from simulations.scaling import predicted_error
from simulations.series import guarantee_caption, select_on_validation
from simulations.sheets import Sheet
from simulations.study_reports import claims

METHODS = ("auto", "iterative", "ridge", "local_dp_fedavg")


def record(method: str = "auto", epsilon: float | None = 1.0, r2: float = 0.5, **changes: object) -> Record:
    found = {
        "kind": "run", "experiment": "", "task": "fair", "method": method, "variant": "", "epsilon": epsilon,
        "delta": 1e-5, "relation": "distance(1)", "unit": "row", "threat_model": "local",
        "accounting": "exact", "alpha": 0.0, "amplitude": 0.0, "frequency": 0.0, "num_directions": 0,
        "num_rounds": 1, "step": None, "penalty": None, "num_clients": 3819, "num_features": 8,
        "num_rows": 6366, "seed": 0, "r2": r2, "r2_validation": r2, "r2_ols": 0.86, "noise_std": 2.0,
        "coefficient_error": 0.01, "reconstruction_error": 1.0, "reconstruction_error_prior": 0.5,
        "seconds": 0.1, **changes,
    }  # fmt: skip
    return {"id": json.dumps(found, sort_keys=True), **found}


def study(margin: float = 0.1) -> list[Record]:
    """Auto ahead of the three others by `margin`, over 2 tasks, 3 epsilons and 3 splits."""
    return [
        record(
            method, epsilon, 0.5 + 0.01 * seed + (margin if method == "auto" else 0.0), task=task, seed=seed
        )
        for task in ("fair", "co2")
        for epsilon in (1.0, 4.0, 32.0)
        for seed in range(3)
        for method in METHODS
    ]


# -- Sheets


def test_a_sheet_in_three_renderings():
    sheet = Sheet("Title", ("name", "value"), (("a", "*1.5"), ("b", "0.5")), "Caption.")
    assert sheet.markdown().splitlines() == [
        "**Title**", "", "| name | value |", "|---|---:|", "| a | **1.5** |", "| b | 0.5 |", "", "Caption."
    ]  # fmt: skip
    assert list(csv.reader(io.StringIO(sheet.csv()))) == [["name", "value"], ["a", "1.5"], ["b", "0.5"]]
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(sheet.rich())
    assert "1.5" in (text := console.export_text())
    assert "*" not in text


def test_comparison_is_of_medians_and_marks_the_best():
    sheets = comparison_sheets(study())
    assert [sheet.header for sheet in sheets] == [("median test R², ε =", "1", "4", "32")] * 2
    assert sheets[0].rows[0] == ("auto", "*0.610", "*0.610", "*0.610")
    assert sheets[0].rows[3] == ("local_dp_fedavg", "0.510", "0.510", "0.510")


def test_runs_of_different_settings_do_not_share_a_median():
    runs = [record("ridge", penalty=0.5, r2=0.1), record("ridge", penalty=2.0, r2=0.9), record("auto")]
    (sheet,) = comparison_sheets(runs)
    assert {row[0]: row[1] for row in sheet.rows} == {
        "auto": "0.500", "ridge penalty=0.5": "0.100", "ridge penalty=2": "*0.900",
    }  # fmt: skip


def test_no_epsilon_without_its_delta_relation_and_accounting():
    caption = guarantee_caption([record(), record("local_dp_fedavg", relation="replace_record(any)")])
    for part in ("1e-05", "distance(1): auto", "replace_record(any): local_dp_fedavg", "exact", "unit row"):
        assert part in caption
    central = guarantee_caption([record("flower_central_server", threat_model="central")])
    assert "the server is trusted" in central
    assert guarantee_caption([record("ols", None)]) == "Not private."


def test_records_table_takes_runs_without_privacy():
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(records_table([record("ols", None, delta=None, accounting=None, relation=None)]))
    assert "Not private." in console.export_text()


def test_figure_has_a_panel_a_task_a_line_a_method_and_the_ols_line():
    figure = comparison_figure(study())
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert len(panels) == 2
    for axis in panels:
        assert len(axis.lines) == len(METHODS) + 1
        assert axis.lines[0].get_ydata().tolist() == pytest.approx([0.61] * 3)


# -- Selection and claims


def test_selection_looks_at_validation_not_at_test():
    worse = record(r2=0.9, r2_validation=0.1, variant="a")
    better = record(r2=0.2, r2_validation=0.3, variant="b")
    other_split = record(seed=1)
    chosen = select_on_validation([worse, better, other_split], lambda found: found["method"])
    assert [found["variant"] for found in chosen] == ["b", ""]


def test_claims_count_cells_and_give_the_smallest_margin():
    rows = {row[0]: row[1:] for row in claims(study()).rows}
    assert rows["auto is at or above every method of the paper"] == (
        "reproduced", "6 of 6 cells; smallest margin +0.100",
    )  # fmt: skip
    rows = {row[0]: row[1:] for row in claims(study(margin=-0.2)).rows}
    assert rows["auto is at or above every method of the paper"] == (
        "not reproduced", "0 of 6 cells; smallest margin -0.200",
    )  # fmt: skip


def test_matched_chooses_the_radius_by_validation_and_keeps_relations_apart():
    runs = [
        record(r2=0.8),
        record(r2=0.9, r2_validation=0.1, relation="replace(1)", variant="replace 1"),
        record(r2=0.4, r2_validation=0.4, relation="replace(2)", variant="replace 2"),
        record(r2=0.3, relation="replace_record(2, label_scale=0.5)", variant="record 2 0.5"),
        record("local_dp_fedavg_tuned", r2=0.6, relation="replace_record(any)"),
    ]
    report = build_report("matched", runs)
    tables = [{row[1]: row[2] for row in sheet.rows} for sheet in report.sheets[:3]]
    assert tables == [
        {"auto": "*0.800", "local_dp_fedavg_tuned": "0.600"},
        {"auto": "0.400", "local_dp_fedavg_tuned": "*0.600"},
        {"auto": "0.300", "local_dp_fedavg_tuned": "*0.600"},
    ]
    assert report.sheets[3].rows == (
        ("replace", "fair", "-0.200"),
        ("replace_record", "fair", "-0.300"),
    )
    assert report.sheets[4].rows[0] == ("replace", "fair", "2")


def test_scaling_predicts_with_equation_5():
    """By hand at Σ = I, b = 0: [S_r² dσ² + σ²‖β‖²d + ‖β‖²(d+1)σ⁴ + S_r² d]/K, no modulation."""
    d, k, s2, beta2, residual = 8, 1000, 4.0, 0.5, 0.5
    by_hand = (residual * d * s2 + s2 * beta2 * d + beta2 * (d + 1) * s2**2 + residual * d) / k
    found = predicted_error(record("ridge", noise_std=2.0, num_clients=k, num_features=d))
    assert found == pytest.approx(by_hand, rel=1e-9)


def test_table_2_selects_on_validation_over_all_epsilons_and_splits():
    runs = [
        record("iterative", epsilon, 0.0, step=step, seed=seed, r2_validation=score)
        for seed in (0, 1)
        for epsilon, step, score in ((1.0, 0.2, 0.9), (1.0, 0.8, 0.5), (4.0, 0.2, 0.2), (4.0, 0.8, 0.7))
    ]
    runs += [record("ridge", 1.0, penalty=2.0), record("ridge", 1.0, penalty=0.5, r2_validation=0.6)]
    row = build_report("table2", runs).sheets[0].rows[0]
    assert row[:3] == ("fair", "0.8 (0.8)", "0.5 (1)")


@pytest.mark.parametrize("name", ["", *BUILDERS])
def test_every_report_writes_its_tables_and_figures(name, tmp_path):
    runs = {
        "matched": [record(), record("local_dp_fedavg_tuned", relation="replace_record(any)"),
                    record(relation="replace(1)"), record(relation="replace_record(1, label_scale=1)")],
        "ablation": [record(epsilon=e, variant=v) for e in (1.0, 4.0) for v in ("plain", "alpha=0.4")],
        "scaling": [record(m, num_clients=k, task="synthetic") for m in ("auto", "ridge") for k in (9, 99)],
        "table2": [record("iterative", step=0.5), record("ridge", penalty=1.0)],
    }.get(name, study())  # fmt: skip
    written = write_report(build_report(name, runs), name or "comparison", tmp_path)
    kinds = {path.suffix for path in written}
    figures = {".png", ".svg"} if name not in ("table1", "table2", "flower") else set()
    assert kinds == {".md", ".csv"} | figures
    assert all(path.stat().st_size > 50 for path in written)


# -- Finding records


def write(path: Path, records: list[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(found) + "\n" for found in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def test_records_are_found_at_any_depth_plain_or_compressed_and_once(tmp_path):
    records = study()
    write(tmp_path / "a" / "records.jsonl", records[:20])
    write(tmp_path / "b" / "c" / "records.jsonl.gz", records[10:])
    found = find_records([tmp_path])
    assert sorted(r["id"] for r in found) == sorted(r["id"] for r in records)


def test_what_is_not_a_record_is_refused_by_file_and_line(tmp_path):
    (tmp_path / "records.jsonl").write_text('{"kind": "run", "id": "1"}\nnonsense\n')
    with pytest.raises(InvalidDataError, match="line 2"):
        find_records([tmp_path])
    with pytest.raises(InvalidDataError, match="no records"):
        find_records([tmp_path / "records.jsonl"][:0])


def test_directory_of_a_mix_is_reported_by_experiment(tmp_path):
    write(tmp_path / "1" / "records.jsonl", study())
    write(tmp_path / "2" / "records.jsonl", [record(experiment="table1", task=t) for t in ("fair", "co2")])
    report_directory([tmp_path], tmp_path / "out", Console(file=io.StringIO()), archive=True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"comparison.md", "comparison.png", "comparison.svg", "comparison-1.csv", "table1.md"} <= names
    assert "0.610" in (tmp_path / "out" / "comparison.md").read_text()
    archived = find_records([tmp_path / "out"])  # which give the same report again
    tables = build_report("", [found for found in archived if not found["experiment"]]).sheets
    assert tables == build_report("", study()).sheets


def test_tables_go_between_their_markers_and_nowhere_else():
    text = "a\n<!-- begin figure1 2 -->\nold\n<!-- end -->\nb\n<!-- begin other 1 -->\nkept\n<!-- end -->\n"
    records = [{**found, "experiment": "figure1"} for found in study()]
    found = insert_tables(text, records)
    assert found == insert_tables(found, records)
    assert found.startswith("a\n")
    assert "old" not in found
    assert "**0.610**" in found
    assert found.endswith("b\n<!-- begin other 1 -->\nkept\n<!-- end -->\n")
    with pytest.raises(InvalidDataError, match="has 3 table"):
        insert_tables(text.replace("figure1 2", "figure1 9"), records)


def test_same_records_same_tables_in_any_order():
    records = study()
    shuffled = [records[i] for i in np.random.default_rng(0).permutation(len(records))]
    assert build_report("figure1", records).sheets == build_report("figure1", shuffled).sheets


def test_command_says_what_is_wrong_without_a_traceback(tmp_path):
    import typer

    from simulations.report import main

    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 1
    assert "no records found" in str(result.exception) + result.output
