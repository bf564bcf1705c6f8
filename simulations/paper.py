"""What the paper prints (arXiv:2605.07233), to be shown beside what runs here give."""

from __future__ import annotations

# Table 1: rows, features, R² of least squares.
TABLE_1 = {
    "co2": (2284, 7, 0.999),
    "fair": (6366, 8, 0.853),
    "modechoice": (840, 7, 0.967),
    "randhie_lncoins": (20190, 9, 0.406),
    "randhie_fmde": (20190, 9, 0.389),
}

# Table 2: iterative step c, one-shot penalty γ, DP-SGD clip C and step. Also in conf/task/.
TABLE_2 = {
    "co2": (0.80, 2.00, 2.249, 0.05),
    "fair": (0.80, 1.00, 2.059, 0.10),
    "modechoice": (1.00, 0.50, 1.816, 0.05),
    "randhie_lncoins": (0.80, 0.50, 2.270, 0.10),
    "randhie_fmde": (0.50, 0.50, 2.256, 0.10),
}
