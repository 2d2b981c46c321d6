#!/usr/bin/env python3
"""Rewrites the tables of docs/numerics.md from bench/results/*/error_growth.json.

A table stands between the lines `<!-- table:NAME begin -->` and `<!-- table:NAME end -->`.
"""

import json

from measured import RESULTS, ROOT
from performance_tables import NOTHING, replace, table, unique

STAGES = {
    "V1": "v1_chunk_pipeline",
    "V2": "v2_chunk_pipeline_compensated",
    "V3": "v3_on_chip",
    "V4": "v4_on_chip_compensated",
}
KERNELS = {"float64, rounded": "reference", "cpu_chunkwise": "cpu_chunkwise", **STAGES}
QUANTITIES = {"out": "output", "state": "state"}
METRICS = {"relative": "relative", "max_abs": "largest"}


class Results:
    """One result file, by (regime, dtype, kernel)."""

    def __init__(self, file):
        contents = json.loads(file.read_text())
        self.context = contents["context"]
        self.regimes = {regime["name"]: regime for regime in contents["regimes"]}
        self.last = {}  # errors at the largest T
        self.how = {}
        for row in contents["rows"]:
            key = (row["regime"], row["dtype"], row["kernel"])
            if row["tokens"] >= self.last.get(key, row)["tokens"]:
                self.last[key] = row
            self.how[row["kernel"]] = row["how"]
        self.fits = {(f["regime"], f["dtype"], f["kernel"], f["quantity"], f["metric"]): f for f in contents["fits"]}
        self.measured = unique(row["regime"] for row in contents["rows"])

    def stages(self, how):
        names = [stage for stage, kernel in STAGES.items() if (self.how.get(kernel) == "emulation") == (how == "emulation")]
        return ", ".join(names)


def heading(results):
    context = results.context
    on_gpu, emulated = results.stages("gpu"), results.stages("emulation")
    machine = context["cpu"] if context["gpu"] == "none" else f"{context['gpu']}, driver {context['driver']}, CUDA {context['cuda']}"
    parts = ([f"kernels: {on_gpu}"] if on_gpu else []) + ([f"emulations: {emulated}"] if emulated else [])
    return (f"**{machine}; {'; '.join(parts)}.** {context['heads']} head of {context['key_dim']} x {context['value_dim']}, median of "
            f"{context['repeats']} draws, seed {context['seed']}. Commit `{context['commit']}`, {context['date'][:10]}.\n\n")


def p_of(fit):
    return f"{round(fit['power']['p'], 2) + 0.0:.2f}" if fit else "-"


def exponents(results):
    """p of err = c T^p in f32, plain / compensated."""
    header = ["regime"]
    columns = []
    for plain, compensated in (("V1", "V2"), ("V3", "V4")):
        for quantity, quantity_name in QUANTITIES.items():
            for metric, metric_name in METRICS.items():
                header.append(f"{plain} / {compensated}, {quantity_name}, {metric_name}")
                columns.append((plain, compensated, quantity, metric))
    rows = []
    for regime in results.measured:
        cells = []
        for plain, compensated, quantity, metric in columns:
            pair = [results.fits.get((regime, "f32", STAGES[stage], quantity, metric)) for stage in (plain, compensated)]
            cells.append(" / ".join(map(p_of, pair)))
        rows.append([regime, *cells])
    return table(header, rows)


def last_errors(results, quantity):
    """Relative errors at the largest T in f32, with what compensation gains."""
    rows = []
    for regime in results.measured:
        found = {name: results.last.get((regime, "f32", kernel)) for name, kernel in KERNELS.items()}
        errors = {name: row[quantity]["relative"] for name, row in found.items() if row}
        if not errors:
            continue
        gains = [f"{errors[plain] / errors[compensated]:.1f}x" if errors.get(compensated) else ""
                 for plain, compensated in (("V1", "V2"), ("V3", "V4"))]
        tokens = next(row["tokens"] for row in found.values() if row)
        rows.append([regime, str(tokens), *(f"{errors[name]:.1e}" if name in errors else "" for name in KERNELS), *gains])
    return table(["regime", "T", *KERNELS, "V1 / V2", "V3 / V4"], rows)


def number(value):
    return f"{value:.1e}" if value is not None else "-"


def laws(results):
    """Both laws for the relative error of the state in f32, of the chunk pipeline's kernels."""
    rows = []
    for regime in results.measured:
        for stage in ("V1", "V2"):
            kernel = STAGES[stage]
            fit = results.fits.get((regime, "f32", kernel, "state", "relative"))
            if not fit:
                continue
            power, logarithm = fit["power"], fit["logarithm"]
            rows.append([regime, stage, f"{number(power['c'])} T^{p_of(fit)}", f"{100 * power['residual']:.0f}%",
                         f"{number(logarithm['a'])} {'-' if logarithm['b'] < 0 else '+'} {number(abs(logarithm['b']))} ln T",
                         f"{100 * logarithm['residual']:.0f}%", fit["better"]])
    return table(["regime", "kernel", "power law", "residual", "logarithm", "residual", "fits better"], rows)


def narrow_outputs(results):
    """Relative errors of 16-bit outputs at the largest T."""
    rows = []
    for regime in results.measured:
        for dtype in ("f16", "bf16"):
            found = [results.last.get((regime, dtype, kernel)) for kernel in KERNELS.values()]
            if any(found):
                rows.append([regime, dtype, *(f"{row['out']['relative']:.3e}" if row else "" for row in found)])
    return table(["regime", "dtype", *KERNELS], rows)


def section(results):
    return (heading(results)
            + "Exponents p of err = c T^p, f32; relative is ||x - y|| / ||y||, largest is max |x - y|:\n\n" + exponents(results)
            + "Relative error of the final state at the largest T, f32:\n\n" + last_errors(results, "state")
            + "Relative error of the output at the largest T, f32:\n\n" + last_errors(results, "out")
            + "Both laws, relative error of the final state, f32 (those of V3 and V4 and of other errors are in the file):\n\n" + laws(results)
            + "Relative error of 16-bit outputs at the largest T:\n\n" + narrow_outputs(results))


def regime_table(all_results):
    regimes = {name: regime for results in all_results for name, regime in results.regimes.items()}
    rows = [[f"`{name}`", f"`{regime['recurrence']}`", regime["description"].replace("|", "\\|")] for name, regime in regimes.items()]
    return table(["regime", "recurrence", "what it is"], rows) if rows else NOTHING


def main():
    all_results = [Results(file) for file in sorted(RESULTS.glob("*/error_growth.json"))]
    document = ROOT / "docs" / "numerics.md"
    replace(document, "regimes", regime_table(all_results))
    replace(document, "error_growth", "".join(map(section, all_results)) or NOTHING)


if __name__ == "__main__":
    main()
