"""The article's optimisations as pairs of settings of the on-chip kernel: what is compared, and the figure that should move.
scripts/ncu_profile.py --optimisations measures the variants, scripts/performance_tables.py makes the table."""

OPTIMISATIONS = [
    {"name": "H1", "what": "inputs go straight to shared memory (cp.async), not through registers", "figure": "registers",
     "article": "168 → 128 registers",
     "before": "v3_on_chip:flush=8,columns=32,loads=1", "after": "v3_on_chip:flush=8,columns=32,loads=0"},
    {"name": "H2", "what": "striped state in shared memory, not row-major", "figure": "bank_conflict_percent",
     "article": "37 % → 4 % bank conflicts",
     "before": "v3_on_chip:flush=8,columns=128,layout=0", "after": "v3_on_chip:flush=8,columns=128,layout=1"},
    {"name": "H2b", "what": "row-major in 16-byte vectors, not striped", "figure": "bank_conflict_percent", "article": "—",
     "before": "v3_on_chip:flush=8,columns=128,layout=1", "after": "v3_on_chip:flush=8,columns=128,layout=2"},
    {"name": "H3", "what": "two buffers: the next micro-chunk is loaded while sums travel", "figure": "instructions_per_cycle",
     "article": "IPC 1.2 → 1.6",
     "before": "v3_on_chip:flush=8,columns=32,buffers=1", "after": "v3_on_chip:flush=8,columns=32,buffers=2"},
    {"name": "H4", "what": "exchange every 8 tokens, not every token (atomic flush)", "figure": "atomic_stall_percent",
     "article": "8.6 % → 2.1 % of the time in atomics",
     "before": "v3_on_chip:flush=1,columns=32,flush_kind=1", "after": "v3_on_chip:flush=8,columns=32,flush_kind=1"},
    {"name": "H5", "what": "the decay dropped (wrong on purpose): what the arithmetic costs", "figure": "time_us", "article": "—",
     "before": "v3_on_chip:flush=8,columns=32", "after": "v3_without_decay:flush=8,columns=32"},
    {"name": "H6", "what": "lanes along channels, not along the sequence", "figure": "sectors_per_load", "article": "—",
     "before": "v3_on_chip:flush=8,columns=32,lanes=1", "after": "v3_on_chip:flush=8,columns=32,lanes=0"},
]


def variants():
    """Every variant once."""
    return list(dict.fromkeys(pair[side] for pair in OPTIMISATIONS for side in ("before", "after")))
