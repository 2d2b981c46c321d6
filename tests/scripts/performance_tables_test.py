#!/usr/bin/env python3
"""The tables of the staged kernels: ratios, and what V3 is held to, from times made up here."""

import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import performance_tables

CONTEXT = {"gpu": "A GPU", "driver": "1", "cuda": "1", "cpu": "A CPU", "threads": "1", "commit": "c", "seed": "1",
           "date": "2026-01-01T00:00:00"}


def entries(stage, variant, microseconds, recurrence="kda", batch=1, tokens=2048):
    kernel = performance_tables.STAGES[stage]
    name = (f"delta_forward/{recurrence}/{kernel}/f32/B:{batch} T:{tokens} H:8 HV:8 K:128 V:128 N:{batch} gate:strong "
            f"{variant}/manual_time")
    return [{"run_name": name, "run_type": "aggregate", "aggregate_name": aggregate, "real_time": time, "relative_error": 1e-7}
            for aggregate, time in (("median", microseconds), ("cv", 0.01))]


def section(*lists):
    return performance_tables.staged_section({"context": CONTEXT, "benchmarks": [entry for some in lists for entry in some]})


def row(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


class Staged(unittest.TestCase):
    def test_ratios_are_those_of_the_medians(self):
        text = section(entries("V1", "cold", 300.0), entries("V3", "cold", 200.0), entries("V3", "cold", 100.0, tokens=512))
        self.assertIn("| kda | 128 | 1 |  | 1.50 |", text)
        self.assertNotIn("V2 / V1,", text)

    def test_targets_are_met_or_not(self):
        text = section(entries("V1", "cold", 300.0), entries("V1", "graph", 300.0), entries("V3", "cold", 300.0),
                       entries("V3", "graph", 200.0))
        self.assertEqual(row(text, "| V3, µs"), "| V3, µs | kda | 1 | at most 386 | 300 | 200 | yes |")
        self.assertEqual(row(text, "| V1 / V3"), "| V1 / V3 | kda | 1 | at least 1.2 | 1 | 1.5 | graph only |")
        self.assertEqual(row(text, "| step_loop / V3"),
                         "| step_loop / V3 | kda | 1 | at least 2.4 | not measured | not measured |  |")
        slow = section(entries("V3", "cold", 400.0), entries("V3", "graph", 386.1))
        self.assertTrue(row(slow, "| V3, µs").endswith("| no |"))

    def test_other_benchmarks_do_not_count(self):
        self.assertEqual(section(entries("V3", "cold", 1.0, recurrence="gla"), entries("V3", "cold", 1.0, tokens=128)), "")

    def test_a_malformed_file_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "machine").mkdir()
            (Path(folder) / "machine" / "delta_forward.json").write_text('{"context": {}}')
            with mock.patch.object(performance_tables, "RESULTS", Path(folder)):
                with self.assertRaisesRegex(SystemExit, "delta_forward.json is malformed"):
                    performance_tables.staged()


if __name__ == "__main__":
    unittest.main()
