#!/usr/bin/env python3
"""Profiles kernels of `delta-attention call` with Nsight Compute's command line and checks the limits of scripts/ncu_limits.py.

  scripts/ncu_profile.py build/apps/delta-attention v1_chunk_pipeline v3_on_chip:flush=1 v3_on_chip:flush=8 --json before_after.json
  scripts/ncu_profile.py build/apps/delta-attention --optimisations     every pair of scripts/optimisations.py, kept in bench/results

A call's launches are profiled with cold caches and the clock left as it is (so under a profiler times are for comparison); what is
shown is the kernel function that takes most of the time. Exit codes: 0 limits hold, 1 one does not, 77 nothing could be profiled.
"""

import argparse
import collections
import csv
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from measured import RESULTS, prebuilt_commit, slug
from ncu_limits import LIMITS
from optimisations import variants as optimisation_variants

SKIPPED = 77
PATIENCE = 240  # seconds for one run of the profiler
MOST_LAUNCHES = 40  # of a call: a launch per token would take minutes, and its launches are all alike

# What is asked of the profiler.
TIME = "gpu__time_duration.sum"
REGISTERS = "launch__registers_per_thread"
BLOCKS, THREADS = "launch__grid_size", "launch__block_size"
SHARED = ["launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic"]
LOCAL = ["smsp__inst_executed_op_local_ld.sum", "smsp__inst_executed_op_local_st.sum"]
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
OCCUPANCY_LIMIT = "sm__maximum_warps_per_active_cycle_pct"
IPC = "sm__inst_executed.avg.per_cycle_active"
CONFLICTS = ["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
             "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum"]
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
DRAM = ["dram__bytes_read.sum", "dram__bytes_write.sum"]
DRAM_PERCENT = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
L2 = "lts__t_bytes.sum"
SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
STALLS = {reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in [
    "barrier", "branch_resolve", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard", "math_pipe_throttle",
    "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected", "short_scoreboard", "sleeping",
    "tex_throttle", "wait"]}
METRICS = [TIME, REGISTERS, BLOCKS, THREADS, *SHARED, *LOCAL, OCCUPANCY, OCCUPANCY_LIMIT, IPC, *CONFLICTS, WAVEFRONTS, *DRAM,
           DRAM_PERCENT, L2, SECTORS, *STALLS.values()]


class Unavailable(Exception):
    """Nothing can be profiled here, and why."""


# ------------------------------------------------------------------------------------------------------- reading tables

def rows_of(text, marker):
    """Tables in the profiler's CSV output: [{column: value}] of every table whose head has the column `marker`. Rows of units, which
    begin with nothing, titles and messages are left out."""
    tables, head = [], None
    for row in csv.reader(text.splitlines()):
        if marker in row:
            head = row
            tables.append([])
        elif head and len(row) == len(head) and row[0].strip():
            tables[-1].append(dict(zip(head, row)))
    return tables


def number(text):
    """A number as the profiler writes it ("1,234.5"); None for what it could not measure."""
    try:
        return float(text.replace(",", ""))
    except (AttributeError, ValueError):
        return None


def parse_launches(text):
    """[(kernel function, {metric: number})], in the order of the launches."""
    return [(row["Kernel Name"], {m: number(row.get(m)) for m in METRICS}) for table in rows_of(text, "Kernel Name")
            for row in table]


# ------------------------------------------------------------------------------------------------------- atomic stalls

SAMPLES = "Warp Stall Sampling (All Samples)"
# Atomics, fences, and accesses that other blocks take part in (acquire, release, volatile).
SYNCHRONIZING = re.compile(r"^(ATOM|ATOMG|RED|REDG|MEMBAR|ERRBAR|CCTL|FENCE|NANOSLEEP)\b|\.STRONG\.(GPU|SYS)")
REGISTER = re.compile(r"\bR(\d+)\b")
WIDTHS = {"64": 2, "128": 4}  # registers of a result
REACH = 48  # instructions after an access in which its result is looked for


def split_instruction(source):
    """opcode and operands, without the predicate."""
    words = re.sub(r"^@!?U?P\w+\s+", "", source.strip()).split(None, 1)
    return (words[0], words[1] if len(words) > 1 else "") if words else ("", "")


