#!/usr/bin/env python3
"""Draws the times of the staged kernels over T from a bench/results/*/delta_forward.json. Writes PREFIX.svg and PREFIX.png, by default beside
the file. A kernel that the file does not have is missing in the picture too."""

import argparse
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from performance_tables import STAGES, Staged, read_rows
from plotting import legend_handles, repeatable, save, style_axes

# Colour, marker, line. Baselines are grey; plain and compensated of one schedule share a marker, compensated kernels are blue.
STYLES = {
    "step_loop": ("#777777", "s", ":"),
    "chunked_baseline": ("#333333", "D", ":"),
    "V1": ("#d55e00", "o", "-"),
    "V2": ("#0072b2", "o", "-"),
    "V3": ("#e69f00", "^", "--"),
    "V4": ("#56b4e9", "^", "--"),
}
BATCHES = (1, 16)


def draw_times(axes, staged, recurrence, variant, dim, batch):
    """One panel: a line a stage, time over T."""
    for stage, (colour, marker, line) in STYLES.items():
        points = [(tokens, staged.figure(stage, recurrence, variant, dim, batch, tokens)) for tokens in staged.values(5)]
        points = [(tokens, time) for tokens, time in points if time is not None]
        if points:
            label = stage if stage == STAGES[stage] else f"{stage} ({STAGES[stage][3:]})"
            axes.plot(*zip(*points), label=label, color=colour, marker=marker, linestyle=line, markersize=5, linewidth=1.5)
    axes.set_title(f"{recurrence}, B = {batch}", loc="left", fontsize=9.5)
    style_axes(axes)


def draw(results, variant, dim):
    staged = Staged([row for row in read_rows(results) if row.variant == variant])
    if not staged.times:
        sys.exit(f"plot_performance: no times of staged kernels ('{variant}')")
    recurrences = staged.values(1)
    figure = Figure(figsize=(9, 2.9 * len(recurrences) + 0.9), layout="constrained")
    grid = figure.subplots(len(recurrences), len(BATCHES), sharex=True, sharey=True, squeeze=False)
    for row, recurrence in zip(grid, recurrences):
        for axes, batch in zip(row, BATCHES):
            draw_times(axes, staged, recurrence, variant, dim, batch)
    lengths = staged.values(5)
    grid[0][0].set_xticks(lengths, [str(tokens) for tokens in lengths])
    for axes in grid[-1]:
        axes.set_xlabel("tokens T", fontsize=9)
    figure.supylabel("time, µs", fontsize=9)
    context = results["context"]
    figure.suptitle(f"{context['gpu']}, f32, 8 heads, K = V = {dim}, {variant}", fontsize=10.5)
    handles = legend_handles(grid)
    ordered = sorted(handles, key=lambda label: list(STYLES).index(label.split(" (")[0]))
    figure.legend([handles[label] for label in ordered], ordered, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="a delta_forward.json")
    parser.add_argument("prefix", type=Path, nargs="?", help="where the pictures go (default: beside the file)")
    parser.add_argument("--variant", choices=["cold", "graph"], default="cold", help="(default: cold)")
    parser.add_argument("--dim", type=int, default=128, help="K and V (default: 128)")
    options = parser.parse_args()
    repeatable()
    try:
        figure = draw(json.loads(options.json.read_text()), options.variant, options.dim)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"plot_performance: {options.json}: {error!r}")
    prefix = options.prefix or options.json.with_suffix("")
    save(figure, prefix)


if __name__ == "__main__":
    main()
