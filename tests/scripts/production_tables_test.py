#!/usr/bin/env python3
"""The tables of the calls that served models make, from times made up here."""

import json
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import production_tables

CONTEXT = {"gpu": "A GPU", "driver": "1", "cuda": "1", "cpu": "A CPU", "threads": "1", "commit": "c", "seed": "1",
           "date": "2026-01-01T00:00:00", "memory_bytes_per_second": "1000000000000"}
PEER_CONTEXT = {**CONTEXT, "torch": "2", "triton": "3", "fla": "0.1"}
PLAIN = "B:1 T:2048 H:8 HV:8 K:128 V:128 N:1 gate:strong state:none"
BATCHED = "B:4 T:2048 H:8 HV:8 K:128 V:128 N:4 gate:strong state:none"
GROUPED = "B:1 T:8192 H:2 HV:8 K:128 V:128 N:8 gate:strong lengths:1024x8 state:both"


def entries(name, microseconds, cv=0.01, **counters):
    return [{"run_name": name, "run_type": "aggregate", "aggregate_name": aggregate, "real_time": time, "relative_error": 2e-3,
             "operands": 5e6, "workspace": 0.0, **counters} for aggregate, time in (("median", microseconds), ("cv", cv))]


def ours(words, variant, microseconds, recurrence="kda", kernel="automatic", **counters):
    label = {"label": "fast"} if kernel == "automatic" else {}
    return entries(f"production/{recurrence}/{kernel}/bf16/{words} {variant}/manual_time", microseconds, **label, **counters)


def theirs(words, variant, microseconds, recurrence="kda"):
    return entries(f"fla/{recurrence}/chunk_{recurrence}/bf16/{words} {variant}", microseconds)


def section(*lists, fla=(), peer_context=PEER_CONTEXT, brief=False):
    files = {"production": {"context": CONTEXT, "benchmarks": [entry for some in lists for entry in some]}}
    if fla:
        files["fla"] = {"context": peer_context, "benchmarks": [entry for some in fla for entry in some]}
    return production_tables.section(files, brief)


class Section(unittest.TestCase):
    def test_ours_alone(self):
        text = section(ours(PLAIN, "cold", 40.0, state_relative_error=1e-3), ours(PLAIN, "graph", 30.0))
        self.assertIn("kda, bf16, strong gate, no states, µs:", text)
        self.assertIn("| shape | kernel | cold | graph | floor | error | state error |", text)
        self.assertIn("| T=2048 H=8 | `fast` | 40 | 30 | 5 | 2.0e-03 | 1.0e-03 |", text)
        self.assertNotIn("fla", text)

    def test_beside_the_peer(self):
        text = section(ours(PLAIN, "cold", 40.0), ours(PLAIN, "graph", 30.0),
                       fla=[theirs(PLAIN, "cold", 100.0), theirs(PLAIN, "graph", 75.0)])
        self.assertIn("| T=2048 H=8 | `fast` | 40 | 30 | 100 | 75 | 2.50 | 2.50 | 5 | 2.0e-03 |  | 2.0e-03 |", text)
        self.assertIn("flash-linear-attention 0.1, PyTorch 2, Triton 3", text)

    def test_says_whether_both_were_measured_together(self):
        both = lambda **changes: section(ours(PLAIN, "cold", 40.0), fla=[theirs(PLAIN, "cold", 100.0)],
                                         peer_context={**PEER_CONTEXT, "date": "2026-01-02T00:00:00", **changes})
        self.assertIn("2026-01-02. Same machine and commit as ours.", both())
        self.assertIn("Not the same run as ours: threads `2`, ours `1`, commit `d`, ours `c`.", both(threads="2", commit="d"))

    def test_what_the_peer_lacks_stays_empty(self):
        text = section(ours(PLAIN, "cold", 40.0), ours(BATCHED, "cold", 50.0), fla=[theirs(PLAIN, "cold", 20.0)])
        self.assertIn("| B=4 T=2048 H=8 | `fast` | 50 |  |  |  |  |  | 5 | 2.0e-03 |  |  |", text)
        self.assertIn("| kda, bf16, strong gate, no states | cold | 0 of 1 | 0.50 | 0.50 |", text)

    def test_summary_counts_and_averages(self):
        text = section(ours(PLAIN, "cold", 50.0), ours(BATCHED, "cold", 100.0), ours(GROUPED, "cold", 10.0, "gated_delta_net"),
                       fla=[theirs(PLAIN, "cold", 100.0), theirs(BATCHED, "cold", 50.0), theirs(GROUPED, "cold", 80.0, "gated_delta_net")])
        self.assertIn("| kda, bf16, strong gate, no states | cold | 1 of 2 | 0.50 | 1.00 |", text)
        self.assertIn("| all | cold | 2 of 3 | 0.50 | 2.00 |", text)

    def test_brief_is_the_comparison_alone(self):
        text = section(ours(PLAIN, "cold", 50.0), fla=[theirs(PLAIN, "cold", 100.0)], brief=True)
        self.assertIn("| all | cold | 1 of 1 | 2.00 | 2.00 |", text)
        self.assertNotIn("µs:", text)
        self.assertEqual(section(ours(PLAIN, "cold", 50.0), brief=True), "")

    def test_other_kernels_are_shown_but_not_summed_up(self):
        text = section(ours(PLAIN, "cold", 50.0), ours(PLAIN, "cold", 1.0, kernel="slow"), fla=[theirs(PLAIN, "cold", 100.0)])
        self.assertIn("| T=2048 H=8 | `slow` | 1 |", text)
        self.assertIn("| all | cold | 1 of 1 | 2.00 | 2.00 |", text)

    def test_packed_and_grouped_shapes(self):
        text = section(ours(GROUPED, "cold", 10.0, "gated_delta_net", cv=0.1))
        self.assertIn("gated_delta_net, bf16, strong gate, initial and final state, grouped value heads, µs:", text)
        self.assertIn("| 1024x8 H=2 HV=8 | `fast` | 10 ±10% |", text)

    def test_host_calls_stand_alone(self):
        host = entries(f"host_call/kda/automatic/bf16/{PLAIN} host/manual_time", 4.5, label="fast")
        text = section(ours(PLAIN, "cold", 40.0), host)
        self.assertIn("| kda | T=2048 H=8 | `fast` | 4.5 |", text)
        self.assertEqual(text.count("T=2048 H=8"), 2)


class Page(unittest.TestCase):
    def production(self, text):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "machine").mkdir()
            if text:
                (Path(folder) / "machine" / "production.json").write_text(text)
            return production_tables.production(Path(folder))

    def test_without_results(self):
        self.assertEqual(self.production(""), "No results yet.\n")

    def test_a_malformed_file_is_named(self):
        with self.assertRaisesRegex(SystemExit, "machine is malformed"):
            self.production(json.dumps({"context": {}}))


if __name__ == "__main__":
    unittest.main()