def is_synchronizing(instructions):
    """For each instruction: whether it is one of those that talk to other blocks, or the first to wait for the result of one."""
    marked = [bool(SYNCHRONIZING.search(opcode)) for opcode, _ in instructions]
    for at, (opcode, operands) in enumerate(instructions):
        if not SYNCHRONIZING.search(opcode) or opcode.startswith(("ST", "RED", "MEMBAR", "CCTL", "ERRBAR")):
            continue
        if not (result := REGISTER.search(operands)):
            continue
        width = next((n for suffix, n in WIDTHS.items() if suffix in opcode.split(".")), 1)
        results = {int(result[1]) + i for i in range(width)}
        for later in range(at + 1, min(at + REACH, len(instructions))):
            if results & set(map(int, REGISTER.findall(instructions[later][1].partition(",")[2]))):
                marked[later] = True
                break
    return marked


def atomic_stall_percent(text):
    """Share of all warp samples at synchronizing instructions, over the kernels of a source page; None where there is none."""
    samples = atomic = 0.0
    for table in rows_of(text, SAMPLES):
        marked = is_synchronizing([split_instruction(row["Source"]) for row in table])
        for row, mark in zip(table, marked):
            count = number(row[SAMPLES]) or 0.0
            samples += count
            atomic += count if mark else 0.0
    return 100.0 * atomic / samples if samples else None


# -------------------------------------------------------------------------------------------------------------- figures

def total(metrics, names):
    values = [metrics[n] for n in names]
    return None if None in values else sum(values)


def ratio(a, b, scale=1.0):
    return None if a is None or not b else scale * a / b


def mean_metrics(launches):
    """The mean of each metric over launches of one function; None where no launch has it."""
    means = {}
    for metric in METRICS:
        values = [m[metric] for _, m in launches if m[metric] is not None]
        means[metric] = sum(values) / len(values) if values else None
    return means


def function_figures(m):
    """What the report shows of one function, from the means of its metrics."""
    stalls = {reason: m[metric] for reason, metric in STALLS.items() if m[metric]}
    return {
        "time_us": ratio(m[TIME], 1000.0),
        "blocks": m[BLOCKS],
        "threads": m[THREADS],
        "registers": m[REGISTERS],
        "shared_bytes": total(m, SHARED),
        "local_instructions": total(m, LOCAL),
        "occupancy_percent": m[OCCUPANCY],
        "occupancy_limit_percent": m[OCCUPANCY_LIMIT],
        "occupancy_of_limit_percent": ratio(m[OCCUPANCY], m[OCCUPANCY_LIMIT], 100.0),
        "instructions_per_cycle": m[IPC],
        "bank_conflict_percent": ratio(total(m, CONFLICTS), m[WAVEFRONTS], 100.0),
        "sectors_per_load": m[SECTORS],
        "dram_bytes": total(m, DRAM),
        "dram_percent": m[DRAM_PERCENT],
        "l2_bytes": m[L2],
        "stall_percent": {r: ratio(v, sum(stalls.values()), 100.0) for r, v in sorted(stalls.items(), key=lambda s: -s[1])},
    }


def figures_of(launches, operand_bytes):
    """What the report shows of a call: the function that takes most of the time, traffic over all launches, and each of the functions."""
    by_function = collections.defaultdict(list)
    for launch in launches:
        by_function[launch[0]].append(launch)
    function = max(by_function, key=lambda f: sum(m[TIME] or 0.0 for _, m in by_function[f]))
    functions = {name: function_figures(mean_metrics(group)) for name, group in by_function.items()}
    dram = [total(metrics, DRAM) for _, metrics in launches]
    complete = len(launches) < MOST_LAUNCHES and None not in dram
    return {
        "function": function,
        "launches": len(by_function[function]),
        "all_launches": len(launches),
        **functions[function],
        "dram_per_operand_byte": ratio(sum(dram), operand_bytes) if complete else None,
        "functions": functions,
    }


def check_limits(kernel, settings, figures):
    """The limits that apply to a variant; a figure that could not be measured is not checked."""
    checks = []
    for limit in LIMITS:
        value = figures.get(limit["figure"])
        if value is None or not re.search(limit["kernel"], kernel) or (limit.get("chosen") and settings):
            continue
        bound = f"at most {limit['most']}" if "most" in limit else f"at least {limit['least']}"
        passed = value <= limit["most"] if "most" in limit else value >= limit["least"]
        checks.append({"check": f"{limit['figure']} {bound}", "subject": f"{kernel}:{settings}".rstrip(":"), "passed": passed,
                       "found": f"{value:.4g}"})
    return checks


