"""The mutants of the dispatch gate: its verdicts, its buckets and what it refuses; see `tests.mutants.table`."""

from __future__ import annotations

from functools import partial

from tests.mutants.table import Mutant

CELLS, TABLE, BUCKETS, FOLDERS, DECISIONS = (
    f"gate/{name}.py" for name in ("cells", "table", "buckets", "folders", "decisions")
)
VERDICT, LOOK_UP = "test_gate_table.py::TestVerdict::", "test_gate_decide.py::TestBuckets::"
_mutant = partial(Mutant, package="kda_backend")

GATE_MUTANTS = (
    _mutant(
        "verdict-by-one-pass",
        CELLS,
        "        return fused if all(wins) else unfused",
        "        return fused if any(wins) else unfused",
        VERDICT + "test_fused_must_win_every_pass_by_the_margin",
        "noise wins one pass; it has to be won in every one",
    ),
    _mutant(
        "verdict-without-margin",
        CELLS,
        "f < u and f <= (1 - margin) * u",
        "f < u",
        VERDICT + "test_fused_must_win_every_pass_by_the_margin",
        "a lead within the noise is none",
    ),
    _mutant(
        "verdict-by-verify-where-a-round-decides",
        CELLS,
        "return figures.round_us if self.decides_by_round else figures.us",
        "return figures.us",
        VERDICT + "test_a_round_decides_where_an_option_moves_cost_to_the_commit",
        "an option that makes verify dearer and commit cheaper would lose where it wins",
    ),
    _mutant(
        "edited-verdict-believed",
        CELLS,
        "return fused if self.lane == fused == self.supported(margin) else unfused",
        "return self.lane",
        VERDICT + "test_a_verdict_that_was_edited_counts_as_unfused",
        "a fused verdict needs its figures",
    ),
    _mutant(
        "closed-cell-open",
        CELLS,
        "if self.closed is not None or len(wins)",
        "if len(wins)",
        VERDICT + "test_a_closed_cell_is_unfused_whatever_its_figures",
        "what the history closed stays unfused until it is measured again",
    ),
    _mutant(
        "unmeasured-lane-wins",
        CELLS,
        "len(wins) < LEAST_PASSES or ",
        "",
        VERDICT + "test_a_lane_that_was_not_measured_wins_nothing",
        "without figures nothing is won, and all() of nothing is true",
    ),
    _mutant(
        "bucket-below-a-measured-batch",
        BUCKETS,
        "if b <= batch), default=None)\n    if at is None:\n        return None\n    cell, lane",
        "if b < batch), default=None)\n    if at is None:\n        return None\n    cell, lane",
        LOOK_UP + "test_the_configuration_is_that_of_the_smallest_measured_batch_from_it_on",
        "a batch size that was measured is its own bucket",
    ),
    _mutant(
        "configuration-of-the-bucket-below",
        BUCKETS,
        "return Bucket(cells[above], lane,",
        "return Bucket(cell, lane,",
        LOOK_UP + "test_the_configuration_is_that_of_the_smallest_measured_batch_from_it_on",
        "programs that fill the SMs at the batch size below need a second wave here",
    ),
    _mutant(
        "fused-up-to-the-next-bucket",
        BUCKETS,
        "    if lane == fused and table.verdict(cells[above]) == unfused:",
        "    if lane == fused == table.verdict(cells[above]) == unfused:",
        LOOK_UP + "test_the_device_s_own_table",
        "between a fused and an unfused bucket it is unfused",
    ),
    _mutant(
        "other-device-s-neighbours-need-not-agree",
        BUCKETS,
        "    if len(verdicts) > 1:",
        "    if len(verdicts) > 2:",
        LOOK_UP + "test_another_device_of_the_architecture",
        "near a change of lane another device says nothing about this one",
    ),
    _mutant(
        "safe-gate-s-cells-between-the-standard-gate-s",
        TABLE,
        "if b in own or b not in between}",
        "if b in own or b not in own}",
        "test_gate_decide.py::TestLookUp::test_the_standard_gate_s_own_cells_on_both_sides_of_a_batch_say_more_than_the_safe_gate_s",
        "a lane that is known to differ beside a batch size would be taken at it",
    ),
    _mutant(
        "other-device-asks-its-neighbours-alone",
        BUCKETS,
        "    near = (b for b in cells if batch <= 2 * b <= 4 * batch)",
        "    near = (b for b in cells if batch < b < batch)",
        LOOK_UP + "test_another_device_of_the_architecture",
        "with half the SMs the lane changes at half the batch size",
    ),
    _mutant(
        "other-device-beyond-its-largest-batch",
        BUCKETS,
        "    if above is None and at < batch:",
        "    if above is None and at > batch:",
        LOOK_UP + "test_another_device_of_the_architecture",
        "another device's last cell says nothing of larger batches here",
    ),
    _mutant(
        "another-architecture-s-table",
        FOLDERS,
        "                if table is not None and table.arch == arch:",
        "                if table is not None:",
        LOOK_UP + "test_another_architecture_s_table_is_nothing_to_go_by",
        "configurations of one architecture need not even compile on another",
    ),
    _mutant(
        "impossible-lane-forced",
        DECISIONS,
        "        why = why or unfit",
        "        pass",
        "test_gate_decide.py::TestOverrides::test_an_impossible_lane_is_an_error_that_says_why",
        "a forced lane that cannot be had must not silently be another",
    ),
)
