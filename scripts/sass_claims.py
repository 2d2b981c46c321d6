"""What the machine code of the shipped kernels must look like. scripts/sass.py checks it; kernels are named by patterns on the short
names that `scripts/sass.py list` prints. That no kernel spills or has a stack needs no claim: it holds for all of them.

A claim looks at a few instantiations of a template where all of them come from the same lines.
"""

# Representatives: the chunk pipeline's tiles for 128 keys, and the on-chip kernel as the library runs it.
PIPELINE = r"^chunk_pipeline<Policy<delta, (scalar|channel), \w+, 128, 16>>"
ON_CHIP = r"^on_chip<Policy<\w+, 16, (8|32), 256, vectors, async_copies>>"

# What each rounded operation of a compensated sum must compile to: nothing merged, nothing left out.
ROUNDED = {"file": "src/state/summation.h",
           "operations": {"rounded_add": "FADD", "rounded_sub": "FADD", "rounded_mul": "FMUL", "fused_mul_add": "FFMA"}}

CLAIMS = {
    # Blocks whose registers fit on one multiprocessor together; without a claim, one. The kernels' launch bounds say the same.
    "blocks": [
        {"kernel": r"^step<", "blocks": 4},
        {"kernel": r"^(chunk_pipeline|prepare_chunk)<Policy<\w+, \w+, \w+, (64|128), \d+>>", "blocks": 2},
        {"kernel": r"^on_chip<Policy<\w+, \d+, (16|32|128), 256, \w+, async_copies>>", "blocks": 2},
        {"kernel": r"^prepare_micro_chunks<", "blocks": 3},
    ],
    # 128-bit accesses where the kernels' stories claim them.
    "wide_accesses": [
        # f32 rows of 128 channels, 4 a lane, go straight to shared memory (cuda/device/rows.cuh).
        {"kernel": PIPELINE, "instruction": r"LDGSTS\.E\.BYPASS\.128", "at_least": 1},
        # So do the on-chip kernel's prepared micro-chunks; the sums of a group's blocks are gathered in 128 bits, too.
        {"kernel": ON_CHIP, "instruction": r"LDGSTS\.E\.BYPASS\.128", "at_least": 1},
        {"kernel": ON_CHIP, "instruction": r"LDG\.E\.128\.STRONG\.GPU", "at_least": 1},
    ],
    # Address arithmetic along the sequence. A product of two 64-bit numbers, such as token x stride, is three or four multiplications,
    # by architecture: an access that steps along tokens may spend one product. The on-chip kernel's pieces of a row share theirs.
    "token_loops": [
        {"kernel": PIPELINE, "access": r"LDG|LDGSTS", "multiplications": 4},
        {"kernel": PIPELINE, "access": r"STG", "multiplications": 4},
        {"kernel": ON_CHIP, "access": r"LDGSTS", "multiplications": 2},
    ],
    # Contraction, by the lines of the operations, in the kernels that keep compensated sums.
    "rounded": [
        {"kernel": PIPELINE.replace(r"\w+", "CompensatedSum"), **ROUNDED},
        {"kernel": ON_CHIP.replace(r"\w+", "CompensatedSum"), **ROUNDED},
    ],
}
