#!/usr/bin/env python3
"""Rewrites the tables of docs/performance.md and README.md from bench/results/*/*.json.

A table stands between the lines `<!-- table:NAME begin -->` and `<!-- table:NAME end -->`.
"""

import json
import re
import sys

from measured import RESULTS, ROOT
from optimisations import OPTIMISATIONS, before_after
from production_tables import production
from softmax_tables import softmax_forward, softmax_vs_delta
from tables import NOTHING, machine_heading, medians, number, spread, table, unique


class Row:
    """One benchmark: its name taken apart, the median of its repetitions and their coefficient of variation."""

    def __init__(self, median, cv):
        name = median["run_name"].removesuffix("/manual_time")
        self.operation, self.recurrence, self.kernel, self.dtype, rest = name.split("/", 4)
        words = rest.split()
        self.shape = dict(word.split(":", 1) for word in words if ":" in word)
        self.variant = words[-1] if ":" not in words[-1] else "wall"
        self.microseconds = median["real_time"]
        self.cv = cv["real_time"]
        self.error = median["relative_error"]
        self.vs_floor = median.get("vs_floor")

    def case(self):
        parts = " ".join(f"{key}={value}" for key, value in self.shape.items() if key not in ("HV", "V", "gate"))
        gate = self.shape.get("gate")
        return (self.recurrence, self.dtype, parts + (f", {gate} gate" if gate else ""))


def read_rows(results):
    return [Row(median, cv) for median, cv in medians(results)]


def per_file(program, section):
    """One section a result file, with the file named where it is malformed."""
    text = ""
    for file in sorted(RESULTS.glob(f"*/{program}.json")):
        try:
            text += section(json.loads(file.read_text()))
        except (KeyError, ValueError, TypeError) as error:
            sys.exit(f"performance_tables: {file} is malformed: {error!r}")
    return text


def matrix(rows, cell, extra=None):
    """Cases down, kernels across. `extra` names a last column computed from a case's cells by kernel."""
    kernels = unique(row.kernel for row in rows)
    by_case = {}
    for row in rows:
        by_case.setdefault(row.case(), {})[row.kernel] = row
    header = ["recurrence", "dtype", "shape", *kernels]
    lines = []
    for case, cells in by_case.items():
        lines.append([*case, *(cell(cells[kernel]) if kernel in cells else "" for kernel in kernels)])
    last = [extra[1](cells) for cells in by_case.values()] if extra else []
    if any(last):
        header.append(extra[0])
        lines = [line + [cell] for line, cell in zip(lines, last)]
    return table(header, lines)


def time_cell(row):
    floor = f" ({number(row.vs_floor)}x)" if row.vs_floor else ""
    return number(row.microseconds) + floor + spread(row.cv)


def error_cell(row):
    return f"{row.error:.1e}"


def gain(kernel, baseline):
    """A last column: how many times faster `kernel` is than `baseline` in the same run."""
    def cell(cells):
        if kernel not in cells or baseline not in cells:
            return ""
        return f"{cells[baseline].microseconds / cells[kernel].microseconds:.1f}x"
    return f"{kernel} against {baseline}", cell


CPU_GAIN = gain("cpu_chunkwise", "cpu_sequential")
GPU_GAIN = gain("v3_on_chip", "step_loop")

STAGES = {
    "step_loop": "step_loop",
    "chunked_baseline": "chunked_baseline",
    "V1": "v1_chunk_pipeline",
    "V2": "v2_chunk_pipeline_compensated",
    "V3": "v3_on_chip",
    "V4": "v4_on_chip_compensated",
}
STAGED_RECURRENCES = ("gated_delta_net", "kda")
# (numerator, denominator), and what their quotient says.
RATIOS = {
    ("V1", "V3"): "how many times faster the state on chip is than the chunk pipeline",
    ("step_loop", "V3"): "how many times faster than a launch a token",
    ("chunked_baseline", "V3"): "how many times faster than launches for every chunk",
    ("V2", "V1"): "what compensation costs in the chunk pipeline",
    ("V4", "V3"): "what compensation costs with the state on chip",
}
# What V3 is held to at T = 2048, H = 8, K = V = 128: figure, batch, bound, and whether a time (at most) or a ratio (at least).
TARGETS = [
    ("V3, µs", 1, 386.0, "at most"),
    ("V1 / V3", 1, 1.2, "at least"),
    ("step_loop / V3", 1, 2.4, "at least"),
    ("step_loop / V3", 16, 1.9, "at least"),
]


