"""What the pictures of times over T share."""

import matplotlib


def repeatable():
    """Equal results give equal files."""
    matplotlib.rcParams["svg.hashsalt"] = "delta-attention"


def style_axes(axes):
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_handles(grid):
    """Every label once, with a line."""
    return {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels())}


def save(figure, prefix):
    figure.savefig(f"{prefix}.svg", metadata={"Date": None})
    figure.savefig(f"{prefix}.png", dpi=130)
    print(f"{prefix}.svg and {prefix}.png written")
