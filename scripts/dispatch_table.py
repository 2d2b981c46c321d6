#!/usr/bin/env python3
"""Writes the table that `automatic` dispatch goes by: how fast each kernel was on the problems of bench/delta_forward.

Reads bench/results/<gpu>/delta_forward.json and writes src/api/tuned/<gpu>_kernels.inc, the cold times. The same results give the same
file; --check compares instead of writing. Says which kernel is the fastest how often, those that run by name only included.
"""

import argparse
import collections
import json
import sys

from measured import RESULTS, ROOT, slug
from tables import medians, number

TABLES = ROOT / "src" / "api" / "tuned"
# Compute capability, 10 * major + minor.
CAPABILITIES = {"NVIDIA H200": 90}
# Update and gate of the recurrences that the benchmark runs.
RECURRENCES = {"linear": ("additive", "none"), "retention": ("additive", "scalar"), "gla": ("additive", "channel"),
               "delta_net": ("delta", "none"), "gated_delta_net": ("delta", "scalar"), "kda": ("delta", "channel")}


def problem_of(recurrence, dtype, shape):
    """What the columns of a row say of a problem: (dtype, update, gate, K, V, tokens of a sequence, sequences times value heads)."""
    update, gate = RECURRENCES[recurrence]
    sequences = int(shape["N"])
    tokens = int(shape["B"]) * int(shape["T"]) // sequences
    return dtype, update, gate, int(shape["K"]), int(shape["V"]), tokens, sequences * int(shape["HV"])


def measured_times(results):
    """{problem: {kernel: microseconds}} of cold calls. How strongly gates decay is no part of a problem: what was measured first counts."""
    problems = {}
    for median, _ in medians(results):
        name = median["run_name"].removesuffix("/manual_time")
        _, recurrence, kernel, dtype, words = name.split("/", 4)
        if not words.endswith(" cold"):
            continue
        shape = dict(word.split(":", 1) for word in words.split()[:-1])
        times = problems.setdefault(problem_of(recurrence, dtype, shape), {})
        times.setdefault(kernel, median["real_time"])
    return problems


def row(gpu, problem, times):
    dtype, update, gate, key_dim, value_dim, tokens, chains = problem
    fastest_first = sorted(times.items(), key=lambda item: item[1])
    kernels = ", ".join(f'{{"{kernel}", {number(microseconds)}}}' for kernel, microseconds in fastest_first)
    return (f'{{"{gpu}", {CAPABILITIES[gpu]}, DType::{dtype}, Update::{update}, Gate::{gate}, {key_dim}, {value_dim}, {tokens}, {chains}, '
            f"{{{kernels}}}}},\n")


def table(results):
    gpu = results["context"]["gpu"]
    if gpu not in CAPABILITIES:
        sys.exit(f"dispatch_table: write the compute capability of {gpu} into CAPABILITIES first")
    text = (f"// Cold times of bench/delta_forward on {gpu}, one row a problem (KernelTimesRow, api/kernel_times.h), written by\n"
            "// scripts/dispatch_table.py: GPU, compute capability, dtype, update, gate, K, V, tokens, sequences times value heads, us.\n")
    return text + "".join(row(gpu, problem, times) for problem, times in measured_times(results).items())


def winners(results):
    """'v5_chunkwise 71, v1_chunk_pipeline 2'."""
    count = collections.Counter(min(times, key=times.get) for times in measured_times(results).values())
    return ", ".join(f"{kernel} {times}" for kernel, times in count.most_common())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a file is not what the results give")
    options = parser.parse_args()
    for gpu in CAPABILITIES:
        results = json.loads((RESULTS / slug(gpu) / "delta_forward.json").read_text())
        path = TABLES / f"{slug(gpu).replace('-', '_')}_kernels.inc"
        text = table(results)
        print(f"{path.relative_to(ROOT)}: fastest at so many problems: {winners(results)}")
        if not options.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path.relative_to(ROOT)} is not what the results give; run scripts/dispatch_table.py")


if __name__ == "__main__":
    main()
