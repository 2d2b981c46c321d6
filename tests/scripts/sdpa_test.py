#!/usr/bin/env python3
"""bench/peers/sdpa.py as far as it goes without a GPU: its shapes, names and entries."""

import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / "peers"), str(ROOT / "scripts")]
import sdpa
from softmax_tables import Row
from tables import medians


class Cases(unittest.TestCase):
    def test_each_is_timed_once(self):
        cases = sdpa.cases()
        self.assertEqual(len(cases), len(set(cases)))

    def test_they_cover_the_comparison(self):
        names = {sdpa.case_name(*case) for case in sdpa.cases()}
        for batch in (1, 16):
            for exponent in range(7, 18):
                tokens = 2**exponent
                self.assertIn(f"sdpa/cudnn/bf16/B:{batch} Nq:{tokens} Nkv:{tokens} H:8 Hkv:8 D:128 mask:causal cold", names)

    def test_lengths_grow_so_that_shorter_ones_predict_longer_ones(self):
        for batch in (1, 16):
            tokens = [case[2] for case in sdpa.cases() if case[0] == "cudnn" and case[1] == batch]
            self.assertEqual(tokens, sorted(tokens))


class Entries(unittest.TestCase):
    def test_tables_read_them(self):
        name = sdpa.case_name("math", 2, 256, 64, True, "graph")
        written = sdpa.entries(name, [3.0, 1.0, 2.0], {"operands": 4, "workspace": 8, "relative_error": 1e-7})
        (median, cv), = medians({"benchmarks": written})
        row = Row(median, cv)
        self.assertEqual((row.kernel, row.dtype, row.keys, row.dim, row.mask, row.variant), ("math", "f32", 256, 64, "causal", "graph"))
        self.assertEqual((row.microseconds, row.cv, row.workspace), (2.0, 0.5, 8))

    def test_failures_are_no_times(self):
        self.assertEqual(medians({"benchmarks": sdpa.failed("a/b/c/d", "skipped: no kernel\nmore")}), [])
        self.assertEqual(sdpa.failed("a", "skipped: no kernel\nmore")[0]["error_message"], "skipped: no kernel")


class Prediction(unittest.TestCase):
    def clock(self):
        clock = sdpa.Clock.__new__(sdpa.Clock)
        clock.longest = {}
        return clock

    def test_time_grows_with_the_square_of_the_length(self):
        clock = self.clock()
        clock.longest["cudnn", 1, 128, True] = (1024, 0.04)
        self.assertEqual(clock.too_much("cudnn", 1, 2048, 128, True), "")
        self.assertTrue(clock.too_much("cudnn", 1, 4096, 128, True).startswith("skipped:"))
        self.assertEqual(clock.too_much("flash", 1, 4096, 128, True), "")

    def test_a_large_matrix_of_scores_is_not_tried(self):
        self.assertEqual(self.clock().too_much("math", 2, 8192, 128, True), "")
        self.assertTrue(self.clock().too_much("math", 16, 8192, 128, True).startswith("skipped:"))
        self.assertEqual(self.clock().too_much("efficient", 16, 8192, 128, True), "")


if __name__ == "__main__":
    unittest.main()
