#!/usr/bin/env python3
"""Draws time and memory of softmax and delta attention over T from a bench/results/*/softmax_vs_delta.json and the sdpa.json beside it, if
there is one. Writes PREFIX.svg and PREFIX.png, by default beside the file. What the files do not have is missing in the picture too."""

import argparse
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from plotting import legend_handles, repeatable, save, style_axes
from softmax_tables import contenders, crossover, strongest

# Colour, marker, line by (method, kernel): softmax in warm colours, delta attention in blue and green.
STYLES = {
    ("softmax", "flash_tc"): ("#d55e00", "o", "-"),
    ("softmax", "cudnn"): ("#e69f00", "s", "-"),
    ("softmax", "flash"): ("#cc79a7", "D", "-"),
    ("softmax", "vec_fused"): ("#d55e00", "o", ":"),
    ("softmax", "efficient"): ("#e69f00", "s", ":"),
    ("gated_delta_net", "automatic"): ("#0072b2", "^", "-"),
    ("kda", "automatic"): ("#009e73", "v", "--"),
}


def styled(files, batch, dtype):
    """The contenders that are drawn, in the order of STYLES."""
    found = {(one.method, one.kernel): one for one in contenders(files) if one.batch == batch and one.dtype == dtype}
    return [found[key] for key in STYLES if key in found]


def label_of(one):
    return one.label if one.softmax else one.method


def draw_panel(axes, some, figure):
    """One panel: `figure` ('microseconds' or 'megabytes') over T, a line a contender."""
    for one in some:
        colour, marker, line = STYLES[one.method, one.kernel]
        points = sorted(getattr(one, figure).items())
        axes.plot(*zip(*points), label=label_of(one), color=colour, marker=marker, linestyle=line, markersize=4.5, linewidth=1.5)
    style_axes(axes)


def mark_crossover(axes, some, method="gated_delta_net"):
    """A line where delta attention begins to be faster than every softmax kernel."""
    softmax = [one for one in some if one.softmax]
    delta = [one for one in some if one.method == method]
    first = crossover(delta[0], strongest(softmax)) if softmax and delta else None
    if first:
        axes.axvline(first, color="#999999", linewidth=0.8, linestyle="--")
        note = axes.annotate(f"{method} faster\nfrom {first}", (first, 1), xycoords=("data", "axes fraction"), xytext=(-3, -2),
                             textcoords="offset points", ha="right", va="top", fontsize=7.5, color="#555555")
        note.set_in_layout(False)


def draw(files, dtype):
    found = [one for one in contenders(files) if one.dtype == dtype]
    batches = sorted({one.batch for one in found})
    if not batches:
        sys.exit(f"plot_softmax: no times in {dtype}")
    figure = Figure(figsize=(9, 6.6), layout="constrained")
    grid = figure.subplots(2, len(batches), sharex=True, sharey="row", squeeze=False)
    for column, batch in enumerate(batches):
        some = styled(files, batch, dtype)
        draw_panel(grid[0][column], some, "microseconds")
        mark_crossover(grid[0][column], some)
        draw_panel(grid[1][column], some, "megabytes")
        grid[0][column].set_title(f"B = {batch}", loc="left", fontsize=9.5)
        grid[1][column].set_xlabel("tokens T", fontsize=9)
    lengths = sorted({tokens for one in found for tokens in one.microseconds})
    grid[0][0].set_xticks(lengths[::2], [str(tokens) for tokens in lengths[::2]])
    for axes in grid.flat:
        axes.tick_params(labelsize=8)
    grid[0][0].set_ylabel("time, µs", fontsize=9)
    grid[1][0].set_ylabel("operands and workspace, MB", fontsize=9)
    context = files["softmax_vs_delta"]["context"]
    figure.suptitle(f"{context['gpu']}, {dtype}, causal, 8 heads, D = 128, cold", fontsize=10.5)
    handles = legend_handles(grid)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def read(path):
    files = {"softmax_vs_delta": json.loads(path.read_text())}
    peer = path.with_name("sdpa.json")
    if peer.exists():
        files["sdpa"] = json.loads(peer.read_text())
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="a softmax_vs_delta.json")
    parser.add_argument("prefix", type=Path, nargs="?", help="where the pictures go (default: beside the file)")
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16", help="(default: bf16)")
    options = parser.parse_args()
    repeatable()
    try:
        figure = draw(read(options.json), options.dtype)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"plot_softmax: {options.json}: {error!r}")
    prefix = options.prefix or options.json.with_suffix("")
    save(figure, prefix)


if __name__ == "__main__":
    main()
