#!/usr/bin/env python3
"""Draws what `delta-attention error-growth --json growth.json` measured, one panel a regime: errors over T for every kernel,
with the fitted power laws. Writes PREFIX.svg and PREFIX.png."""

import argparse
import json
import math
import sys

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "delta-attention"  # equal results give equal files
import matplotlib.pyplot as plt  # noqa: E402

# Plain and compensated of one schedule share a marker; compensated kernels are blue.
STYLES = {
    "reference": ("#777777", "", ":"),
    "cpu_chunkwise": ("#009e73", "x", "-"),
    "v1_chunk_pipeline": ("#d55e00", "o", "-"),
    "v2_chunk_pipeline_compensated": ("#0072b2", "o", "-"),
    "v3_on_chip": ("#e69f00", "^", "--"),
    "v4_on_chip_compensated": ("#56b4e9", "^", "--"),
}
QUANTITIES = {"out": "output", "state": "final state", "normalizer": "final normaliser"}
METRICS = {"relative": r"$\|x - y\| / \|y\|$", "max_relative": r"$\max|x - y| / \max|y|$", "max_abs": r"$\max|x - y|$"}


def label_of(row):
    name = row["kernel"]
    if name == "reference":
        return "float64, rounded to storage"
    return f"{name} ({row['how']})"


def curves_of(results, regime, dtype, quantity, metric):
    """kernel -> (label, tokens, errors), in the file's order; points without a number are left out."""
    curves = {}
    for row in results["rows"]:
        if row["regime"] != regime or row["dtype"] != dtype or quantity not in row:
            continue
        label, tokens, errors = curves.setdefault(row["kernel"], (label_of(row), [], []))
        error = row[quantity][metric]
        if error:
            tokens.append(row["tokens"])
            errors.append(error)
    return curves


def exponent(results, regime, dtype, kernel, quantity, metric):
    for fit in results["fits"]:
        if (fit["regime"], fit["dtype"], fit["kernel"], fit["quantity"], fit["metric"]) == (
                regime, dtype, kernel, quantity, metric):
            return fit["power"]["p"] + 0.0
    return math.nan


def draw_panel(axes, results, regime, options):
    curves = curves_of(results, regime["name"], options.dtype, options.quantity, options.metric)
    lines = []
    for kernel, (label, tokens, errors) in curves.items():
        colour, marker, line = STYLES.get(kernel, ("#333333", "s", "-"))
        lines += axes.plot(tokens, errors, label=label, color=colour, marker=marker, linestyle=line, markersize=4,
                           linewidth=1.3)
    pairs = [("V1", "v1_chunk_pipeline", "V2", "v2_chunk_pipeline_compensated"),
             ("V3", "v3_on_chip", "V4", "v4_on_chip_compensated")]
    exponents = []
    for pair in pairs:
        for stage, kernel in zip(pair[::2], pair[1::2]):
            p = exponent(results, regime["name"], options.dtype, kernel, options.quantity, options.metric)
            if not math.isnan(p):
                exponents.append(f"{stage} {round(p, 2) + 0.0:.2f}")
    axes.set_title(f"{regime['name']} ({regime['recurrence']})", loc="left", fontsize=9.5)
    axes.text(0.02, 0.97, r"$T^p$: " + ", ".join(exponents), transform=axes.transAxes, fontsize=7.5, va="top")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return lines


def draw(results, options):
    measured = {row["regime"] for row in results["rows"] if row["dtype"] == options.dtype and options.quantity in row}
    regimes = [regime for regime in results["regimes"] if regime["name"] in measured]
    if not regimes:
        sys.exit(f"plot_error_growth: {options.json} has no errors of '{options.quantity}' in {options.dtype}")
    columns = min(3, len(regimes))
    rows = math.ceil(len(regimes) / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.3 * columns, 2.7 * rows + 0.9), sharex=True, sharey=True,
                                squeeze=False, layout="constrained")
    panels = list(grid.flat)
    for axes, regime in zip(panels, regimes):
        lines = draw_panel(axes, results, regime, options)
    for axes in panels[len(regimes):]:
        axes.set_visible(False)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low, high * 3)  # room for the exponents
    for axes in grid[-1]:
        axes.set_xlabel("tokens T", fontsize=9)
    figure.supylabel(f"error of the {QUANTITIES[options.quantity]}, {METRICS[options.metric]}", fontsize=9)
    context = results["context"]
    machine = context["gpu"] if context["gpu"] != "none" else "CPU emulation"
    figure.suptitle(f"Errors against float64 over the number of tokens: {options.dtype}, K = V = {context['key_dim']}, "
                    f"median of {context['repeats']} draws, {machine}", fontsize=10.5)
    figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", help="what `delta-attention error-growth --json` wrote")
    parser.add_argument("prefix", help="where the pictures go: PREFIX.svg and PREFIX.png")
    parser.add_argument("--quantity", choices=QUANTITIES, default="state", help="(default: state)")
    parser.add_argument("--metric", choices=METRICS, default="relative", help="(default: relative)")
    parser.add_argument("--dtype", choices=["f32", "f16", "bf16"], default="f32", help="(default: f32)")
    options = parser.parse_args()
    try:
        with open(options.json, encoding="utf-8") as file:
            results = json.load(file)
    except (OSError, ValueError) as error:
        sys.exit(f"plot_error_growth: {options.json}: {error}")
    figure = draw(results, options)
    figure.savefig(options.prefix + ".svg", metadata={"Date": None})
    figure.savefig(options.prefix + ".png", dpi=130)
    print(f"{options.prefix}.svg and {options.prefix}.png written")


if __name__ == "__main__":
    main()
