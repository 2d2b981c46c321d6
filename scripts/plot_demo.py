#!/usr/bin/env python3
"""Draws what `delta-attention demo --json demo.json` measured: error over T for each kernel, size of the state over T."""

import argparse
import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#333333"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
F32_ROUNDING = 2.0**-24


def choose(cases, recurrence, title):
    """The case that the left panel shows: the asked one, else the last reading (the widest heads) of the recurrence."""
    found = [c for c in cases if c["recurrence"] == recurrence and title in (None, c["title"])]
    if not found:
        known = sorted({f"{c['recurrence']}, {c['title']}" for c in cases})
        sys.exit("plot_demo: no such case; the file has: " + "; ".join(known))
    return found[-1]


def token_axis(case, block, values):
    """The last token of each block."""
    return [min((i + 1) * block, case["tokens"]) for i in range(len(values))]


def tidy(axes, title):
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("token t")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_errors(axes, case, block):
    for i, kernel in enumerate(case["kernels"]):
        errors = kernel["error_f32_by_block"]
        axes.plot(token_axis(case, block, errors), errors, label=f"{kernel['kernel']} ({kernel['device']})",
                  color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], markersize=4, linewidth=1.4)
    axes.axhline(F32_ROUNDING, color="#777777", linewidth=1, linestyle="--", label=r"rounding of one f32 number, $2^{-24}$")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.5, high * 6)  # room for the legend above the curves
    axes.set_ylabel(f"relative error of the output, per {block} tokens")
    axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    tidy(axes, f"Error against float64: {case['recurrence']}, {case['title']}, f32")


def draw_states(axes, cases, block):
    for i, case in enumerate(cases):
        norms = case["state_norm_by_block"]
        keys = "unit-length keys" if case["qk_l2norm"] else "keys as they come"
        axes.plot(token_axis(case, block, norms), norms, label=f"{case['recurrence']} ({keys})", color=COLOURS[i % len(COLOURS)],
                  marker=MARKERS[i % len(MARKERS)], markersize=4, linewidth=1.4)
    axes.set_yscale("log")
    axes.set_ylabel(r"$\|S_t\|_F$, root mean square over heads")
    axes.legend(fontsize=8, frameon=False)
    tidy(axes, f"Size of the state: {cases[0]['title']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", help="what `delta-attention demo --json` wrote")
    parser.add_argument("png", help="the picture to write")
    parser.add_argument("--recurrence", default="kda", help="of the left panel (default: kda)")
    parser.add_argument("--title", help='reading of the left panel, for example "12 heads of 32" (default: the last)')
    options = parser.parse_args()
    try:
        with open(options.json, encoding="utf-8") as file:
            demo = json.load(file)
    except (OSError, ValueError) as error:
        sys.exit(f"plot_demo: {options.json}: {error}")

    case = choose(demo["cases"], options.recurrence, options.title)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), dpi=150, layout="constrained")
    draw_errors(left, case, demo["block"])
    draw_states(right, [c for c in demo["cases"] if c["title"] == case["title"]], demo["block"])
    source = demo["metadata"].get("model", "")
    if source:
        figure.suptitle(f"delta-attention {demo['version']} on attention activations of {source}", fontsize=12)
    figure.savefig(options.png)
    print(f"{options.png} written")


if __name__ == "__main__":
    main()
