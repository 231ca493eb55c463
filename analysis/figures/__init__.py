"""Figures of tidy tables and draft trees, for a paper with no further work.

Every function takes a table and ``ax=None``, draws what the table holds, and returns the Axes: those that were passed,
or those of a new figure as wide as a paper's column, in 8-point type. Figures are plain
:class:`matplotlib.figure.Figure` objects: no window opens and no global setting changes. Colours are from Okabe and
Ito's palette, and none of them carries a meaning alone. What a function drew has a name, the ``gid`` of its artist, by
which :func:`find` gives it.
"""

from ddtree.analysis.figures.acceptance import (
    plot_acceptance_by_depth,
    plot_accepted_ranks,
    plot_efficiency,
    plot_lengths,
    plot_tau_by_budget,
)
from ddtree.analysis.figures.calibration import plot_calibration_by_depth, plot_reliability
from ddtree.analysis.figures.decoding import plot_decoding
from ddtree.analysis.figures.memory import plot_memory
from ddtree.analysis.figures.pay import plot_choice_ranks, plot_expected_tau, plot_pay
from ddtree.analysis.figures.precision import plot_precision
from ddtree.analysis.figures.server_logs import plot_positions, plot_running, plot_server_log, plot_tau_over_time
from ddtree.analysis.figures.speed import plot_frontier, plot_latency
from ddtree.analysis.figures.style import find, save
from ddtree.analysis.figures.sweep import draw_sweep, plot_sweep
from ddtree.analysis.figures.times import plot_roofline, plot_times
from ddtree.analysis.figures.trees import draw_tree

__all__ = [
    "draw_sweep",
    "draw_tree",
    "find",
    "plot_acceptance_by_depth",
    "plot_accepted_ranks",
    "plot_calibration_by_depth",
    "plot_choice_ranks",
    "plot_decoding",
    "plot_efficiency",
    "plot_expected_tau",
    "plot_frontier",
    "plot_latency",
    "plot_lengths",
    "plot_memory",
    "plot_pay",
    "plot_positions",
    "plot_precision",
    "plot_reliability",
    "plot_roofline",
    "plot_running",
    "plot_server_log",
    "plot_sweep",
    "plot_tau_by_budget",
    "plot_tau_over_time",
    "plot_times",
    "save",
]
