#!/usr/bin/env python3
"""The table that dispatch goes by: made from times made up here, and the committed one from the committed results."""

import contextlib
import io
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import dispatch_table


def entries(recurrence, kernel, words, microseconds, dtype="f32"):
    name = f"delta_forward/{recurrence}/{kernel}/{dtype}/{words}/manual_time"
    return [{"run_name": name, "run_type": "aggregate", "aggregate_name": aggregate, "real_time": time}
            for aggregate, time in (("median", microseconds), ("cv", 0.01))]


def results(*lists, gpu="NVIDIA H200"):
    return {"context": {"gpu": gpu}, "benchmarks": [entry for some in lists for entry in some]}


def rows(*lists):
    return [line for line in dispatch_table.table(results(*lists)).splitlines() if not line.startswith("//")]


SHAPE = "B:4 T:512 H:8 HV:16 K:128 V:64 N:4 gate:strong"


class Table(unittest.TestCase):
    def test_a_row_a_problem_fastest_first(self):
        problem = '"NVIDIA H200", 90, DType::f32, Update::delta, Gate::channel, 128, 64, 512, 64'
        self.assertEqual(rows(entries("kda", "slow", SHAPE + " cold", 1234.5), entries("kda", "fast", SHAPE + " cold", 12.345)),
                         [f'{{{problem}, {{{{"fast", 12.3}}, {{"slow", 1234}}}}}},'])

    def test_cold_times_only(self):
        self.assertEqual(rows(entries("kda", "fast", SHAPE + " graph", 1.0), entries("kda", "sequential", SHAPE, 1.0)), [])

    def test_packed_sequences_count_by_their_mean(self):
        packed = "B:1 T:8192 H:8 HV:8 K:128 V:128 N:6 gate:strong cold"
        self.assertIn("DType::bf16, Update::delta, Gate::scalar, 128, 128, 1365, 48,",
                      rows(entries("gated_delta_net", "fast", packed, 1.0, dtype="bf16"))[0])

    def test_the_first_of_two_gates_counts(self):
        weak = SHAPE.replace("strong", "weak")
        self.assertEqual(rows(entries("gla", "fast", SHAPE + " cold", 2.0), entries("gla", "fast", weak + " cold", 3.0)),
                         rows(entries("gla", "fast", SHAPE + " cold", 2.0)))

    def test_recurrences_apart_by_update_and_gate(self):
        words = "B:1 T:2048 H:8 HV:8 K:128 V:128 N:1 cold"
        self.assertEqual(len(rows(*(entries(recurrence, "fast", words, 1.0) for recurrence in dispatch_table.RECURRENCES))), 6)

    def test_an_unknown_gpu_is_named(self):
        with self.assertRaisesRegex(SystemExit, "A GPU"):
            dispatch_table.table(results(gpu="A GPU"))


class Committed(unittest.TestCase):
    def test_table_is_what_the_results_give(self):
        with mock.patch.object(sys, "argv", ["dispatch_table.py", "--check"]), contextlib.redirect_stdout(io.StringIO()):
            dispatch_table.main()


if __name__ == "__main__":
    unittest.main()
