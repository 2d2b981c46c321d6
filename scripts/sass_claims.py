"""What the machine code of the shipped kernels must look like. scripts/sass.py checks it; kernels are named by patterns on the short
names that `scripts/sass.py list` prints. That no kernel spills or has a stack needs no claim: it holds for all of them.

A claim looks at a few instantiations of a template where all of them come from the same lines.
"""

# The representatives of the chunk pipeline: its widest tiles.
PIPELINE = r"^chunk_pipeline<Policy<delta, (scalar|channel), PlainSum, 128, 32>>"

# What each rounded operation of a compensated sum must compile to: nothing merged, nothing left out.
ROUNDED = {"file": "src/state/summation.h",
           "operations": {"rounded_add": "FADD", "rounded_sub": "FADD", "rounded_mul": "FMUL", "fused_mul_add": "FFMA"}}

CLAIMS = {
    # Blocks whose registers fit on one multiprocessor together; without a claim, one. The policies' kBlocksPerMultiprocessor.
    "blocks": [
        {"kernel": r"^step<", "blocks": 4},
        {"kernel": r"^chunk_pipeline<Policy<\w+, \w+, \w+, (64|128), \d+>>", "blocks": 2},
    ],
    # 128-bit global accesses where the kernel's story claims them: cuda/device/rows.cuh copies f32 rows of 128 channels, 4 a lane,
    # straight to shared memory.
    "wide_accesses": [
        {"kernel": PIPELINE, "instruction": r"LDGSTS\.E\.BYPASS\.128", "at_least": 1},
    ],
    # Address arithmetic along the sequence. A 64-bit product is three multiplications (low x low, two cross terms). A load that steps
    # along tokens may spend one product, token x stride; a store of outputs one more multiplication.
    "token_loops": [
        {"kernel": PIPELINE, "access": r"LDG|LDGSTS", "multiplications": 3},
        {"kernel": PIPELINE, "access": r"STG", "multiplications": 4},
    ],
    "rounded": [],
}
