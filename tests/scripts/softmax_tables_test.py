#!/usr/bin/env python3
"""The tables of softmax attention and of its comparison with delta attention, from times made up here."""

import json
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import softmax_tables

CONTEXT = {"gpu": "A GPU", "driver": "1", "cuda": "1", "cpu": "A CPU", "threads": "1", "commit": "c", "seed": "1",
           "date": "2026-01-01T00:00:00", "measured_copy_bytes_per_second": "4000000000000"}
PEER_CONTEXT = {**CONTEXT, "torch": "2", "cudnn": "9"}


def entries(name, microseconds, **counters):
    return [{"run_name": name, "run_type": "aggregate", "aggregate_name": aggregate, "real_time": time, "relative_error": 1e-7,
             "operands": 1e6, "workspace": 0.0, **counters} for aggregate, time in (("median", microseconds), ("cv", 0.01))]


def forward(kernel, microseconds, n=4096, dim=64, dtype="f32", mask="full", variant="graph", settings="", operation="softmax_forward",
            **counters):
    chosen = f"settings:{settings} " if settings else ""
    name = f"{operation}/{kernel}/{dtype}/B:2 Nq:{n} Nkv:{n} H:8 Hkv:8 D:{dim} mask:{mask} {chosen}{variant}"
    return entries(name + ("/manual_time" if operation == "softmax_forward" else ""), microseconds, **counters)


def decode(kernel, microseconds, keys, page=0, batch=1, model_bytes=0.0):
    pages = f"page:{page} " if page else ""
    name = f"softmax_forward/{kernel}/bf16/B:{batch} Nq:1 Nkv:{keys} H:32 Hkv:8 D:128 {pages}mask:full cold/manual_time"
    return entries(name, microseconds, model_bytes=model_bytes)


def versus(method, kernel, times, dtype="bf16", batch=1, **counters):
    return [entry for tokens, time in times.items()
            for entry in entries(f"softmax_vs_delta/{method}/{kernel}/{dtype}/B:{batch} T:{tokens} H:8 D:128 cold/manual_time", time,
                                 **counters)]


def peer(backend, times, batch=1, dtype="bf16"):
    return [entry for tokens, time in times.items()
            for entry in entries(f"sdpa/{backend}/{dtype}/B:{batch} Nq:{tokens} Nkv:{tokens} H:8 Hkv:8 D:128 mask:causal cold", time)]


def results(*lists, context=CONTEXT):
    return {"context": context, "benchmarks": [entry for some in lists for entry in some]}


def forward_section(*lists, sdpa=None):
    files = {"softmax_forward": results(*lists)}
    if sdpa:
        files["sdpa"] = results(sdpa, context=PEER_CONTEXT)
    return softmax_tables.forward_section(files)


def vs_section(*lists, sdpa=None):
    files = {"softmax_vs_delta": results(*lists)}
    if sdpa:
        files["sdpa"] = results(sdpa, context=PEER_CONTEXT)
    return softmax_tables.vs_section(files)


class Forward(unittest.TestCase):
    def test_times_stand_under_their_length(self):
        text = forward_section(forward("naive", 50.0, n=256), forward("naive", 1234.5), forward("tiled", 7.0),
                               sdpa=forward("cudnn", 3.0, dtype="bf16", operation="sdpa"))
        self.assertIn("Time in µs, D=64", text)
        self.assertIn("| kernel | dtype | N=256 | N=4096 |", text)
        self.assertIn("| `naive` | f32 | 50 | 1234 |", text)
        self.assertIn("| `tiled` | f32 |  | 7 |", text)
        self.assertIn("| cuDNN | bf16 |  | 3 |", text)
        self.assertIn("PyTorch 2, cuDNN 9", text)

    def test_failed_and_other_shapes_leave_no_trace(self):
        broken = [{"run_name": "softmax_forward/naive/f32/B:2 Nq:64 Nkv:64 H:8 Hkv:8 D:64 mask:full graph", "run_type": "iteration",
                   "error_occurred": True, "error_message": "wrong result"}]
        self.assertNotIn("N=64", forward_section(broken, forward("naive", 1.0)))

    def test_ratios(self):
        text = forward_section(forward("naive", 30.0), forward("tiled", 20.0), forward("vec_padded", 10.0), forward("vec_fused", 10.5),
                               forward("vec_fused", 12.0, dtype="bf16"))
        self.assertIn("| 64 | 1.50 |", text)            # naive / tiled
        self.assertIn("| 64 | 1.05 |", text)            # vec_fused / vec_padded
        self.assertIn("| 64 | bf16 | 1.14 |", text)
        self.assertNotIn("| 64 | f16 |", text)

    def test_causal_saving_is_a_percentage_of_the_full_time(self):
        text = forward_section(forward("vec_fused", 100.0), forward("vec_fused", 55.0, mask="causal"))
        self.assertIn("| `vec_fused` | f32 | 64 | graph | 45 |", text)
        self.assertIn("| % saved by a causal mask at N=4096, `vec_fused` | at least 40 | 45 | yes |", text)

    def test_the_fastest_setting_is_bold(self):
        text = forward_section(*(forward("vec_fused", time, settings=f"keys={keys}") for keys, time in ((8, 30.0), (16, 20.0), (32, 25.0))))
        self.assertIn("| D | N | keys=8 | keys=16 | keys=32 |", text)
        self.assertIn("| 64 | 4096 | 30 | **20** | 25 |", text)
        self.assertNotIn("Time in µs", text)  # settings are not the kernel's own times

    def test_memory_counts_the_workspace(self):
        self.assertIn("| `three_stage` | f32 | 5 |", forward_section(forward("three_stage", 1.0, workspace=4e6)))

    def test_decoding_names_pages_and_the_share_of_the_bandwidth(self):
        text = forward_section(decode("decode", 100.0, 1024, model_bytes=2e8), decode("decode", 110.0, 1024, page=16),
                               decode("vec_fused", 300.0, 1024))
        self.assertIn("| B | Nkv | `decode` | `decode`, pages of 16 | `vec_fused` |", text)
        self.assertIn("| 1 | 1024 | 100 (50%) | 110 | 300 |", text)

    def test_speed_against_peers_and_the_target(self):
        ours = [entry for n, time in ((1024, 9.0), (2048, 10.0), (4096, 20.0))
                for entry in forward("flash_tc", time, n=n, dim=128, dtype="bf16")]
        theirs = [entry for n, time in ((1024, 1.0), (2048, 7.0), (4096, 11.0))
                  for entry in forward("cudnn", time, n=n, dim=128, dtype="bf16", operation="sdpa")]
        text = forward_section(ours, sdpa=theirs)
        self.assertIn("| cuDNN | 128 | full | graph | 0.11 | 0.70 | 0.55 |", text)
        self.assertIn("full | at least 0.6 | 0.55 | no |", text)
        self.assertNotIn("Targets", forward_section(ours))

    def test_the_model_stands_beside_what_was_measured(self):
        self.assertIn("| `naive` | f32 | 0.7 |", forward_section(forward("naive", 7.0, vs_predicted=0.7)))


