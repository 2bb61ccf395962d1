"""The mutants: one text edit of one source file each, the test that must go red, and why it should. Here: the kernels'.

A mutant whose old text no longer occurs exactly once is an error of this table, not a pass: edit it with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

VERIFY, COMMIT, COMMON, ARITHMETIC, CHUNKED, BATCHES, PENDING, GATHER = (
    f"_triton/{name}.py"
    for name in ("verify", "commit", "common", "arithmetic", "chunked", "batches", "pending", "gather")
)


@dataclass(frozen=True)
class Mutant:
    """``old`` -> ``new`` in ``path`` (below ``package``); ``test``: a pytest node id below tests/."""

    name: str
    path: str
    old: str
    new: str
    test: str
    reason: str
    package: str = "kda_kernels"


MUTANTS = (
    Mutant(
        "ring-after-norm",
        VERIFY,
        "k_raw, mask=kept & owns_k_head)",
        "l2_normalise(k_raw.to(tl.float32)).to(ACT), mask=kept & owns_k_head)",
        "test_oracle.py::test_verify_stays_within_fp32_error_of_the_oracle[B2-T3-H1-HV2-K64-bf16-pad0-fused]",
        "the ring holds k before the l2-norm; fold would normalise twice",
    ),
    Mutant(
        "raw-k-by-every-v-head",
        VERIFY,
        "k_raw, mask=kept & owns_k_head)",
        "k_raw, mask=kept & owns_head)",
        "test_cases_ownership.py::test_O1_every_element_has_one_writer[fused-ring]",
        "heads that share a k head would write the same bytes at once: no value shows it, the record of stores does",
    ),
    Mutant(
        "window-one-step-late",
        VERIFY,
        "    tl.store(p, x1, mask=mask)\n    tl.store(p + D, x2, mask=mask)\n    tl.store(p + 2 * D, x3, mask=mask)",
        "    tl.store(p + D, x1, mask=mask)\n    tl.store(p + 2 * D, x2, mask=mask)",
        "test_cases_ownership.py::test_O2_window_rows_by_batch_position[8-slots-unfused]",
        "the window after token t must end with token t itself, or the next round convolves old inputs",
    ),
    Mutant(
        "accept-ignored-by-fold",
        COMMIT,
        "    for t in range(0, accept.to(tl.int32)):",
        "    for t in range(0, limit):",
        "test_fold.py::test_fold_of_every_prefix_is_that_snapshot[B2-T3-H1-HV2-K64-bf16-pad0]",
        "rejected drafts must not reach the state",
    ),
    Mutant(
        "accept-ignored-by-scatter",
        COMMIT,
        "tl.load(p_src + (accept - 1) * N, mask=mask)",
        "tl.load(p_src + (limit - 1) * N, mask=mask)",
        "test_fold.py::test_scatters_copy_the_accepted_step[B2-T3-H1-HV2-K64-bf16-pad0]",
        "the window and snapshot of the last accepted token are the ones to keep, not the last token's",
    ),
    Mutant(
        "accept-zero-folds",
        COMMIT,
        "  # records past the request's own are older ones\n    if not (usable & valid & (accept > 0)):\n",
        "\n    accept = tl.maximum(accept, tl.where(usable, 1, 0))\n    if not (usable & valid):\n",
        "test_cases_accept.py::test_A1_accept_zero_leaves_everything_of_that_slot[B3-T2-H1-HV2-K64-bf16]",
        "accept 0 leaves the slot as it is",
    ),
    Mutant(
        "accept-not-bounded",
        COMMON,
        "    return accept, (accept >= 0) & (accept <= limit)",
        "    return tl.minimum(accept, limit), accept >= 0",
        "test_cases_accept.py::test_A2_accept_out_of_range_is_left_untouched_and_counted[B3-T2-H1-HV2-K64-bf16-100-kernels]",
        "an accept length that is too large is an error of the caller: the slot stays, nothing is guessed",
    ),
    Mutant(
        "padded-row-not-skipped",
        COMMON,
        "    slot = tl.load(slots + i).to(tl.int64)\n    return slot, (slot >= 0) & (slot < num_slots)",
        "    slot = tl.load(slots + i).to(tl.int64)\n    return tl.where(slot < 0, 0, slot), slot < num_slots",
        "test_cases_padding.py::test_P1_padded_rows_are_zero_and_untouched[B4-T2-H1-HV2-K64-bf16-pad123-ring-fused]",
        "slot -1 is no slot: zero output, nothing read or written (here it would become slot 0)",
    ),
    Mutant(
        "padded-output-not-zeroed",
        VERIFY,
        "            for t in tl.static_range(T):\n"
        "                tl.store(p_out + t * HV * V, tl.zeros([BLOCK_V], ACT))\n",
        "            pass\n",
        "test_cases_padding.py::test_P1_padded_rows_are_zero_and_untouched[B4-T2-H1-HV2-K64-bf16-pad123-ring-unfused]",
        "an uninitialised output row of a padded request would be somebody's NaN",
    ),
    Mutant(
        "gate-formula-swapped",
        ARITHMETIC,
        "    if SAFE_GATE:\n        g = lower_bound",
        "    if not SAFE_GATE:\n        g = lower_bound",
        "test_cases_gate.py::test_G1_both_gates_from_raw_inputs[B1-T2-H1-HV2-K64-bf16-fused]",
        "lower_bound given means the safe gate, absent means softplus",
    ),
    Mutant(
        "softplus-without-threshold",
        ARITHMETIC,
        "tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)",
        "tl.log(1.0 + tl.exp(x))",
        "test_cases_gate.py::test_G2_softplus_threshold[B1-T2-H1-HV2-K64-bf16-fused]",
        "exp(x) overflows fp32 above 88",
    ),
    Mutant(
        "beta-not-sigmoided",
        ARITHMETIC,
        "    return 1.0 / (1.0 + tl.exp(-b))",
        "    return b",
        "test_cases_gate.py::test_G4_beta_is_sigmoided_exactly_once[B1-T2-H1-HV2-K64-bf16-8.0-fused]",
        "b is a raw logit",
    ),
    Mutant(
        "beta-sigmoided-twice",
        ARITHMETIC,
        "    return 1.0 / (1.0 + tl.exp(-b))",
        "    return 1.0 / (1.0 + tl.exp(-(1.0 / (1.0 + tl.exp(-b)))))",
        "test_cases_gate.py::test_G4_beta_is_sigmoided_exactly_once[B1-T2-H1-HV2-K64-bf16--8.0-unfused]",
        "b is a raw logit, once",
    ),
    Mutant(
        "wrong-k-head-in-gqa",
        VERIFY,
        "    i_h = i_hv // (HV // H)\n",
        "    i_h = i_hv % H\n",
        "test_oracle.py::test_verify_stays_within_fp32_error_of_the_oracle"
        "[B3-T4-H2-HV4-K64-fp16-wfp32-nobias-safe-pad1-pitch8-fused]",
        "v head j reads k head j // (HV / H): neighbours share, not every H-th",
    ),
    Mutant(
        "wrong-k-head-in-fold",
        COMMIT,
        "    i_h = i_hv // (HV // H)\n",
        "    i_h = i_hv % H\n",
        "test_fold.py::test_fold_of_every_prefix_is_that_snapshot[B3-T4-H2-HV4-K64-fp16-wfp32-nobias-safe-pad1-pitch8]",
        "fold must map heads as verify does",
    ),
    Mutant(
        "another-reduction-tree",
        ARITHMETIC,
        "    p = tl.sum(tl.reshape(p, (R, 2, 8)), 1)\n    p = tl.sum(tl.reshape(p, (R, 2, 4)), 1)",
        "    p = tl.sum(tl.reshape(p, (R, 8, 2)), 2)\n    p = tl.sum(tl.reshape(p, (R, 4, 2)), 2)",
        "test_sum_order.py::test_sum_over_k_has_the_documented_order[64]",
        "the order of the sum over K is part of the contract",
    ),
    Mutant(
        "conv-product-not-rounded",
        ARITHMETIC,
        "        acc = acc + product.to(w.dtype).to(tl.float32)",
        "        acc = acc + product",
        "test_oracle.py::test_verify_stays_within_fp32_error_of_the_oracle[B2-T3-H1-HV2-K64-bf16-pad0-unfused]",
        "products with 16-bit weights are rounded to 16 bits, as SGLang's compiled kernels do",
    ),
    Mutant(
        "short-ring-overruns",
        VERIFY,
        "            kept = t < L  # records past the ring are dropped, not written into the next head's\n",
        "            kept = t < T\n",
        "test_cases_accept.py::test_A2_records_past_a_short_ring_are_dropped[B2-T3-H1-HV2-K64-bf16-L2-fused]",
        "record t >= L is the next head's record 0",
    ),
    Mutant(
        "verify-advances-state",
        VERIFY,
        "            tl.store(p_out + t * HV * V, dot_k(S, q).to(ACT))\n",
        "            tl.store(p_out + t * HV * V, dot_k(S, q).to(ACT))\n            tl.store(p_state, S)\n",
        "test_lanes_bits.py::test_fused_equals_unfused[B2-T3-H1-HV2-K64-bf16-pad0-ring]",
        "verify only reads the state: a rejected draft must be undone for free",
    ),
    Mutant(
        "slot-index-in-32-bits",
        COMMON,
        "    slot = tl.load(slots + i).to(tl.int64)\n    return",
        "    slot = tl.load(slots + i).to(tl.int32)\n    return",
        "test_cases_padding.py::test_P2_slot_met_on_the_device_is_padding_and_counted[4294967296-fused]",
        "2^32 cut to 32 bits is slot 0; and slot * pitch passes 2^31 in real pools",
    ),
    Mutant(
        "tracking-beyond-the-prefix",
        COMMON,
        "(step >= 0) & (step < accept)",
        "(step >= 0)",
        "test_fold.py::TestTracking::test_A6_conv_and_snapshot_scatters_track_too",
        "a step that was not accepted has no state to track",
    ),
    Mutant(
        "tracking-a-rejected-branch",
        COMMIT,
        "track = track & on_path(",
        "track = track | on_path(",
        "test_tree_tracking.py::test_A6_only_steps_on_the_accepted_path_are_tracked[star-kernels]",
        "a step before the last accepted one may be of another branch of the tree",
    ),
    Mutant(
        "no-tree-is-committed",
        COMMIT,
        "        usable = usable & is_tree\n",
        "",
        "test_tree_tracking.py::test_D4_no_tree_is_not_committed[a-later-step-kernels]",
        "verify has written nothing for such a request: its windows and snapshots are an older round's",
    ),
    Mutant(
        "row-not-by-position",
        COMMON,
        "        row = tl.cast(i, tl.int64)\n    return row",
        "        row = tl.cast(i, tl.int64) * 0\n    return row",
        "test_cases_ownership.py::test_O2_window_rows_by_batch_position[8-slots-fused]",
        "window and snapshot rows are batch positions",
    ),
    Mutant(
        "chunk-looks-ahead",
        CHUNKED,
        "row_of(Y, t_index, s)[None, :], t_index >= s)",
        "row_of(Y, t_index, s)[None, :], t_index >= 0)",
        "test_chunked_bits.py::test_a_later_token_that_is_not_finite_reaches_no_earlier_one"
        "[B2-T5-H1-HV2-K64-bf16-nan-fused]",
        "a coefficient of 0 times a later token's NaN is NaN: a token takes no part, not a part of 0",
    ),
    Mutant(
        "chunk-solve-looks-ahead",
        CHUNKED,
        "a_row, (t_index >= r) & (s_index < r))",
        "a_row, s_index < r)",
        "test_chunked_bits.py::test_a_later_token_that_is_not_finite_reaches_no_earlier_one"
        "[B2-T5-H1-HV2-K64-bf16-nan-unfused]",
        "rows of the triangular system above r have nothing to do with token r",
    ),
    Mutant(
        "chunk-solved-forwards",
        CHUNKED,
        "    for r in tl.static_range(T - 1, 0, -1):",
        "    for r in tl.static_range(1, T):",
        "test_chunked.py::test_outputs_stay_within_fp32_error_of_the_oracle[B2-T3-H1-HV2-K64-bf16-pad0-fused]",
        "a column of M is final only when all later ones have been taken off it",
    ),
    Mutant(
        "chunk-order-of-tokens",
        CHUNKED,
        "    for s in tl.static_range(T):",
        "    for s in tl.static_range(T - 1, -1, -1):",
        "test_chunked_order.py::test_every_operation_is_in_the_documented_order[5-64]",
        "the order of the sum over tokens is part of the contract",
    ),
    Mutant(
        "chunk-decays-one-late",
        CHUNKED,
        "    product = product * decay\n    decayed_q = tl.where(is_new, q * product, decayed_q)\n",
        "    decayed_q = tl.where(is_new, q * product, decayed_q)\n    product = product * decay\n",
        "test_chunked.py::test_outputs_stay_within_fp32_error_of_the_oracle[B2-T3-H1-HV2-K64-bf16-pad0-unfused]",
        "the state fades by a token's own decay before its query reads it",
    ),
    Mutant(
        "ragged-chunk-stores-all-tokens",
        VERIFY,
        "mask=t_index < (length if RAGGED else T))",
        "mask=t_index < T)",
        "test_ragged.py::test_the_order_of_programs_decides_nothing[B4-T3-H1-HV2-K64-bf16-chunked]",
        "the rows after a short request are its neighbour's: in program order that one would mend them",
    ),
    Mutant(
        "ragged-leftover-by-last-offset",
        BATCHES,
        "        unowned = (owners == 0) & (row < num_tokens)",
        "        unowned = (row >= tl.load(starts + batch)) & (row < num_tokens)",
        "test_ragged.py::test_wrong_ranges_are_counted_and_neighbours_untouched[before-the-beginning-ring-unfused]",
        "rows of nobody lie anywhere once an offset is wrong",
    ),
    Mutant(
        "ragged-commits-old-records",
        COMMIT,
        "        valid = valid & (accept <= length)  # records past the request's own are older ones\n",
        "",
        "test_ragged.py::test_fold_takes_accept_lengths_up_to_each_request[B4-T3-H1-HV2-K64-bf16-kernel]",
        "records past a short request are those of an older round",
    ),
    Mutant(
        "tree-state-of-the-token-before",
        VERIFY,
        "                if parent != t - 1:",
        "                if parent < -1:",
        "test_tree.py::test_each_path_has_the_bits_of_a_chain_of_its_own[B3-T6-H1-HV2-K64-bf16-pad1-int32-unfused]",
        "a token starts from its parent's state, not from a sibling's",
    ),
    Mutant(
        "tree-convolves-the-tokens-before",
        BATCHES,
        "mask=column >= 3, other=column - 4)",
        "mask=column < 0, other=column - 4)",
        "test_tree.py::test_each_path_has_the_bits_of_a_chain_of_its_own[B3-T6-H1-HV2-K64-bf16-pad1-int32-unfused]",
        "conv inputs and windows are a token's ancestors', not its neighbours in the batch",
    ),
    Mutant(
        "tree-of-later-parents",
        BATCHES,
        "(parent >= -1) & (parent < t)",
        "(parent >= -1) & (parent <= t)",
        "test_tree.py::test_D4_no_tree_is_counted_and_neighbours_are_served[itself-unfused]",
        "a token that follows itself would start from what an older round left in its snapshot",
    ),
    Mutant(
        "pending-folds-twice",
        PENDING,
        "    return tl.where(tl.load(folded) == now, 0, records)",
        "    return records",
        "test_fold_on_verify.py::test_a_repeated_verify_gives_the_same_and_replays_nothing_twice[tiles shrink]",
        "a verify that is repeated before commit must not replay records again",
    ),
    Mutant(
        "pending-forgets-the-bank",
        PENDING,
        "    return slot + bank * num_slots, slot + (1 - bank) * num_slots, records, valid",
        "    return slot, slot, records, valid",
        "test_fold_on_verify.py::test_a_verify_writes_one_bank_and_reads_the_other",
        "programs that still replay the old records must not meet new ones",
    ),
    Mutant(
        "flush-of-the-second-bank-as-a-slot",
        PENDING,
        "    slot, usable = load_slot(slots, i_n, num_slots)\n    _, bank,",
        "    slot, usable = load_slot(slots, i_n, 2 * num_slots)\n    _, bank,",
        "test_cases_fold_on_verify.py::test_P2_a_slot_of_the_second_bank_is_outside_the_pool[4-verify_unfused]",
        "the ring has slots that the pool has not",
    ),
    Mutant(
        "pending-folded-by-a-packed-pitch",
        VERIFY,
        "p_folded = folded + slot * folded_pitch +",
        "p_folded = folded + slot * (HV * V // 8) +",
        "test_cases_fold_on_verify.py::test_L4_odd_pitches[unfused-8]",
        "a pool's flags may lie at any pitch",
    ),
    Mutant(
        "pending-banks-not-swapped",
        PENDING,
        "    tl.store(parity + slot, 1 - bank)\n",
        "",
        "test_fold_on_verify.py::test_accept_zero_leaves_what_is_pending",
        "what was accepted lies in the bank that the last verify wrote",
    ),
    Mutant(
        "pending-cleared-by-accept-zero",
        PENDING,
        "    if not (usable & valid & (accept > 0)):",
        "    if not (usable & valid):",
        "test_fold_on_verify.py::test_accept_zero_leaves_what_is_pending",
        "a round that accepts nothing keeps what was pending before it",
    ),
    Mutant(
        "pending-epoch-stands-still",
        PENDING,
        "    tl.store(epoch + slot, now + 1)\n",
        "",
        "test_fold_on_verify.py::test_a_repeated_verify_gives_the_same_and_replays_nothing_twice[tiles shrink]",
        "flags of an older round would say that the new records are in the state",
    ),
    Mutant(
        "gather-tracks-the-new-state",
        GATHER,
        "    if HAS_TRACK:\n"
        "        y1, y2, y3 = columns_after(history, address, x_stride, tracked, channels, D, False)\n"
        "    tl.debug_barrier()\n    store_columns(history + channels, x1, x2, x3, D)\n",
        "    store_columns(history + channels, x1, x2, x3, D)\n"
        "    if HAS_TRACK:\n"
        "        y1, y2, y3 = columns_after(history, address, x_stride, tracked, channels, D, False)\n",
        "test_compact_window.py::test_tracking",
        "the tracked state's columns are among the committed ones of before",
    ),
    Mutant(
        "gather-takes-packed-inputs",
        GATHER,
        "    address += token * x_stride * ITEM",
        "    address += token * D * ITEM",
        "test_compact_window.py::test_inputs_of_any_pitch_and_alignment",
        "mixed_qkv may be columns of a wider tensor",
    ),
    Mutant(
        "gather-reads-past-the-batch",
        GATHER,
        "        in_range = in_range & (token + length <= rows)\n",
        "",
        "test_compact_window.py::TestFaults::test_rows_that_verify_was_not_given_are_not_read",
        "a range past the rows that verify was given is memory of somebody else",
    ),
    Mutant(
        "gather-one-column-early",
        GATHER,
        "    x3 = load_column(history, x, x_stride, tokens + 2, channels, D)",
        "    x3 = load_column(history, x, x_stride, tokens + 1, channels, D)",
        "test_compact_window.py::test_every_draft_length",
        "the new state ends with the last accepted token",
    ),
    Mutant(
        "gather-accepts-past-a-request",
        GATHER,
        "        valid = valid & (accept <= length)\n",
        "",
        "test_compact_window.py::TestFaults::test_ranges",
        "the rows after a short request's are the next one's",
    ),
    Mutant(
        "inputs-noted-by-no-program",
        VERIFY,
        "note_inputs(kept_inputs, pid == 0, x, x_stride, tl.num_programs(0) // (HV * NUM_V) * T)",
        "note_inputs(kept_inputs, pid == -1, x, x_stride, tl.num_programs(0) // (HV * NUM_V) * T)",
        "test_compact_window.py::test_every_draft_length",
        "without the note the gather finds no inputs, or those of an older round",
    ),
    Mutant(
        "inputs-noted-over-other-memory",
        "checks.py",
        ', ("state.kept_inputs", state.kept_inputs))',
        ")",
        "test_compact_window.py::TestRefusals::test_kept_inputs_that_overlap",
        "what verify writes may lie in no other argument",
    ),
    Mutant(
        "replay-forgets-where-inputs-are-noted",
        "overlap.py",
        "            if below < addresses[place] < above:\n                return False\n",
        "            pass\n",
        "test_replay_refusals.py::"
        "test_memory_that_verify_writes_its_inputs_to_is_refused_after_a_good_call_as_before_it",
        "inputs that moved onto the note must be refused as in a first call",
    ),
)
