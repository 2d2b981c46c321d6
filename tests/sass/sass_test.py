#!/usr/bin/env python3
"""Machine code: the compensated sum as compiled, the claims about the shipped kernels, and that each check can fail.

Usage: sass_test.py PROGRAM [COMPENSATED CONTRACTED]    a program with the kernels, and the objects of the two .cu files beside this
Exit code 77: skipped, with the reason.
"""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import sass
from sass_claims import CLAIMS, ROUNDED

# Two-sum with the compensation taken in: 7 additions. An exact product: one multiplication and one fused multiply-add for its error;
# scale() also scales the compensation and adds that error, add_product() adds the product and then its error.
COMPENSATED = {
    "counts": [
        {"kernel": r"^compensated_add<", "exactly": {"FADD": 7, "FMUL": 0, "FFMA": 0}},
        {"kernel": r"^compensated_scale<", "exactly": {"FADD": 1, "FMUL": 2, "FFMA": 1}},
        {"kernel": r"^compensated_add_product<", "exactly": {"FADD": 8, "FMUL": 1, "FFMA": 1}},
        {"kernel": r"^compensated_step<", "exactly": {"FADD": 9, "FMUL": 3, "FFMA": 2}},
    ],
}
ROUNDED_STEP = {"rounded": [{"kernel": r"^compensated_step<CompensatedSum>", **ROUNDED}]}

# nvdisasm's listing of a loop over global memory, shortened.
LISTING = """
.text.example:
.L_x_0:
	//## File "/src/state/summation.h", line 20 inlined at "/src/kernel.cu", line 7
	//## File "/src/kernel.cu", line 7
        /*0000*/                   FADD R1, R2, R3 ;
.L_x_1:
	//## File "/src/kernel.cu", line 9
        /*0010*/                   IMAD.WIDE.U32 R4, R5, R6, R8 ;
        /*0020*/                   IMAD.MOV.U32 R7, RZ, RZ, R8 ;
        /*0030*/                   IMAD.U32 R7, RZ, RZ, UR4 ;
        /*0040*/              @!P0 LDG.E.128 R4, desc[UR10][R4.64] ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*0070*/                   IMAD R4, R5, R6, R8 ;
        /*0080*/                   BRA `(.L_x_2) ;
.L_x_3:
        /*0090*/                   @P2 BRA `(.L_x_0) ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   STG.E desc[UR10][R4.64], R5 ;
        /*00c0*/                   BRA `(.L_x_3) ;
"""