class Comparison(unittest.TestCase):
    def crossover(self, delta, softmax):
        contenders = softmax_tables.contenders({"softmax_vs_delta": results(versus("kda", "automatic", delta),
                                                                           versus("softmax", "flash_tc", softmax))})
        by_method = {one.method: one for one in contenders}
        return softmax_tables.crossover_text(by_method["kda"], by_method["softmax"])

    def test_crossover(self):
        self.assertEqual(self.crossover({128: 9.0, 256: 9.0, 512: 10.0}, {128: 1.0, 256: 8.0, 512: 30.0}), "512")
        self.assertEqual(self.crossover({128: 9.0, 256: 9.0}, {128: 1.0, 256: 8.0}), "not up to 256")
        self.assertEqual(self.crossover({128: 9.0, 256: 9.0}, {128: 10.0, 256: 30.0}), "128 (all)")
        self.assertEqual(self.crossover({128: 9.0}, {256: 10.0}), "")

    def test_a_crossover_that_does_not_last_does_not_count(self):
        self.assertEqual(self.crossover({128: 1.0, 256: 9.0, 512: 9.0}, {128: 2.0, 256: 8.0, 512: 30.0}), "512")

    def test_equal_times_are_not_faster(self):
        self.assertEqual(self.crossover({128: 5.0}, {128: 5.0}), "not up to 128")

    def test_peers_join_on_the_same_shapes_and_the_fastest_counts(self):
        text = vs_section(versus("kda", "automatic", {1024: 10.0, 2048: 20.0}, label="v3_on_chip"),
                          versus("softmax", "flash_tc", {1024: 15.0, 2048: 60.0}),
                          sdpa=peer("cudnn", {1024: 5.0, 2048: 30.0}) + peer("cudnn", {1024: 1.0}, batch=2))
        self.assertIn("| delta attention | against flash_tc | against cuDNN | against the fastest softmax |", text)
        self.assertIn("| kda, automatic | 1024 (all) | 2048 | 2048 |", text)
        self.assertNotIn("B=2", text)

    def test_dtypes_and_batches_stand_apart(self):
        text = vs_section(versus("kda", "automatic", {128: 1.0}), versus("softmax", "vec_fused", {128: 2.0}, dtype="f32", batch=16))
        self.assertIn("B=1, bf16, time", text)
        self.assertIn("B=16, f32, time", text)
        self.assertNotIn("against", text)

    def test_memory(self):
        self.assertIn("| kda, v3_on_chip | 3 |", vs_section(versus("kda", "v3_on_chip", {128: 7.0}, workspace=2e6)))


class Files(unittest.TestCase):
    def test_nothing_is_said_where_there_is_no_file(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(softmax_tables.softmax_forward(Path(folder)), "No results yet.\n")
            (Path(folder) / "machine").mkdir()
            (Path(folder) / "machine" / "sdpa.json").write_text(json.dumps(results(context=PEER_CONTEXT)))
            self.assertEqual(softmax_tables.softmax_vs_delta(Path(folder)), "No results yet.\n")

    def test_a_malformed_file_stops_with_its_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "machine").mkdir()
            (Path(folder) / "machine" / "softmax_forward.json").write_text('{"context": {}}')
            with self.assertRaisesRegex(SystemExit, "machine is malformed"):
                softmax_tables.softmax_forward(Path(folder))


if __name__ == "__main__":
    unittest.main()
