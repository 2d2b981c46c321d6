#!/usr/bin/env python3
"""scripts/ncu_profile.py on output in the profiler's formats, and as a whole with a stand-in for the profiler."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import ncu_profile

# The raw page: a row of units under the head, numbers with separators, "n/a" where nothing was measured, other text around.
METRICS = {
    "gpu__time_duration.sum": ("ns", "412,160", "2,048"), "launch__registers_per_thread": ("register/thread", "128", "16"),
    "launch__grid_size": ("", "64", "1"), "launch__block_size": ("", "256", "1,024"),
    "launch__shared_mem_per_block_static": ("byte/block", "1,024", "0"),
    "launch__shared_mem_per_block_dynamic": ("byte/block", "65,536", "0"),
    "smsp__inst_executed_op_local_ld.sum": ("inst", "0", "0"), "smsp__inst_executed_op_local_st.sum": ("inst", "0", "0"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "12.50", "50.0"),
    "sm__maximum_warps_per_active_cycle_pct": ("%", "25", "100"),
    "sm__inst_executed.avg.per_cycle_active": ("inst/cycle", "1.60", "0.1"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("", "3,000", "0"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": ("", "700", "0"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("", "10,000", "0"),
    "dram__bytes_read.sum": ("byte", "20,000,000", "0"), "dram__bytes_write.sum": ("byte", "10,000,000", "n/a"),
    "lts__t_bytes.sum": ("byte", "90,000,000", "32"),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "3", "0"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "1", "1"),
}
IDENTITY = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]


def line(cells):
    return ",".join(f'"{c}"' for c in cells)


RAW = "\n".join([
    "==PROF== Connected to process 4711 (delta-attention)",
    line(IDENTITY + list(METRICS)),
    line([""] * len(IDENTITY) + [unit for unit, _, _ in METRICS.values()]),
    line(["0", "4711", "delta-attention", "127.0.0.1", "plan_runs(Params)", "1", "7"] + [v for _, _, v in METRICS.values()]),
    line(["1", "4711", "delta-attention", "127.0.0.1", "on_chip<Policy<1, 2>>(Params)", "1", "7"] +
         [v for _, v, _ in METRICS.values()]),
])

# The source page: a title, a head, an instruction a line. 100 samples, of which 12 + 5 + 20 + 3 belong to the exchange between blocks.
SOURCE = "\n".join([
    '"Kernel Name","on_chip"',
    '"#","Address","Source","Warp Stall Sampling (All Samples)","Warp Stall Sampling (Not-issued Samples)"',
    '"1","7f00","      FFMA R1, R2, R3, R1","40","30"',
    '"2","7f10","      RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R8.64], R1","12","12"',
    '"3","7f20","      MEMBAR.SC.GPU","5","5"',
    '"4","7f30","@P0   LDG.E.STRONG.GPU R4, desc[UR4][R8.64]","0","0"',
    '"5","7f40","      FADD R9, R2, R3","10","10"',
    '"6","7f50","      ISETP.GE.AND P1, PT, R4, R6, PT","20","20"',
    '"7","7f60","      FADD R4, R4, R3","10","10"',
    '"8","7f70","      ATOMG.E.ADD.STRONG.GPU PT, R10, desc[UR4][R8.64], R5","3","3"',
])

FAKE_NCU = """#!/bin/sh
# Stands in for the profiler: refuses one metric, leaves a report, and shows its pages.
case "$*" in
*--import*raw*) cat "$FAKE/raw.csv" ;;
*--import*source*) cat "$FAKE/source.csv" ;;
*lts__t_bytes*) echo "==ERROR== Failed to find metric lts__t_bytes.sum"; exit 1 ;;
*)
  while [ "$1" != --export ]; do shift; done
  : >"$2"
  ;;