RESOURCES = """
Fatbin elf code:
================
arch = sm_90a
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _Z7spilledv:
  REG:40 STACK:8 SHARED:2048 LOCAL:0 CONSTANT[0]:1280 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


class FakeCubin:
    threads = {"_Z7spilledv": 1024}


def fake_kernel(**changes):
    (architecture, mangled, numbers), = sass.parse_resources(RESOURCES)
    kernel = sass.Kernel(architecture, mangled, "spilled", {**numbers, **changes}, FakeCubin)
    kernel.instructions = sass.parse_instructions(LISTING)
    return kernel


def breaches(check, kernel, claims):
    report = sass.Report()
    check([kernel], claims, report)
    return [f"{b['check']}: {b['found']}" for b in report.breaches]


class Parsing(unittest.TestCase):
    def test_names_lose_namespaces_and_parameters(self):
        self.assertEqual(sass.short_name(
            "void delta_attention::(anonymous namespace)::chunk_pipeline<delta_attention::stages::Policy<(delta_attention::Update)1, "
            "(delta_attention::Gate)2, delta_attention::PlainSum, 128, 16> >(delta_attention::(anonymous namespace)::Params)"),
            "chunk_pipeline<Policy<delta, channel, PlainSum, 128, 16>>")
        self.assertEqual(sass.short_name("delta_attention::(anonymous namespace)::plan_runs(delta_attention::Params)"),
                         "plan_runs")

    def test_instructions_know_their_lines_and_targets(self):
        instructions = sass.parse_instructions(LISTING)
        self.assertEqual([i.opcode for i in instructions[:2]], ["FADD", "IMAD.WIDE.U32"])
        self.assertEqual(instructions[0].source, (sass.Line("/src/state/summation.h", 20), sass.Line("/src/kernel.cu", 7)))
        self.assertEqual(instructions[5].target, 0x10)

    def test_loops_are_the_innermost_with_an_access(self):
        instructions = sass.parse_instructions(LISTING)
        self.assertEqual([len(loop) for loop in sass.loops_with(instructions, "LDG")], [5])
        self.assertEqual([len(loop) for loop in sass.loops_with(instructions, "IMAD")], [5, 2])
        self.assertEqual([len(loop) for loop in sass.loops_with(instructions, "FADD")], [10])
        self.assertEqual(sass.loops_with(instructions, "STG"), [])

    def test_moves_are_no_multiplications(self):
        self.assertEqual([i.opcode for i in sass.parse_instructions(LISTING) if sass.is_multiplication(i)], ["IMAD.WIDE.U32", "IMAD"])

    def test_counts_match_whole_parts_of_opcodes(self):
        instructions = sass.parse_instructions(LISTING)
        self.assertEqual(sass.count(instructions, r"LDG\.E\.128"), 1)
        self.assertEqual(sass.count(instructions, r"LDG\.E\.12"), 0)
        self.assertEqual(sass.count(instructions, "LDG"), 1)


class ChecksCanFail(unittest.TestCase):
    def test_a_stack_is_a_breach(self):
        self.assertEqual(breaches(sass.check_resources, fake_kernel(), []), ["no spills, no stack: stack 8, local 0 bytes"])
        self.assertEqual(breaches(sass.check_resources, fake_kernel(stack=0), []), [])

    def test_too_many_registers_for_the_claimed_blocks_are_a_breach(self):
        claim = [{"kernel": "spilled", "blocks": 2}]
        self.assertEqual(len(breaches(sass.check_resources, fake_kernel(stack=0), claim)), 1)
        self.assertEqual(breaches(sass.check_resources, fake_kernel(stack=0, registers=32), claim), [])

    def test_a_missing_wide_access_is_a_breach(self):
        claim = {"kernel": "spilled", "instruction": r"LDG\.E\.128", "at_least": 2}
        self.assertEqual(len(breaches(sass.check_wide_accesses, fake_kernel(), [claim])), 1)
        self.assertEqual(breaches(sass.check_wide_accesses, fake_kernel(), [{**claim, "at_least": 1}]), [])

    def test_multiplications_in_a_token_loop_are_a_breach(self):
        claim = {"kernel": "spilled", "access": "LDG", "multiplications": 0.5}
        self.assertEqual(len(breaches(sass.check_token_loops, fake_kernel(), [claim])), 1)
        self.assertEqual(breaches(sass.check_token_loops, fake_kernel(), [{**claim, "multiplications": 1}]), [])
        self.assertEqual(len(breaches(sass.check_token_loops, fake_kernel(), [{**claim, "access": "STG"}])), 1)

    def test_a_claim_about_no_kernel_is_a_breach(self):
        claim = {"kernel": "renamed", "instruction": "LDG", "at_least": 1}
        self.assertEqual(breaches(sass.check_wide_accesses, fake_kernel(), [claim]),
                         ["at least 1 LDG: no kernel has this name"])


class MachineCode(unittest.TestCase):
    """On what this build compiled."""

    def check(self, binary, claims):
        kernels, report = sass.check(binary, claims)
        self.assertTrue(kernels)
        return {f"{b['check']}: {b['subject']}: {b['found']}" for b in report.breaches}

    def test_shipped_kernels_keep_their_claims(self):
        self.assertEqual(self.check(binaries.program, CLAIMS), set())

    def test_compensation_survives_the_compiler(self):
        self.assertEqual(self.check(binaries.compensated, {**COMPENSATED, **ROUNDED_STEP}), set())

    def test_contraction_is_seen(self):
        found = self.check(binaries.contracted, COMPENSATED)
        for kernel in ("compensated_scale", "compensated_step"):
            self.assertTrue(any(kernel in breach for breach in found), (kernel, found))
        self.assertTrue(self.check(binaries.contracted, ROUNDED_STEP))


class Binaries:
    program = compensated = contracted = ""


binaries = Binaries()


def why_no_machine_code(paths):
    """Takes the paths of the binaries; says what is missing to look at them, "" if nothing is."""
    if len(paths) < 3:
        return "this build has no CUDA kernels"
    binaries.program, binaries.compensated, binaries.contracted = paths
    try:
        sass.find_tool("nvdisasm")
        with tempfile.TemporaryDirectory() as folder:
            sass.read_kernels(binaries.compensated, folder)
    except sass.Unavailable as reason:
        return str(reason)
    return ""


def main():
    reason = why_no_machine_code(sys.argv[1:])
    if reason:
        del globals()["MachineCode"]
    outcome = unittest.main(argv=sys.argv[:1], exit=False).result
    if reason:
        print(f"sass_test: machine code skipped: {reason}")
    return 1 if not outcome.wasSuccessful() else sass.SKIPPED if reason else 0


if __name__ == "__main__":
    sys.exit(main())
