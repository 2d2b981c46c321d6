"""What the profiler must not show: limits for kernels by name, and where each comes from. scripts/ncu_profile.py checks them on the
kernel function that takes most of a call's time. `most` and `least` are inclusive.

A figure of the profiler for one variant is a fact, not a limit: variants that exist to be slower (row-major state, single buffers,
a flush at every token) are measured with a setting named on the command line, and limits that such a setting breaks on purpose
hold only for what the library chooses itself (`chosen`).
"""

STAGED = r"^v[1-4]_"
ON_CHIP = r"^v[34]_"

LIMITS = [
    # Registers that do not fit go to local memory, which no kernel here uses on purpose.
    {"kernel": r".", "figure": "local_instructions", "most": 0},
    # A 16-byte access whose lanes share addresses takes two passes where one counts as ideal, so that with all accesses of that kind half of
    # the passes would be called conflicts; this kernel's mix stays well below, and real conflicts would show. The article's 4 % is for 4-byte
    # accesses to a striped state.
    {"kernel": ON_CHIP, "figure": "bank_conflict_percent", "most": 30.0, "chosen": True},
    # The article's share of time in atomics with a flush every 8 tokens (8.6 % at every token).
    {"kernel": ON_CHIP, "figure": "atomic_stall_percent", "most": 2.1, "chosen": True},
    # Once on chip, state must not travel: a call reads its inputs and writes its outputs once, and writes and reads what it has prepared,
    # 3 K + V numbers and a little a token and head beside the 2 K + 2 V of the operands; half as much again for what is read twice.
    {"kernel": ON_CHIP, "figure": "dram_per_operand_byte", "most": 4.5, "chosen": True},
    # Achieved warps against what registers and shared memory allow. Few heads give a multiprocessor one block of two, just under half;
    # less means blocks that wait for others to start.
    {"kernel": STAGED, "figure": "occupancy_of_limit_percent", "least": 45.0},
    # A multiprocessor that issues less than this in an active cycle waits for something all of the time.
    {"kernel": STAGED, "figure": "instructions_per_cycle", "least": 0.2},
]
