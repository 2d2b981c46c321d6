"""What the notebooks share: the result files of bench/results, and how kernels are named and drawn."""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from optimisations import OPTIMISATIONS, before_after  # noqa: E402, F401
from performance_tables import STAGES, Staged, read_rows  # noqa: E402, F401
from plot_performance import STYLES, draw_times  # noqa: E402, F401
from plot_softmax import draw_panel, mark_crossover, styled  # noqa: E402, F401
from softmax_tables import contenders, crossover_text, strongest  # noqa: E402, F401

RESULTS = Path(os.environ.get("DELTA_ATTENTION_RESULTS", ROOT / "bench" / "results"))

# What a file must have at the least.
PARTS = {
    "delta_forward": ["context", "benchmarks"],
    "error_growth": ["context", "regimes", "rows", "fits"],
    "optimisations": ["context", "problem", "variants"],
    "sdpa": ["context", "benchmarks"],
    "softmax_vs_delta": ["context", "benchmarks"],
}
KERNEL_STYLES = {
    **{STAGES[stage]: style for stage, style in STYLES.items()},
    "reference": ("#777777", "", ":"),
    "cpu_chunkwise": ("#009e73", "x", "-"),
}
STAGE_OF = {kernel: stage for stage, kernel in STAGES.items()}


def read(file):
    """One result file. A malformed one is an error that names it."""
    try:
        contents = json.loads(file.read_text())
        if not isinstance(contents, dict):
            raise TypeError("not an object")
        missing = [part for part in PARTS[file.stem] if part not in contents]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is malformed: {error}") from error
    if missing:
        raise ValueError(f"{file} is malformed: it has no {', '.join(missing)}")
    return contents


def find(program):
    """File and results of a program: of a GPU where there are any, else of a CPU, else None twice. Says which."""
    files = sorted(RESULTS.glob(f"*/{program}.json"))
    if not files:
        print(f"There is no {program}.json under {RESULTS.name}/ yet.")
        return None, None
    found = [(file, read(file)) for file in files]
    file, contents = next(((f, c) for f, c in found if c["context"]["gpu"] != "none"), found[0])
    context = contents["context"]
    machine = context["gpu"] if context["gpu"] != "none" else context["cpu"]
    print(f"{file.parent.name}/{file.name}: {machine}, commit {context['commit'][:12]}, {context['date'][:10]}")
    return file, contents


def load(program):
    """The results of a program, or None."""
    return find(program)[1]


def load_comparison():
    """softmax_vs_delta and, of the same machine, PyTorch's attention if it was measured; None without the former."""
    file, contents = find("softmax_vs_delta")
    if contents is None:
        return None
    peer = file.with_name("sdpa.json")
    if not peer.exists():
        print("Not measured on this machine: PyTorch's attention.")
        return {"softmax_vs_delta": contents}
    peers = read(peer)
    print(f"{peer.parent.name}/{peer.name}: PyTorch {peers['context']['torch']}, cuDNN {peers['context']['cudnn']}")
    return {"softmax_vs_delta": contents, "sdpa": peers}


def say_what_is_missing(kernels):
    """Names the stages that are not among `kernels`."""
    missing = [stage for stage, kernel in STAGES.items() if kernel not in kernels]
    if missing:
        print(f"Not in this file: {', '.join(missing)}. Pictures and tables below leave them out.")


class Table:
    """Rows under a header, shown as a table by a notebook."""

    def __init__(self, header, rows):
        self.lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
        self.lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]

    def _repr_markdown_(self):
        return "\n".join(self.lines)