# ------------------------------------------------------------------------------------------------------------ profiling

def find_ncu():
    found = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    for folder in sorted(Path("/opt/nvidia/nsight-compute").glob("*")) if not found else []:
        found = shutil.which("ncu", path=folder)
    if not found:
        raise Unavailable("Nsight Compute (ncu) was not found")
    return found


def run(command):
    """Output of a command, which is ended with all that it started when it takes too long."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                               env={**os.environ, "LC_ALL": "C"}, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise Unavailable(f"the profiler was not done after {PATIENCE} s")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def why_not(done):
    """A line that says why the profiler gave nothing."""
    output = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in output:
        return "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM)"
    errors = [line for line in output.splitlines() if "==ERROR==" in line or line.startswith("delta-attention:")]
    return " ".join((errors or output.splitlines()[-3:] or ["no output"]))[-400:]


def unknown_metrics(output, asked):
    """Metrics that this GPU or this version does not have, by what the profiler says about them."""
    complaints = " ".join(line for line in output.splitlines() if re.search(r"==(ERROR|WARNING)==.*metric", line, re.IGNORECASE))
    return [m for m in asked if m in complaints]


def record(ncu, call, report):
    """Runs the call under the profiler, which leaves a report; gives up metrics that it does not know."""
    metrics = list(METRICS)
    while True:
        done = run([ncu, "--clock-control", "none", "--profile-from-start", "off", "--launch-count", str(MOST_LAUNCHES),
                    "--section", "SourceCounters", "--metrics", ",".join(metrics), "--force-overwrite", "--export", str(report),
                    *call])
        if done.returncode == 0 and report.exists():
            return
        unknown = unknown_metrics(done.stdout + done.stderr, metrics)
        if not unknown:
            raise Unavailable(why_not(done))
        metrics = [m for m in metrics if m not in unknown]


def profile(ncu, call, operand_bytes):
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "call.ncu-rep"
        record(ncu, call, report)
        read = [ncu, "--import", str(report), "--csv"]
        launches = parse_launches(run([*read, "--page", "raw", "--print-units", "base"]).stdout)
        if not launches:
            raise Unavailable("the profiler saw no kernel")
        figures = figures_of(launches, operand_bytes)
        source = run([*read, "--page", "source", "--print-source", "sass"]).stdout
        figures["atomic_stall_percent"] = atomic_stall_percent(source)
        return figures


def operand_bytes(recurrence, dtype, size):
    """Bytes of q, k, v, gates and beta read once, out and final state written once, as `delta-attention call` has them."""
    n, element = size, 4 if dtype == "f32" else 2
    gate = {"gla": n["K"], "kda": n["K"], "linear": 0, "normalized_linear": 0, "delta_net": 0}.get(recurrence, 1)
    tokens = n["B"] * n["T"]
    return (tokens * (2 * n["H"] * n["K"] + 2 * n["HV"] * n["V"]) * element + tokens * n["HV"] * (1 + gate) * 4 +
            n["B"] * n["HV"] * n["K"] * n["V"] * 4)


COLUMNS = [("time us", "time_us", ".1f"), ("regs", "registers", ".0f"), ("local", "local_instructions", ".0f"),
           ("shared", "shared_bytes", ".0f"), ("blocks", "blocks", ".0f"), ("occup%", "occupancy_percent", ".1f"),
           ("IPC", "instructions_per_cycle", ".2f"), ("bank%", "bank_conflict_percent", ".1f"),
           ("atom%", "atomic_stall_percent", ".1f"), ("dram MB", "dram_bytes", ".2f"), ("dram%", "dram_percent", ".1f"),
           ("L2 MB", "l2_bytes", ".1f"), ("sect/ld", "sectors_per_load", ".1f")]


def print_variants(variants):
    print(f"  {'variant':<44}" + "".join(f"{title:>9}" for title, _, _ in COLUMNS) + "  stalls")
    for v in variants:
        name = f"{v['kernel']}:{v['settings']}".rstrip(":")
        if "skipped" in v:
            print(f"  {name:<44} skipped: {v['skipped']}")
            continue
        cells = ""
        for _, key, form in COLUMNS:
            value = v["figures"][key]
            value = value / 1e6 if value is not None and key.endswith("_bytes") and key != "shared_bytes" else value
            cells += f"{'-' if value is None else format(value, form):>9}"
        stalls = ", ".join(f"{r} {p:.0f}%" for r, p in list(v["figures"]["stall_percent"].items())[:4])
        print(f"  {name:<44}{cells}  {stalls}")


SIZES = {"B": 1, "T": 2048, "H": 8, "HV": 0, "K": 128, "V": 128}


def parse_size(text):
    size = dict(SIZES)
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in size:
            raise argparse.ArgumentTypeError(f"unknown size {name}")
        size[name] = int(value)
    size["HV"] = size["HV"] or size["H"]
    return size


def measured_context():
    """What results that are kept say about where they come from."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        gpu, driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().split(", ")
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"ncu_profile: this machine shows no GPU ({error})")
    return {"commit": prebuilt_commit(allow_dirty=False), "gpu": gpu, "driver": driver,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}


