"""The tasks against the shapes and R² known from outside, splits, shares and the file reader."""

from __future__ import annotations

import math
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

from flwr_modulated.datasets import (
    TASKS,
    Task,
    load_task,
    ols_r2,
    partition,
    r2_score,
    read_table,
    split_task,
    synthetic_task,
)
from flwr_modulated.errors import InvalidDataError, InvalidParameterError

# Rows, columns, and the mean and standard deviation over 20 random 60/20/20 splits of the OLS test R²,
# from a separate computation made before this package existed.
KNOWN = {
    "co2": (2284, 7, 0.9986, 0.0001),
    "fair": (6366, 8, 0.8585, 0.006),
    "modechoice": (840, 7, 0.962, 0.003),
    "randhie_lncoins": (20190, 9, 0.414, 0.014),
    "randhie_fmde": (20190, 9, 0.414, 0.011),
}
SENTINEL = 271828.1828


def make_task(features: np.ndarray, labels: np.ndarray) -> Task:
    names = tuple(f"x{j}" for j in range(features.shape[1]))
    return Task("toy", features, labels, names, "y", "a toy")


@pytest.fixture
def toy() -> Task:
    """103 rows whose label is the row number, so that a row can be followed through a split."""
    index = np.arange(103.0)
    return make_task(np.column_stack([index, np.cos(index)]), index)


class TestTasks:
    def test_names(self) -> None:
        assert tuple(KNOWN) == TASKS

    @pytest.mark.parametrize("name", TASKS)
    def test_shape(self, name: str) -> None:
        task = load_task(name)
        n, d, *_ = KNOWN[name]
        assert task.features.shape == (n, d)
        assert task.labels.shape == (n,)
        assert len(task.feature_names) == d
        assert task.label_name not in task.feature_names
        assert task.features.dtype == task.labels.dtype == np.float64

    @pytest.mark.parametrize("name", TASKS)
    def test_r2_over_splits(self, name: str) -> None:
        """Mean OLS R² of 20 splits against the known mean.

        Both means have standard error s/√20 with s the known spread, so their difference has s√(2/20);
        5 of these (two-sided false alarm 6e-7) plus half a unit of the table's last digit. Catches a
        missing harmonic or cubic term of co2, `individual` left in instead of a real column, or a
        label among the features.
        """
        *_, mean, spread = KNOWN[name]
        found = np.mean([ols_r2(split_task(load_task(name), seed)) for seed in range(20)])
        digit = 0.00005 if mean > 0.99 else 0.0005
        assert abs(found - mean) < 5 * spread * math.sqrt(2 / 20) + digit

    @pytest.mark.parametrize("name", TASKS)
    def test_r2_of_a_split_agrees_with_statsmodels(self, name: str) -> None:
        """Standardising and leaving the intercept out must equal OLS with intercept on the raw rows."""
        task = load_task(name)
        order = np.random.default_rng(3).permutation(len(task.labels))
        train, test = order[: len(order) * 3 // 5], order[len(order) * 3 // 5 + len(order) // 5 :]
        fit = sm.OLS(task.labels[train], sm.add_constant(task.features[train])).fit()
        predicted = fit.predict(sm.add_constant(task.features[test], has_constant="add"))
        errors = task.labels[test] - predicted
        assert ols_r2(split_task(task, 3)) == pytest.approx(
            1 - np.mean(errors**2) / np.var(task.labels[test]), abs=1e-9
        )

    def test_co2_columns(self) -> None:
        task = load_task("co2")
        u = np.arange(2284) / 2284
        np.testing.assert_allclose(task.features[:, :3], np.column_stack([u, u**2, u**3]))
        # The first week is 29 March 1958, day 88 of the year; its gauge read 316.1 ppm.
        angle = 2 * math.pi * 88 / 365.25
        waves = [math.sin(angle), math.cos(angle), math.sin(2 * angle), math.cos(2 * angle)]
        np.testing.assert_allclose(task.features[0, 3:], waves)
        assert task.labels[0] == 316.1
        raw = sm.datasets.co2.load_pandas().data["co2"].to_numpy()
        gaps = np.isnan(raw)
        assert gaps.sum() == 59
        np.testing.assert_array_equal(task.labels[~gaps], raw[~gaps])
        alone = 1 + np.flatnonzero(gaps[1:-1] & ~gaps[:-2] & ~gaps[2:])
        assert alone.size > 0
        np.testing.assert_allclose(task.labels[alone], (raw[alone - 1] + raw[alone + 1]) / 2)

    def test_cached_and_read_only(self) -> None:
        task = load_task("fair")
        assert load_task("fair") is task
        for array in (task.features, task.labels):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0

    def test_unknown_name_lists_the_names(self) -> None:
        with pytest.raises(InvalidParameterError, match=r"'co2', 'fair', 'modechoice'.*got 'c02'"):
            load_task("c02")

    def test_missing_statsmodels_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "statsmodels.datasets.fair", None)
        with pytest.raises(ImportError, match=r"pip install 'flwr-modulated\[simulation\]'"):
            load_task.__wrapped__("fair")

    def test_shapes_must_fit(self) -> None:
        with pytest.raises(InvalidDataError, match="labels must have shape"):
            make_task(np.eye(3), np.ones(2))
        with pytest.raises(InvalidDataError, match=r"features must have 1 column\(s\), got 3"):
            Task("toy", np.eye(3), np.ones(3), ("a",), "y", "a toy")