esac
"""


class Reading(unittest.TestCase):
    def test_launches(self):
        launches = ncu_profile.parse_launches(RAW)
        self.assertEqual([name for name, _ in launches], ["plan_runs(Params)", "on_chip<Policy<1, 2>>(Params)"])
        self.assertEqual(launches[1][1]["gpu__time_duration.sum"], 412160.0)
        self.assertIsNone(launches[0][1]["dram__bytes_write.sum"])
        self.assertIsNone(launches[1][1][ncu_profile.SECTORS])  # not in the table
        self.assertEqual(ncu_profile.parse_launches("==ERROR== nothing"), [])

    def test_figures_are_those_of_the_function_that_takes_the_time(self):
        figures = ncu_profile.figures_of(ncu_profile.parse_launches(RAW), 1)
        self.assertEqual(figures["function"], "on_chip<Policy<1, 2>>(Params)")
        self.assertAlmostEqual(figures["time_us"], 412.16)
        self.assertEqual(figures["shared_bytes"], 66560)
        self.assertAlmostEqual(figures["bank_conflict_percent"], 37.0)
        self.assertAlmostEqual(figures["occupancy_of_limit_percent"], 50.0)
        self.assertEqual(figures["stall_percent"], {"barrier": 75.0, "long_scoreboard": 25.0})
        self.assertIsNone(figures["dram_per_operand_byte"])  # one launch did not say
        self.assertEqual(list(figures["functions"]), ["plan_runs(Params)", "on_chip<Policy<1, 2>>(Params)"])
        self.assertLess(figures["functions"]["plan_runs(Params)"]["time_us"], figures["time_us"])

    def test_atomic_stalls(self):
        self.assertAlmostEqual(ncu_profile.atomic_stall_percent(SOURCE), 40.0)
        self.assertIsNone(ncu_profile.atomic_stall_percent(""))

    def test_operand_bytes(self):
        size = {"B": 1, "T": 10, "H": 2, "HV": 4, "K": 8, "V": 16}
        tokens = 10 * (2 * 2 * 8 + 2 * 4 * 16)
        self.assertEqual(ncu_profile.operand_bytes("kda", "bf16", size), tokens * 2 + 10 * 4 * 9 * 4 + 4 * 8 * 16 * 4)


class Limits(unittest.TestCase):
    def failed(self, kernel, settings, figures):
        return [c["check"] for c in ncu_profile.check_limits(kernel, settings, figures) if not c["passed"]]

    def test_spills_break_every_kernel(self):
        self.assertEqual(self.failed("step_loop", "", {"local_instructions": 5}), ["local_instructions at most 0"])

    def test_limits_of_what_the_library_chooses_do_not_bind_variants(self):
        figures = {"bank_conflict_percent": 37.0}
        self.assertEqual(self.failed("v3_on_chip", "", figures), ["bank_conflict_percent at most 30.0"])
        self.assertEqual(self.failed("v3_on_chip", "layout=0", figures), [])

    def test_what_was_not_measured_is_not_checked(self):
        self.assertEqual(ncu_profile.check_limits("v3_on_chip", "", {"local_instructions": None}), [])


class WholeScript(unittest.TestCase):
    def run_script(self, with_profiler):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            (path / "raw.csv").write_text(RAW)
            (path / "source.csv").write_text(SOURCE)
            if with_profiler:
                (path / "ncu").write_text(FAKE_NCU)
                (path / "ncu").chmod(0o755)
            command = [sys.executable, str(SCRIPTS / "ncu_profile.py"), "--json", str(path / "out.json"), "program",
                       "v3_on_chip", "v3_on_chip:layout=0,flush=8", "--size", "B=1,T=64"]
            done = subprocess.run(command, capture_output=True, text=True,
                                  env={**os.environ, "FAKE": folder, "PATH": f"{folder}:/usr/bin:/bin"})
            return done, json.loads((path / "out.json").read_text())

    def test_variants_side_by_side(self):
        done, report = self.run_script(with_profiler=True)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)  # 37 % bank conflicts
        self.assertEqual([(v["kernel"], v["settings"]) for v in report["variants"]],
                         [("v3_on_chip", ""), ("v3_on_chip", "layout=0,flush=8")])
        self.assertEqual(report["variants"][0]["figures"]["registers"], 128.0)
        self.assertAlmostEqual(report["variants"][1]["figures"]["atomic_stall_percent"], 40.0)
        self.assertIn("v3_on_chip:layout=0,flush=8", done.stdout)

    def test_skips_with_a_reason(self):
        if os.path.exists("/usr/local/cuda/bin/ncu") or os.path.exists("/opt/nvidia/nsight-compute"):
            self.skipTest("the real profiler is here")
        done, report = self.run_script(with_profiler=False)
        self.assertEqual(done.returncode, ncu_profile.SKIPPED)
        self.assertIn("not found", report["skipped"])


class Tables(unittest.TestCase):
    def test_every_pair_stands_in_the_table(self):
        import performance_tables
        from optimisations import OPTIMISATIONS
        figures = ncu_profile.figures_of(ncu_profile.parse_launches(RAW), 1)
        kernel, _, settings = OPTIMISATIONS[1]["after"].partition(":")
        section = performance_tables.optimisations_section({
            "context": {"gpu": "A GPU", "driver": "1", "commit": "c", "date": "2026-01-01T00:00:00"},
            "problem": {"recurrence": "kda", "dtype": "f32", "T": 64},
            "variants": [{"kernel": kernel, "settings": settings, "figures": figures}]})
        self.assertEqual(section.count("| H"), len(OPTIMISATIONS))
        self.assertIn("**? → 37**", section)

    def test_a_pair_can_be_about_another_function(self):
        from optimisations import before_after
        figures = {"time_us": 9.0, "functions": {"prepare<8>(P)": {"time_us": 2.0}, "on_chip(P)": {"time_us": 9.0}}}
        results = {"variants": [{"kernel": "k", "settings": "a=1", "figures": figures}]}
        pair = {"before": "k:a=1", "after": "k:a=0"}
        self.assertEqual(before_after(pair, results, "time_us"), (9.0, None))
        self.assertEqual(before_after({**pair, "function": "prepare"}, results, "time_us"), (2.0, None))


if __name__ == "__main__":
    unittest.main()