def profile_variants(program, texts, problem):
    """[{kernel, settings, figures or skipped}]; raises Unavailable where nothing at all could be profiled."""
    ncu = find_ncu()
    size = {name: problem[name] for name in SIZES}
    options = ["--recurrence", problem["recurrence"], "--dtype", problem["dtype"],
               *(word for name, value in size.items() for word in (f"--{name}", str(value)))]
    variants = []
    for text in texts:
        kernel, _, settings = text.partition(":")
        variant = {"kernel": kernel, "settings": settings}
        variants.append(variant)
        print(f"ncu_profile: {text}", file=sys.stderr)
        call = [str(program), "call", "--device", "cuda", "--repeat", "1", "--kernel", text, *options]
        try:
            variant["figures"] = profile(ncu, call, operand_bytes(problem["recurrence"], problem["dtype"], size))
        except Unavailable as reason:
            variant["skipped"] = str(reason)
    if not any("figures" in v for v in variants):
        raise Unavailable(variants[0]["skipped"])
    return variants


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="the program delta-attention")
    parser.add_argument("variants", nargs="*", metavar="KERNEL[:SETTINGS]", help="for example v3_on_chip:flush=8,layout=1")
    parser.add_argument("--optimisations", action="store_true",
                        help="the variants of scripts/optimisations.py, into bench/results/<gpu>/optimisations.json")
    parser.add_argument("--recurrence", default="gated_delta_net")
    parser.add_argument("--dtype", default="f32", choices=["f32", "f16", "bf16"])
    parser.add_argument("--size", type=parse_size, default=parse_size(""),
                        help="B=,T=,H=,HV=,K=,V= (default: 1, 2048, 8, H, 128, 128)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcome there")
    parser.add_argument("--keep", metavar="NAME",
                        help="also write it to bench/results/<gpu>/NAME.json, with what was measured where (--optimisations does)")
    a = parser.parse_args()
    if bool(a.variants) == a.optimisations:
        parser.error("name variants, or --optimisations")

    problem = {"recurrence": a.recurrence, "dtype": a.dtype, **a.size}
    keep = "optimisations" if a.optimisations else a.keep
    context = measured_context() if keep else {}
    try:
        variants = profile_variants(a.program, a.variants or optimisation_variants(), problem)
    except Unavailable as reason:
        print(f"Profile: skipped: {reason}")
        outcome, status = {"skipped": str(reason)}, SKIPPED
    else:
        checks = [c for v in variants if "figures" in v for c in check_limits(v["kernel"], v["settings"], v["figures"])]
        breaches = [c for c in checks if not c["passed"]]
        print(f"Profile: {' '.join(f'{n}:{v}' for n, v in problem.items())}; {len(checks)} limits, {len(breaches)} do not hold")
        print_variants(variants)
        for c in breaches:
            print(f"  {c['subject']}: {c['check']}: {c['found']}")
        outcome = {"context": context, "problem": problem, "variants": variants, "checks": checks}
        status = 1 if breaches else 0
        if keep:
            path = RESULTS / slug(context["gpu"]) / f"{keep}.json"
            path.write_text(json.dumps(outcome, indent=1) + "\n")
            print(f"ncu_profile: wrote {path}")
    if a.json:
        a.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
