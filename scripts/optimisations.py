"""The article's optimisations as pairs of settings of the on-chip kernel: what is compared, and the figure that should move.
scripts/ncu_profile.py --optimisations measures the variants, scripts/performance_tables.py makes the table.

Rows are split over 4 blocks everywhere, also where the kernel would not do so by itself: that is what there is to exchange (H3, H4), and what
leaves a tile small enough for registers (H1). Figures are those of the launch that takes most of the time, or of the pair's "function"."""

OPTIMISATIONS = [
    {"name": "H1", "what": "inputs go straight to shared memory (cp.async), not through registers", "figure": "registers",
     "article": "168 → 128 registers",
     "before": "v3_on_chip:flush=8,columns=32,row_blocks=4,loads=1", "after": "v3_on_chip:flush=8,columns=32,row_blocks=4,loads=0"},
    {"name": "H2", "what": "striped state in shared memory, not row-major", "figure": "bank_conflict_percent",
     "article": "37 % → 4 % bank conflicts",
     "before": "v3_on_chip:flush=8,columns=128,row_blocks=4,layout=0", "after": "v3_on_chip:flush=8,columns=128,row_blocks=4,layout=1"},
    {"name": "H2b", "what": "row-major in 16-byte vectors, not striped", "figure": "bank_conflict_percent", "article": "—",
     "before": "v3_on_chip:flush=8,columns=128,row_blocks=4,layout=1", "after": "v3_on_chip:flush=8,columns=128,row_blocks=4,layout=2"},
    {"name": "H3", "what": "two buffers: the next micro-chunk is loaded under the one before", "figure": "instructions_per_cycle",
     "article": "IPC 1.2 → 1.6",
     "before": "v3_on_chip:flush=8,columns=32,row_blocks=4,buffers=1", "after": "v3_on_chip:flush=8,columns=32,row_blocks=4,buffers=2"},
    {"name": "H4", "what": "exchange every 8 tokens, not every token (atomic flush)", "figure": "atomic_stall_percent",
     "article": "8.6 % → 2.1 % of the time in atomics",
     "before": "v3_on_chip:flush=1,columns=32,row_blocks=4,flush_kind=1", "after": "v3_on_chip:flush=8,columns=32,row_blocks=4,flush_kind=1"},
    {"name": "H5", "what": "the decay dropped (wrong on purpose): what the arithmetic costs", "figure": "time_us", "article": "—",
     "before": "v3_on_chip:flush=8,columns=32,row_blocks=4", "after": "v3_without_decay:flush=8,columns=32,row_blocks=4"},
    {"name": "H6", "what": "preparation: lanes along channels, not along the sequence", "figure": "sectors_per_load",
     "article": "—", "function": "prepare_micro_chunks",
     "before": "v3_on_chip:flush=8,columns=32,row_blocks=4,lanes=1", "after": "v3_on_chip:flush=8,columns=32,row_blocks=4,lanes=0"},
]


def before_after(pair, results, figure):
    """A figure of both variants of a pair, from a file of results; None where there is none."""
    values = []
    for side in ("before", "after"):
        found = [v for v in results["variants"] if f"{v['kernel']}:{v['settings']}".rstrip(":") == pair[side]]
        figures = found[0].get("figures", {}) if found else {}
        if "function" in pair:
            named = [f for name, f in figures.get("functions", {}).items() if pair["function"] in name]
            figures = named[0] if named else {}
        values.append(figures.get(figure))
    return tuple(values)


def variants():
    """Every variant once."""
    return list(dict.fromkeys(pair[side] for pair in OPTIMISATIONS for side in ("before", "after")))
