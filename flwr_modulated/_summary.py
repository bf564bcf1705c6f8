"""The printed summary of a private fit: plain text, at most 80 columns."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .inference import Results

_WIDTH = 80


@dataclass(frozen=True, slots=True)
class Summary:
    """Text of a summary; ``print`` it, or show it by leaving it last in a notebook cell."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


def render_summary(results: Results, alpha: float) -> Summary:
    """Lay out header, coefficients and remarks."""
    lines = ["Private least squares (moment estimator)".center(_WIDTH).rstrip(), "=" * _WIDTH]
    lines += _header(results)
    lines.append("=" * _WIDTH)
    lines += _table(results, alpha)
    lines.append("=" * _WIDTH)
    lines += _remarks(results)
    return Summary("\n".join(lines))


def _header(results: Results) -> list[str]:
    sample = results.sample
    ratio = results.identification_ratio
    units = f"sandwich over {sample.num_units} {'units' if sample.grouped else 'rows'}"
    reference = f"t({results.df_units:.4g})" if sample.grouped else "normal"
    cells = [
        ("Label:", results.label_name, "Rows released, K:", f"{results.num_samples}"),
        ("Covariance:", units, "Noise scale, s:", f"{results.noise_scale:.4g}"),
        ("Reference:", reference, "Noise of moments, τ:", f"{results.noise_level:.4g}"),
        ("Features:", f"{sample.num_features}", "Smallest eigenvalue:", f"{results.spectrum[0]:.4g}"),
        ("Intercept:", "yes" if results.fit_intercept else "no", "τ / λ_min:", f"{ratio:.3g}"),
    ]
    stated = "not stated" if results.guarantee is None else str(results.guarantee)
    lines = [f"{a:<12} {_cut(b, 28):<28}  {c:<20} {d:>16}" for a, b, c, d in cells]
    return lines + textwrap.wrap(stated, _WIDTH, initial_indent="Guarantee:   ", subsequent_indent=" " * 13)


def _table(results: Results, alpha: float) -> list[str]:
    statistic = "t" if results.sample.grouped else "z"
    tail = [f"[{alpha / 2:.4g}", f"{1 - alpha / 2:.4g}]"]
    heads = ["coef", "std err", statistic, f"P>|{statistic}|", *tail]
    lines = [" " * 20 + "".join(f"{head:>10}" for head in heads), "-" * _WIDTH]
    intervals = results.conf_int(alpha)
    rows = zip(
        results.names, results.params, results.bse, results.tvalues, results.pvalues, intervals, strict=True
    )
    for name, coefficient, error, ratio, pvalue, (low, high) in rows:
        cells = [_number(coefficient), _number(error), _number(ratio, 3), f"{pvalue:.3f}"]
        cells += [_number(low), _number(high)]
        lines.append(f"{_cut(name, 19):<20}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def _remarks(results: Results) -> list[str]:
    lines: list[str] = []
    for caveat in results.caveats:
        lines += textwrap.wrap(caveat, _WIDTH, initial_indent="WARNING: ", subsequent_indent="  ")
    note = (
        "Made from what was released alone, at no further privacy cost. s is in units of the "
        "standardised features, τ and λ_min in their squares."
    )
    return lines + textwrap.wrap(note, _WIDTH)


def _number(value: float, digits: int = 4) -> str:
    """At most nine characters."""
    if not np.isfinite(value):
        return f"{value}"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.{digits}f}" if abs(value) < 1e3 else f"{value:.1f}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
