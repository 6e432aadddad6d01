"""The mistakes of `make mutants` (mutants.py): each is seen by a test."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    text: str
    instead: str
    tests: str  # arguments of pytest


_SIGNALS = "tests/symm_mem/test_signals.py"
_SEGMENTS = "tests/symm_mem/test_registration.py"
_TRANSFER = "tests/verification/test_transfer_protocol.py"
_MOVES = f"{_TRANSFER}::test_transfers_of_changing_kind"
_ASYNC = "tests/verification/test_async_protocol.py"
_CALLS = f"{_ASYNC}::test_calls_of_changing_kind"
_ACQUIRE = "tests/verification/test_acquire.py"
_LATE = "tests/verification/test_late_copies.py"
_IN_TURN = "tests/verification/test_sends_in_turn.py"
_CHOICES = "tests/fused_ops/dispatch/test_choices.py"
_ROUNDS = "tests/verification/test_collective_protocols.py"
_NORMS = "tests/fused_ops/ops/test_all_reduce_rms_norm.py"
_FIBER_NORMS = "tests/verification/test_all_reduce_rms_norm_protocol.py"
_SCATTER = "tests/fused_ops/ops/test_matmul_reduce_scatter.py"
_GRADIENTS = "tests/fused_ops/library/test_gradients.py -k held_gradients"
_SUMS = "tests/fused_ops/ops/test_grouped_matmul_sums.py"
_WIDE = 'torch.float32 if choice.algorithm == "host" else call.A.dtype'

# A file and the tests that see it; what stands there, and what instead.
_MISTAKES: dict[tuple[str, str], list[tuple[str, str]]] = {
    # symm_mem
    ("symm_mem/workspace.py", f"{_SIGNALS}::test_a_rank_that_only_receives_may_be_late"): [
        ("self._wait(peer, index, expected, exactly=False)", "return"),
        ("word.value = self.epoch", "word.value = self.epoch + 2"),
        (
            "self._wait(peer, index, self.epoch, exactly=True)",
            "self._wait(peer, index, self.epoch - 2, exactly=False)",
        ),
    ],
    ("symm_mem/workspace.py", f"{_SIGNALS}::test_halves_are_never_overwritten_before_they_are_read"): [
        ("self.epoch, exactly=True)", "self.epoch, exactly=False)")
    ],
    ("symm_mem/layout.py", f"{_SIGNALS}::test_the_parts_of_a_workspace_do_not_overlap"): [
        ("return self._DONE + buffer * self.world_size", "return self._DONE"),
        (
            "return first + buffer * self.world_size * self.flags_per_rank",
            "return first + buffer * self.flags_per_rank",
        ),
    ],
    ("symm_mem/layout.py", f"{_SIGNALS}::test_a_workspace_for_both_has_room_for_both"): [
        ("max(self.flags_per_rank, other.flags_per_rank),", "self.flags_per_rank,")
    ],
    ("symm_mem/failure/spin_wait.py", f"{_SIGNALS}::test_counters_wrap_around"): [
        ("return (seen - expected) & 0xFFFFFFFF < 0x80000000", "return seen >= expected")
    ],
    ("symm_mem/failure/spin_wait.py", f"{_SIGNALS}::test_a_long_wait_leaves_the_core_to_others"): [
        ("time.sleep(_NAP)", "pass")
    ],
    ("symm_mem/registration/engine.py", _SEGMENTS): [
        ("self._wait(of, access.op, access.peer, ALLOWED, expected)", ""),
        ("self._wait(of, op, peer, DONE, expected)", ""),
    ],
    ("symm_mem/heap/placement.py", "tests/symm_mem/test_heap.py"): [("- end >= size:", "- end > size:")],
    # kernels between CPU ranks
    ("fused_ops/ops/matmul_reduce_scatter.py", f"{_SCATTER}::test_sums_in_float32_in_rank_order"): [
        (_WIDE, "call.A.dtype")
    ],
    ("kernels/device/collective/host_exchange.py", f"{_SCATTER}::test_sums_in_float32_in_rank_order"): [
        ("take(chunk, arrived)", "take(chunk, arrived[::-1])")
    ],
    (
        "fused_ops/ops/matmul_all_reduce.py",
        "tests/fused_ops/ops/test_matmul_all_reduce.py::test_own_parts_are_not_rounded",
    ): [(_WIDE, "call.A.dtype")],
    (
        "fused_ops/ops/scaled_matmul_reduce_scatter.py",
        "tests/fused_ops/ops/test_scaled_matmuls.py::test_sums_in_float32_in_rank_order",
    ): [("product = exact_product(*operands)", "product = exact_product(*operands).to(out_dtype)")],
    ("kernels/all_reduce_rms_norm/reference.py", f"{_NORMS}::test_eps_shows"): [
        (
            "(wide.square().mean(-1, keepdim=True) + eps).rsqrt()",
            "wide.square().mean(-1, keepdim=True).rsqrt()",
        ),
        ("keepdim=True) + eps).rsqrt()", "keepdim=True) + 1e-5).rsqrt()"),
        ("keepdim=True) + eps).rsqrt()", "keepdim=True) + 2 * eps).rsqrt()"),
    ],
    (
        "kernels/device/collective/host_exchange.py",
        "tests/fused_ops/ops/test_all_reduce.py::test_sums_are_rounded_once",
    ): [(".to(torch.float32, copy=True)", ".clone()")],
    (
        "fused_ops/ops/all_gather_matmul.py",
        "tests/fused_ops/ops/test_all_gather_matmul.py::test_sums_in_float32",
    ): [("a.float() @ b.float()", "(a @ b).float()")],
    ("kernels/device/collective/host_exchange.py", "tests/fused_ops/ops/test_all_reduce.py"): [
        ("return total / len(parts) if", "return total if")
    ],
    ("kernels/device/collective/host_exchange.py", "tests/fused_ops/ops/test_reduce_scatter.py"): [
        ("part.to(torch.float32)", "part.to(torch.bfloat16).to(torch.float32)")
    ],
    # kernels of GPUs, as fibers
    ("kernels/transfer/kernel.cu", _MOVES): [
        ("    weft::wait_flag(watch, p.peer, p.awaited, n, weft::WAIT_FREE);\n", ""),
        ("weft::wait_flag(watch, p.peer, p.awaited, n, weft::WAIT_FREE) && !broken", "!broken"),
        ("weft::fence_system();\n        if (atomicAdd", "if (atomicAdd"),
        ("weft::fence_system();  // after", "// after"),
        ("*p.ticket = 0;", ""),
    ],
    ("kernels/transfer/kernel.cu", f"{_TRANSFER}::test_a_broken_group_moves_and_posts_nothing"): [
        (
            "if (!broken) weft::post_flag(p.told, n);\n    *p.count",
            "weft::post_flag(p.told, n);\n    *p.count",
        ),
        ("weft::WAIT_FREE) && !broken;", "weft::WAIT_FREE);"),
    ],
    ("kernels/transfer/cuda_kernel.py", _MOVES): [
        ("            data.ours,\n", "            1,\n"),
        ("transfer.first = blocks", "transfer.first = 0"),
        ("int(count == SENT),", "1,"),
    ],
    ("kernels/async_collectives/kernel.cu", _CALLS): [
        (
            "p.buffer.flags + peer * p.buffer.flags_per_rank, epoch, weft::WAIT_DATA);",
            "0, epoch, weft::WAIT_FREE), there = true;",
        ),
        ("if (peer == 0) p.watch.words[p.buffer.left] = 0;", ""),
        ("if (peer == 0) p.watch.words[p.buffer.epoch] = epoch;", ""),
    ],
    ("kernels/async_collectives/kernel.cu", f"{_ASYNC}::test_a_broken_group_uses_nothing"): [
        ("__syncthreads_and(there && !weft::is_broken(p.watch))", "__syncthreads_and(there)")
    ],
    ("kernels/async_collectives/kernel.cu", f"{_ASYNC} -k changing"): [("== gridDim.x - 1", "== 0")],
    ("kernels/async_collectives/cuda_kernel.py", _CALLS): [
        ("self._engine.join(buffer)  # also", "pass  # also")
    ],
    ("kernels/device/comm/acquire.cu", f"{_ACQUIRE}::test_the_gate_stays_shut_for_one_that_has_not"): [
        ("p.buffer.done + peer, last, weft::WAIT_FREE", "p.buffer.done + peer, last - 1, weft::WAIT_FREE")
    ],
    ("kernels/device/comm/acquire.cu", _ACQUIRE): [
        ("bool free = !serves || blamed == 0;", "bool free = true;")
    ],
    ("kernels/device/comm/abort_notice.cuh", f"{_ACQUIRE} {_LATE}"): [
        ("post_flag(on_rank(watch.fault, watch, buffer, peer) + ABORT_NOTICE + watch.rank, 1 + blamed);", "")
    ],
    ("kernels/device/comm/copy_engine.py", f"{_CALLS} {_LATE}"): [("self._stream.wait_event(begin)", "pass")],
    ("kernels/device/comm/credits.cuh", f"{_ROUNDS}::test_many_epochs_in_a_launch -k None"): [
        ("            hear(epoch - 1);\n", "")
    ],
    ("kernels/device/collective/exact.cuh", f"{_ROUNDS}::test_many_epochs_in_a_launch -k None"): [
        ("reset_payload_word(word);", "")
    ],
    ("kernels/device/comm/ll_exchange.cuh", f"{_IN_TURN}::test_one_peer_after_the_other"): [
        ("return turn + 1;", "return WORLD_SIZE;")
    ],
    ("kernels/all_reduce/kernel.cu", f"{_IN_TURN}::test_results_are_the_same -k all_reduce"): [
        ("load_from<WHOLE, true>", "load_from<WHOLE, false>")
    ],
    ("fused_ops/dispatch/plan.py", f"{_CHOICES}::test_over_pcie_collectives_send_in_turn"): [
        ("where.world_size > 2 and where", "where")
    ],
    ("kernels/all_reduce_rms_norm/rows.cuh", _FIBER_NORMS): [
        ("rsqrtf(squares / p.elements + p.eps)", "rsqrtf(squares / p.elements)")
    ],
    # fused_ops/ops
    ("fused_ops/ops/all_reduce_rms_norm.py", f"{_NORMS}::test_eps_shows"): [
        (
            "scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()",
            "scale = wide.square().mean(-1, keepdim=True).rsqrt()",
        )
    ],
    (
        "fused_ops/ops/all_reduce_rms_norm.py",
        f"tests/fused_ops/ops/test_all_reduce_layer_norm.py {_NORMS} -k 'gradients or eps'",
    ): [("- unit * (through * unit).mean(-1, keepdim=True)\n", "\n")],
    ("fused_ops/ops/reduce_scatter.py", _GRADIENTS): [
        ("        grad = grad / resolve_group(group_name).size()", "        pass")
    ],
    ("fused_ops/ops/matmul_reduce_scatter.py", _GRADIENTS): [
        (
            "grad_residual = grad.to(ctx.dtype) if needs_residual else None",
            "grad_residual = 2 * grad.to(ctx.dtype) if needs_residual else None",
        )
    ],
    ("fused_ops/ops/all_gather_matmul.py", _GRADIENTS): [
        ("grad_shard = rest if grad_shard is None else grad_shard + rest", "grad_shard = rest")
    ],
    # passes
    (
        "fused_ops/passes/memory/hazards.py",
        "tests/fused_ops/passes/memory/test_memory.py tests/fused_ops/passes/order/test_reorder.py",
    ): [("before.update(read.pop(each, ()))", "read.pop(each, ())")],
    ("fused_ops/passes/memory/hazards.py", "tests/fused_ops/passes/memory/test_memory_accounts.py"): [
        ("segment += 2", "segment += 0")
    ],
    (
        "fused_ops/passes/norms/norm.py",
        "tests/fused_ops/passes/norms/test_norms_left_alone.py tests/fused_ops/passes/norms/test_norm_forms.py",
    ): [("return node.args == (x, 2)", "return node.args[0] is x")],
    (
        "fused_ops/passes/graph/row_wise.py",
        (
            "tests/fused_ops/passes/norms/test_norms_left_alone.py "
            "tests/fused_ops/passes/norms/test_layer_norms_left_alone.py"
        ),
    ): [("return reduced_dims(node) == [val(x).dim() - 1]", "return True")],
    ("fused_ops/passes/norms/norm.py", "tests/fused_ops/passes/norms/test_norm_forms.py"): [
        (
            "return FoundNorm(nodes[-1], weight.node, eps, nodes, read, weight.offset, bias.node, layer)",
            "return FoundNorm(nodes[-1], weight.node, 1e-5, nodes, read, weight.offset, bias.node, layer)",
        )
    ],
    ("fused_ops/passes/records/entry.py", "tests/fused_ops/passes/records/test_report_groups.py"): [
        ("number == parts[-1][-1] + 1", "number == parts[-1][-1] + 2")
    ],
    ("fused_ops/passes/patterns/one_product.py", "tests/fused_ops/passes/order/test_at_once.py"): [
        (
            "if i > 1 and early > 2 * (largest + _made_and_used(at, node)):",
            "if i > 1 and early > 20 * (largest + _made_and_used(at, node)):",
        )
    ],
    (
        "fused_ops/passes/order/exposure.py",
        (
            "tests/fused_ops/passes/order/test_costs.py tests/fused_ops/passes/order/test_order_picture.py "
            "tests/fused_ops/passes/order/test_reorder.py"
        ),
    ): [("now += late", "now += 0")],
    (
        "fused_ops/passes/agreement/signature.py",
        "tests/fused_ops/passes/sequence_parallel/test_own_rows_left.py::test_what_meets_own_rows_is_compared",
    ): [("lines += [_computed(node) for node in graph.nodes if COMPARED in node.meta]", "")],
    (
        "fused_ops/passes/sequence_parallel/same.py",
        "tests/fused_ops/passes/sequence_parallel/test_own_rows_left.py::test_which_gradients_are_whole",
    ): [(" or len(weights) > 1", "")],
    # experts
    ("fused_ops/ops/experts/grouped_matmul_sums.py", f"{_SUMS}::test_backward"): [
        ("[chosen // choices]", "[chosen.clamp(max=grad.shape[0])]"),
        ("dots = dots + (added.float() * of_rows).sum(1)", "pass"),
        ("unweighted = torch.where(here, unweighted, 0).float()", "unweighted = unweighted.float()"),
    ],
    (
        "fused_ops/layers/conjugates.py",
        "tests/fused_ops/layers/test_layers_experts.py::test_like_plain_experts",
    ): [("return torch.zeros_like(x) if rank else x.clone()", "return x.clone()")],
}
MUTANTS = [Mutant(file, *change, tests) for (file, tests), of in _MISTAKES.items() for change in of]