def test_import_is_light() -> None:
    heavy = "{'pandas', 'statsmodels', 'pyarrow', 'flwr'}"
    code = f"import sys, flwr_modulated.datasets; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class TestSplit:
    def test_every_row_once(self, toy: Task) -> None:
        split = split_task(toy, 7)
        parts = (split.train_labels, split.validation_labels, split.test_labels)
        assert [len(part) for part in parts] == [61, 20, 22]
        rows = np.concatenate(parts) * split.label_scale + split.label_centre
        np.testing.assert_allclose(np.sort(rows), np.arange(103), atol=1e-9)
        assert split.num_features == 2
        assert (split.task, split.seed, split.feature_names, split.label_name) == (
            "toy",
            7,
            ("x0", "x1"),
            "y",
        )

    @pytest.mark.parametrize("part", ["train", "validation", "test"])
    def test_features_stay_with_their_label(self, toy: Task, part: str) -> None:
        split = split_task(toy, 7)
        features = getattr(split, f"{part}_features") * split.scale + split.centre
        labels = getattr(split, f"{part}_labels") * split.label_scale + split.label_centre
        np.testing.assert_allclose(features, np.column_stack([labels, np.cos(labels)]), atol=1e-9)

    def test_standardised_on_the_training_rows_only(self, toy: Task) -> None:
        split = split_task(toy, 7)
        for array in (split.train_features, split.train_labels):
            np.testing.assert_allclose(array.mean(axis=0), 0, atol=1e-12)
            np.testing.assert_allclose((array**2).mean(axis=0), 1, atol=1e-12)
        # All rows have mean 51: the training rows of a random split have another.
        assert split.label_centre != pytest.approx(51, abs=1e-3)

    def test_seed_decides(self, toy: Task) -> None:
        one, again, other = split_task(toy, 1), split_task(toy, 1), split_task(toy, 2)
        np.testing.assert_array_equal(one.train_features, again.train_features)
        assert not np.array_equal(one.train_labels, other.train_labels)

    def test_source_untouched_and_result_read_only(self, toy: Task) -> None:
        before = toy.features.copy()
        split = split_task(toy, 0)
        np.testing.assert_array_equal(toy.features, before)
        for array in (split.train_features, split.test_labels, split.centre, split.scale):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0

    def test_constant_column_is_named(self) -> None:
        x = np.column_stack([np.arange(10.0), np.full(10, SENTINEL)])
        with pytest.raises(InvalidDataError, match=r"training split has constant column\(s\) x1") as caught:
            split_task(make_task(x, np.arange(10.0)), 0)
        assert "271828" not in str(caught.value)

    def test_constant_label_is_named(self) -> None:
        with pytest.raises(InvalidDataError, match=r"constant column\(s\) y:"):
            split_task(make_task(np.arange(10.0)[:, None], np.ones(10)), 0)

    def test_too_few_rows(self) -> None:
        with pytest.raises(InvalidDataError, match=r"at least 5 rows.*got 4"):
            split_task(make_task(np.arange(4.0)[:, None], np.arange(4.0)), 0)

    @pytest.mark.parametrize("seed", [-1, 1.5, True, None])
    def test_bad_seed(self, toy: Task, seed: object) -> None:
        with pytest.raises(InvalidParameterError, match="seed must be"):
            split_task(toy, seed)  # type: ignore[arg-type]