class Staged:
    """Times of the staged kernels in f32 under strong gates from 512 tokens on, by (stage, recurrence, variant, K, B, T)."""

    def __init__(self, rows):
        names = {kernel: stage for stage, kernel in STAGES.items()}
        self.times = {}
        for row in rows:
            shape = row.shape
            regular = shape.get("gate") == "strong" and shape["N"] == shape["B"] and shape["H"] == "8" and int(shape["T"]) >= 512
            if row.kernel in names and row.recurrence in STAGED_RECURRENCES and row.dtype == "f32" and regular:
                size = tuple(int(shape[name]) for name in ("K", "B", "T"))
                self.times[(names[row.kernel], row.recurrence, row.variant, *size)] = row.microseconds

    def values(self, part):
        """All values of one part of the key: 1 recurrences, 3 K, 4 B, 5 T."""
        return sorted({key[part] for key in self.times})

    def figure(self, text, *case):
        """'V3, µs' or 'V1 / V3' of a (recurrence, variant, K, B, T); None if one of them was not measured."""
        stages = text.removesuffix(", µs").split(" / ")
        times = [self.times.get((stage, *case)) for stage in stages]
        if None in times:
            return None
        return times[0] / times[1] if len(times) == 2 else times[0]


def ratio_table(staged, ratio, variant):
    lengths = staged.values(5)
    lines = []
    for recurrence in staged.values(1):
        for dim in reversed(staged.values(3)):
            for batch in staged.values(4):
                figures = [staged.figure(ratio, recurrence, variant, dim, batch, tokens) for tokens in lengths]
                if any(figures):
                    lines.append([recurrence, str(dim), str(batch), *(f"{f:.2f}" if f else "" for f in figures)])
    return table(["recurrence", "K", "B", *(f"T={tokens}" for tokens in lengths)], lines) if lines else ""


def target_table(staged):
    lines = []
    for figure, batch, bound, sense in TARGETS:
        for recurrence in staged.values(1):
            cells, met = [], []
            for variant in ("cold", "graph"):
                value = staged.figure(figure, recurrence, variant, 128, batch, 2048)
                cells.append("not measured" if value is None else number(value))
                if value is not None and (value <= bound if sense == "at most" else value >= bound):
                    met.append(variant)
            verdict = {0: "no", 1: f"{''.join(met)} only", 2: "yes"}[len(met)] if "not measured" not in cells else ""
            lines.append([figure, recurrence, str(batch), f"{sense} {bound:g}", *cells, verdict])
    return table(["figure", "recurrence", "B", "target", "cold", "graph", "met"], lines)


def staged_section(results):
    staged = Staged(read_rows(results))
    if not staged.times:
        return ""
    text = machine_heading(results["context"]) + "Targets of V3 at T=2048, H=8, K=V=128, f32:\n\n" + target_table(staged)
    for (slow, fast), meaning in RATIOS.items():
        quotients = ratio_table(staged, f"{slow} / {fast}", "cold")
        if quotients:
            text += f"{slow} / {fast}, {meaning} (cold):\n\n" + quotients
    return text


def staged():
    return per_file("delta_forward", staged_section) or NOTHING


def delta_forward_section(results):
    rows = read_rows(results)
    text = machine_heading(results["context"])
    wall = [row for row in rows if row.variant == "wall"]
    if wall:
        text += "CPU, wall time in µs:\n\n" + matrix(wall, time_cell, CPU_GAIN)
    cold = [row for row in rows if row.variant == "cold"]
    graph = [row for row in rows if row.variant == "graph"]
    if cold:
        text += "GPU, cold, µs (times the memory floor):\n\n" + matrix(cold, time_cell, GPU_GAIN)
    if graph:
        text += "GPU, graph replay, µs:\n\n" + matrix(graph, time_cell)
    return text + "Relative error of the output against float64:\n\n" + matrix(wall + cold, error_cell)


def delta_forward():
    return per_file("delta_forward", delta_forward_section) or NOTHING


def readme_shape(row):
    shape = row.shape
    usual = shape["T"] == "2048" and shape["K"] == "128" and shape["B"] in ("1", "16") and shape.get("gate") == "strong"
    return usual and row.dtype == "f32" and row.recurrence in ("kda", "gated_delta_net")


def readme():
    text = ""
    for file in sorted(RESULTS.glob("*/delta_forward.json")):
        results = json.loads(file.read_text())
        rows = [row for row in read_rows(results) if readme_shape(row)]
        for variant, extra in {"cold": GPU_GAIN, "wall": CPU_GAIN}.items():
            chosen = [row for row in rows if row.variant == variant]
            if chosen:
                machine = results["context"]["gpu" if variant == "cold" else "cpu"]
                text += f"{machine}, µs:\n\n" + matrix(chosen, lambda row: number(row.microseconds), extra)
    return text or NOTHING