class TestR2:
    def test_by_hand(self) -> None:
        # Predictions 1, 2, 3 of labels 1, 2, 6: SSE 9, mean 3, SST 4 + 1 + 9 = 14.
        assert r2_score([[1], [2], [3]], [1, 2, 6], [1]) == pytest.approx(1 - 9 / 14)

    def test_worse_than_the_mean_is_negative(self) -> None:
        assert r2_score([[1], [2]], [1, 2], [-1]) == pytest.approx(1 - (4 + 16) / 0.5)

    @pytest.mark.parametrize("rows", [1, 3])
    def test_equal_labels(self, rows: int) -> None:
        with pytest.raises(InvalidDataError, match="labels must not all be equal") as caught:
            r2_score(np.ones((rows, 2)), np.full(rows, SENTINEL), np.ones(2))
        assert "271828" not in str(caught.value)

    def test_wrong_beta(self) -> None:
        with pytest.raises(InvalidDataError, match=r"beta must have shape \(2,\), got \(3,\)"):
            r2_score(np.eye(2), [1, 2], np.ones(3))

    def test_collinear_columns(self) -> None:
        """Twice the same column must predict like the column alone."""
        x = np.random.default_rng(0).standard_normal((50, 2))
        y = x @ [1.0, 2.0] + np.sin(np.arange(50))
        single = ols_r2(split_task(make_task(x, y), 0))
        double = ols_r2(split_task(make_task(np.column_stack([x, x[:, 0]]), y), 0))
        assert double == pytest.approx(single, abs=1e-9)


class TestPartition:
    @pytest.mark.parametrize(("rows", "parts"), [(1, 1), (10, 3), (7, 7), (1000, 13)])
    def test_shares(self, rows: int, parts: int) -> None:
        shares = [np.arange(rows)[partition(rows, parts, i)] for i in range(parts)]
        np.testing.assert_array_equal(np.concatenate(shares), np.arange(rows))
        sizes = {len(share) for share in shares}
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ((3, 4, 0), r"num_partitions must be in \[1, 3\], got 4; there are 3 rows; use fewer partitions"),
            ((3, 0, 0), "num_partitions must be in"),
            ((0, 1, 0), "num_rows must be in"),
            ((3, 3, 3), r"partition_id must be in \[0, 2\], got 3"),
            ((3, 3, -1), "partition_id must be in"),
        ],
    )
    def test_out_of_range(self, args: tuple[int, int, int], message: str) -> None:
        with pytest.raises(InvalidParameterError, match=message):
            partition(*args)


class TestSynthetic:
    @pytest.mark.parametrize("correlation", [0.0, 0.6, -0.9])
    def test_population(self, correlation: float) -> None:
        """Second moments of (x, y) against their population values, n = 40 000.

        For unit Gaussians the standard error of a mean product with correlation c is √((1 + c²)/n); 6 of
        them for each of the 15 products (false alarm below 3e-8), of which βᵀΣ and 1 pin down R² too.
        Catches a noise variance of 1 − r2² (label variance off by 30 SE) or ρ not applied to the last column.
        """
        n, r2 = 40_000, 0.7
        task, beta = synthetic_task(n, 4, r2=r2, correlation=correlation, rng=np.random.default_rng(11))
        Sigma = np.array([[correlation ** abs(j - k) for k in range(4)] for j in range(4)])
        z = Sigma @ beta
        assert beta @ z == pytest.approx(r2)
        expected = np.block([[Sigma, z[:, None]], [z[None, :], np.ones((1, 1))]])
        joint = np.column_stack([task.features, task.labels])
        difference = joint.T @ joint / n - expected
        assert (np.abs(difference) < 6 * np.sqrt((1 + expected**2) / n)).all()

    def test_no_signal_and_no_noise(self) -> None:
        _, beta = synthetic_task(10, 3, r2=0, rng=np.random.default_rng(0))
        np.testing.assert_array_equal(beta, 0)
        task, beta = synthetic_task(10, 3, r2=1, rng=np.random.default_rng(0))
        np.testing.assert_allclose(task.features @ beta, task.labels)

    def test_stream_decides(self) -> None:
        first, again, other = (synthetic_task(1, 2, rng=np.random.default_rng(seed))[0] for seed in (1, 1, 2))
        np.testing.assert_array_equal(first.features, again.features)
        assert not np.array_equal(first.features, other.features)

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"num_samples": 0}, "num_samples"),
            ({"num_features": 0}, "num_features"),
            ({"r2": 1.1}, "r2"),
            ({"correlation": 1.0}, "correlation"),
            ({"correlation": -1.0}, "correlation"),
        ],
    )
    def test_out_of_range(self, options: dict[str, float], name: str) -> None:
        arguments = {"num_samples": 5, "num_features": 2} | options
        with pytest.raises(InvalidParameterError, match=f"{name} must be"):
            synthetic_task(**arguments, rng=np.random.default_rng(0))  # type: ignore[arg-type]