def sanitizer_cell(result):
    if not result["ran"]:
        return "not run: " + result["reason"]
    return f"{result['errors']} errors, {result['tests']} tests"


def suite():
    rows, tools = [], []
    suites = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*/suite.json"))]
    for result in suites:
        tools = unique(tools + list(result["sanitizers"]))
    for result in suites:
        tests = result["tests"]
        counts = "{passed} passed, {failed} failed, {skipped} skipped".format(**tests)
        cells = [sanitizer_cell(result["sanitizers"][tool]) if tool in result["sanitizers"] else "" for tool in tools]
        rows.append([result["gpu"], result["date"][:10], f"`{result['commit'][:12]}`", counts, *cells])
    return table(["GPU", "date", "commit", "tests", *tools], rows) if rows else NOTHING


# What the profiler says of both variants of a pair, beside the figure that the pair is about.
PROFILE_COLUMNS = [("time, µs", "time_us"), ("registers", "registers"), ("local accesses", "local_instructions"),
                   ("occupancy, %", "occupancy_percent"), ("bank conflicts, %", "bank_conflict_percent"),
                   ("IPC", "instructions_per_cycle"), ("stalls at atomics, %", "atomic_stall_percent"),
                   ("sectors a load", "sectors_per_load")]


def before_after_cell(pair, results, figure):
    return " → ".join("?" if value is None else number(value) for value in before_after(pair, results, figure))


def profile_heading(results):
    context, problem = results["context"], results["problem"]
    size = " ".join(f"{name}={value}" for name, value in problem.items() if name not in ("recurrence", "dtype"))
    return (f"**{context['gpu']}, driver {context['driver']}.** Commit `{context['commit']}`, {context['date'][:10]}; "
            f"{problem['recurrence']}, {problem['dtype']}, {size}.\n\n")


def profile_section(results):
    """Every launch of every variant, the longest first, and what its warps waited for most."""
    rows = []
    for variant in results["variants"]:
        figures = variant.get("figures", {})
        launches = [(figures.get("function", ""), figures), *figures.get("functions", {}).items()]
        for name, f in sorted({name: f for name, f in launches if f}.items(), key=lambda item: -item[1]["time_us"]):
            stalls = sorted(f["stall_percent"].items(), key=lambda item: -item[1])[:4]
            rows.append([f"`{variant['kernel']}`", f"`{name.split('(')[0].split('<')[0].split()[-1]}`", number(f["time_us"]),
                         number(f["blocks"]), number(f["occupancy_percent"]), number(f["instructions_per_cycle"]),
                         number(f["dram_percent"]), number(f["l2_bytes"] / 1e6),
                         ", ".join(f"{reason} {share:.0f} %" for reason, share in stalls)])
    return profile_heading(results) + table(["kernel", "launch", "time, µs", "blocks", "occupancy, %", "IPC", "memory bandwidth, %",
                                             "L2, MB", "warps wait for"], rows)


def profile():
    return per_file("profile", profile_section) or NOTHING


def optimisations_section(results):
    rows = []
    for pair in OPTIMISATIONS:
        cells = [before_after_cell(pair, results, figure) for _, figure in PROFILE_COLUMNS]
        rows.append([pair["name"], pair["what"], pair["article"],
                     *(f"**{cell}**" if figure == pair["figure"] else cell
                       for cell, (_, figure) in zip(cells, PROFILE_COLUMNS))])
    return profile_heading(results) + table(["", "change", "article", *(title for title, _ in PROFILE_COLUMNS)], rows)


def optimisations():
    return per_file("optimisations", optimisations_section) or NOTHING


def replace(document, name, content):
    text = document.read_text()
    pattern = re.compile(rf"(<!-- table:{name} begin -->\n).*?(<!-- table:{name} end -->)", re.DOTALL)
    if not pattern.search(text):
        sys.exit(f"performance_tables: {document} has no markers for the table '{name}'")
    document.write_text(pattern.sub(lambda match: f"{match[1]}\n{content.rstrip()}\n\n{match[2]}", text))


def main():
    performance = ROOT / "docs" / "performance.md"
    replace(performance, "delta_forward", delta_forward())
    replace(performance, "production", production(RESULTS))
    replace(performance, "staged", staged())
    replace(performance, "softmax_forward", softmax_forward(RESULTS))
    replace(performance, "softmax_vs_delta", softmax_vs_delta(RESULTS))
    replace(performance, "suite", suite())
    replace(performance, "optimisations", optimisations())
    replace(performance, "profile", profile())
    replace(ROOT / "README.md", "readme", readme())
    replace(ROOT / "README.md", "readme_peer", production(RESULTS, brief=True))


if __name__ == "__main__":
    main()