def write(folder: Path, text: str, name: str = "own.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


class TestReadTable:
    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_one_row(self, tmp_path: Path, ending: str) -> None:
        frame = pd.DataFrame({"age": [50], "y": [2.5], "smoker": [True], "id": ["p-1"]})
        path = tmp_path / f"own.{ending}"
        if ending == "csv":
            frame.to_csv(path, index=False)
        else:
            frame.to_parquet(path)
        features, labels, names = read_table(path, label="y", features=["smoker", "age"])
        assert names == ("smoker", "age")
        np.testing.assert_array_equal(features, [[1.0, 50.0]])
        np.testing.assert_array_equal(labels, [2.5])
        assert features.dtype == labels.dtype == np.float64

    def test_all_other_columns_in_file_order(self, tmp_path: Path) -> None:
        path = write(tmp_path, "b, y, a\n1, 2, 3\n4, 5, 6\n")
        features, labels, names = read_table(str(path), label="y")
        assert names == ("b", "a")
        np.testing.assert_array_equal(features, [[1, 3], [4, 6]])
        np.testing.assert_array_equal(labels, [2, 5])

    def test_constants_by_order(self, tmp_path: Path) -> None:
        path = write(tmp_path, "a,b,y\n1,20,300\n")
        features, labels, _ = read_table(path, label="y", features=["b", "a"], centre=[10, 0], scale=[5, 4])
        np.testing.assert_array_equal(features, [[2.0, 0.25]])
        np.testing.assert_array_equal(labels, [300])

    def test_constants_by_name(self, tmp_path: Path) -> None:
        path = write(tmp_path, "a,b,y\n1,20,300\n")
        centre, scale = {"a": 0.0, "b": 10.0, "y": 100.0}, {"y": 50.0, "b": 5.0, "a": 4.0}
        features, labels, _ = read_table(path, label="y", centre=centre, scale=scale)
        np.testing.assert_array_equal(features, [[0.25, 2.0]])
        np.testing.assert_array_equal(labels, [4.0])

    def test_same_constants_as_a_split(self, tmp_path: Path) -> None:
        """A device that is given a split's constants makes the split's rows."""
        task = load_task("fair")
        split = split_task(task, 0)
        frame = pd.DataFrame(task.features, columns=list(task.feature_names)).assign(yrs_married=task.labels)
        frame.iloc[:3].to_csv(tmp_path / "own.csv", index=False)
        features, _, names = read_table(
            tmp_path / "own.csv", label="yrs_married", centre=split.centre, scale=split.scale
        )
        assert names == task.feature_names
        np.testing.assert_allclose(features, (task.features[:3] - split.centre) / split.scale, rtol=1e-12)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"centre": [1.0]}, r"centre must hold one finite number for each of the 2 feature\(s\): a, b"),
            ({"centre": 3.0}, "centre must hold"),
            ({"scale": [1.0, math.nan]}, "scale must hold"),
            ({"scale": ["x", "y"]}, "scale must hold"),
            ({"scale": [1.0, 0.0]}, r"scale must be in \(0, ∞\)"),
            ({"scale": {"a": 1.0, "b": 1.0, "y": -1.0}}, r"scale must be in \(0, ∞\)"),
            ({"centre": {"a": 1.0, "c": 1.0}}, "centre must name.*unknown: c; missing: b"),
        ],
    )
    def test_bad_constants(self, tmp_path: Path, options: dict[str, object], message: str) -> None:
        path = write(tmp_path, "a,b,y\n1,2,3\n")
        with pytest.raises(InvalidParameterError, match=message):
            read_table(path, label="y", **options)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"label": "z"}, "label must be columns.*no z; available: a, b, y"),
            ({"label": "y", "features": ["a", "c", "d"]}, "features must be.*no c, d; available: a, b, y"),
            ({"label": "y", "features": ["a", "y"]}, "must all be different columns"),
            ({"label": "y", "features": ["a", "a"]}, "must all be different columns"),
            ({"label": "y", "features": []}, "features must name at least one"),
            ({"label": "y", "features": "ab"}, "features must be a sequence.*got str"),
        ],
    )
    def test_bad_columns(self, tmp_path: Path, options: dict[str, object], message: str) -> None:
        path = write(tmp_path, "a,b,y\n1,2,3\n")
        with pytest.raises(InvalidParameterError, match=message):
            read_table(path, **options)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["own.csv", "own.parquet"])
    def test_missing_file(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(InvalidParameterError, match="path must be an existing file") as caught:
            read_table(tmp_path / name, label="y")
        assert str(tmp_path) not in str(caught.value)

    def test_unknown_ending(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidParameterError, match=r"path must end in \.csv or \.parquet"):
            read_table(write(tmp_path, "a,y\n1,2\n", "own.txt"), label="y")

    @pytest.mark.parametrize("module", ["pandas", "pyarrow"])
    def test_missing_module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
        path = write(tmp_path, "", "own.parquet")
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=rf"needs {module}.*flwr-modulated\[simulation\]"):
            read_table(path, label="y")

    def test_repeated_names(self, tmp_path: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table([[1.0], [2.0], [3.0]], names=["a", "y", "y"]), tmp_path / "own.parquet")
        with pytest.raises(InvalidDataError, match="no name is repeated"):
            read_table(tmp_path / "own.parquet", label="y", features=["a"])

    def test_saved_index_is_not_taken_for_a_feature(self, tmp_path: Path) -> None:
        path = write(tmp_path, ",a,y\n0,1,2\n")
        with pytest.raises(InvalidParameterError, match="features must be listed"):
            read_table(path, label="y")
        assert read_table(path, label="y", features=["a"])[2] == ("a",)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a,y\n", "at least one row"),
            ("", "could not be read as a table"),
            ("a,y\nSECRET,271828\n", r"column\(s\) a must be numeric"),
            ("a,y\n271828,SECRET\n271828,1\n", r"column\(s\) y must be numeric"),
            ("a,y\n271828,\n", r"column\(s\) y must be finite"),
            ("a,y\ninf,271828\n", r"column\(s\) a must be finite"),
            ("a,y\n1,2\n3,4,271828\n", "could not be read as a table"),
            ("a,y\n1,2,271828\n", "could not be read as a table"),
            ('a,y\n"SECRET,271828\n', "could not be read as a table"),
            # No header, or another separator: the first line is the person's row.
            ("271828,3\n", "does not look like column names"),
            ("SECRET,271828\n", "does not look like column names"),
            ("SECRET;271828\n", "does not look like column names"),
            ("SECRET,,271828\n", "does not look like column names"),
        ],
    )
    def test_bad_files_show_no_value(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises((InvalidDataError, InvalidParameterError), match=message) as caught:
            read_table(write(tmp_path, text), label="y")
        self.check_silent(caught.value)

    @pytest.mark.parametrize("name", ["own.csv", "own.parquet"])
    def test_broken_bytes_show_no_value(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"a,y\n\xff\xfeSECRET,271828\n")
        with pytest.raises(InvalidDataError, match="could not be read as a table") as caught:
            read_table(tmp_path / name, label="y")
        self.check_silent(caught.value)

    @staticmethod
    def check_silent(error: BaseException) -> None:
        """Neither the message nor anything chained to it may quote the file."""
        assert error.__cause__ is None
        assert error.__context__ is None
        shown = "".join(traceback.format_exception_only(error))
        assert "SECRET" not in shown
        assert "271828" not in shown
