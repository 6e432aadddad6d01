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
_SUMS = "tests/fused_ops/ops/test_grouped_matmul_sums.py"
_WIDE = 'torch.float32 if choice.algorithm == "host" else call.A.dtype'

MUTANTS = [
    # symm_mem
    Mutant(
        "symm_mem/workspace.py",
        "self._wait(peer, index, expected, exactly=False)",
        "return",
        f"{_SIGNALS}::test_a_rank_that_only_receives_may_be_late",
    ),
    Mutant(
        "symm_mem/workspace.py",
        "word.value = self.epoch",
        "word.value = self.epoch + 2",
        f"{_SIGNALS}::test_a_rank_that_only_receives_may_be_late",
    ),
    Mutant(
        "symm_mem/workspace.py",
        "self._wait(peer, index, self.epoch, exactly=True)",
        "self._wait(peer, index, self.epoch - 2, exactly=False)",
        f"{_SIGNALS}::test_a_rank_that_only_receives_may_be_late",
    ),
    Mutant(
        "symm_mem/workspace.py",
        "self.epoch, exactly=True)",
        "self.epoch, exactly=False)",
        f"{_SIGNALS}::test_halves_are_never_overwritten_before_they_are_read",
    ),
    Mutant(
        "symm_mem/layout.py",
        "return self._DONE + buffer * self.world_size",
        "return self._DONE",
        f"{_SIGNALS}::test_the_parts_of_a_workspace_do_not_overlap",
    ),
    Mutant(
        "symm_mem/layout.py",
        "return first + buffer * self.world_size * self.flags_per_rank",
        "return first + buffer * self.flags_per_rank",
        f"{_SIGNALS}::test_the_parts_of_a_workspace_do_not_overlap",
    ),
    Mutant(
        "symm_mem/layout.py",
        "max(self.flags_per_rank, other.flags_per_rank),",
        "self.flags_per_rank,",
        f"{_SIGNALS}::test_a_workspace_for_both_has_room_for_both",
    ),
    Mutant(
        "symm_mem/failure/spin_wait.py",
        "return (seen - expected) & 0xFFFFFFFF < 0x80000000",
        "return seen >= expected",
        f"{_SIGNALS}::test_counters_wrap_around",
    ),
    Mutant(
        "symm_mem/failure/spin_wait.py",
        "time.sleep(_NAP)",
        "pass",
        f"{_SIGNALS}::test_a_long_wait_leaves_the_core_to_others",
    ),
    Mutant(
        "symm_mem/registration/engine.py",
        "self._wait(of, access.op, access.peer, ALLOWED, expected)",
        "",
        _SEGMENTS,
    ),
    Mutant("symm_mem/registration/engine.py", "self._wait(of, op, peer, DONE, expected)", "", _SEGMENTS),
    Mutant("symm_mem/heap/placement.py", "- end >= size:", "- end > size:", "tests/symm_mem/test_heap.py"),
    # kernels between CPU ranks
    Mutant(
        "fused_ops/ops/matmul_reduce_scatter.py",
        _WIDE,
        "call.A.dtype",
        f"{_SCATTER}::test_sums_in_float32_in_rank_order",
    ),
    Mutant(
        "kernels/device/collective/host_exchange.py",
        "take(chunk, arrived)",
        "take(chunk, arrived[::-1])",
        f"{_SCATTER}::test_sums_in_float32_in_rank_order",
    ),
    Mutant(
        "fused_ops/ops/matmul_all_reduce.py",
        _WIDE,
        "call.A.dtype",
        "tests/fused_ops/ops/test_matmul_all_reduce.py::test_own_parts_are_not_rounded",
    ),
    Mutant(
        "fused_ops/ops/scaled_matmul_reduce_scatter.py",
        "product = exact_product(*operands)",
        "product = exact_product(*operands).to(out_dtype)",
        "tests/fused_ops/ops/test_scaled_matmuls.py::test_sums_in_float32_in_rank_order",
    ),
    Mutant(
        "kernels/all_reduce_rms_norm/reference.py",
        "scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()",
        "scale = wide.square().mean(-1, keepdim=True).rsqrt()",
        f"{_NORMS}::test_eps_shows",
    ),
    Mutant(
        "kernels/all_reduce_rms_norm/reference.py",
        "scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()",
        "scale = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()",
        f"{_NORMS}::test_eps_shows",
    ),
    Mutant(
        "kernels/all_reduce_rms_norm/reference.py",
        "normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()",
        "normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()",
        f"{_NORMS}::test_eps_shows",
    ),
    Mutant(
        "kernels/device/collective/host_exchange.py",
        ".to(torch.float32, copy=True)",
        ".clone()",
        "tests/fused_ops/ops/test_all_reduce.py::test_sums_are_rounded_once",
    ),
    Mutant(
        "fused_ops/ops/all_gather_matmul.py",
        "a.float() @ b.float()",
        "(a @ b).float()",
        "tests/fused_ops/ops/test_all_gather_matmul.py::test_sums_in_float32",
    ),
    Mutant(
        "kernels/device/collective/host_exchange.py",
        "return total / len(parts) if",
        "return total if",
        "tests/fused_ops/ops/test_all_reduce.py",
    ),
    Mutant(
        "kernels/device/collective/host_exchange.py",
        "part.to(torch.float32)",
        "part.to(torch.bfloat16).to(torch.float32)",
        "tests/fused_ops/ops/test_reduce_scatter.py",
    ),
    # kernels of GPUs, as fibers
    Mutant(
        "kernels/transfer/kernel.cu",
        "    weft::wait_flag(watch, p.peer, p.awaited, n, weft::WAIT_FREE);\n",
        "",
        _MOVES,
    ),
    Mutant(
        "kernels/transfer/kernel.cu",
        "weft::wait_flag(watch, p.peer, p.awaited, n, weft::WAIT_FREE) && !broken",
        "!broken",
        _MOVES,
    ),
    Mutant(
        "kernels/transfer/kernel.cu", "weft::fence_system();\n        if (atomicAdd", "if (atomicAdd", _MOVES
    ),
    Mutant("kernels/transfer/kernel.cu", "weft::fence_system();  // after", "// after", _MOVES),
    Mutant("kernels/transfer/kernel.cu", "*p.ticket = 0;", "", _MOVES),
    Mutant(
        "kernels/transfer/kernel.cu",
        "if (!broken) weft::post_flag(p.told, n);\n    *p.count",
        "weft::post_flag(p.told, n);\n    *p.count",
        f"{_TRANSFER}::test_a_broken_group_moves_and_posts_nothing",
    ),
    Mutant(
        "kernels/transfer/kernel.cu",
        "weft::WAIT_FREE) && !broken;",
        "weft::WAIT_FREE);",
        f"{_TRANSFER}::test_a_broken_group_moves_and_posts_nothing",
    ),
    Mutant("kernels/transfer/cuda_kernel.py", "            data.ours,\n", "            1,\n", _MOVES),
    Mutant("kernels/transfer/cuda_kernel.py", "transfer.first = blocks", "transfer.first = 0", _MOVES),
    Mutant("kernels/transfer/cuda_kernel.py", "int(count == SENT),", "1,", _MOVES),
    Mutant(
        "kernels/async_collectives/kernel.cu",
        "p.buffer.flags + peer * p.buffer.flags_per_rank, epoch, weft::WAIT_DATA);",
        "0, epoch, weft::WAIT_FREE), there = true;",
        _CALLS,
    ),
    Mutant(
        "kernels/async_collectives/kernel.cu",
        "__syncthreads_and(there && !weft::is_broken(p.watch))",
        "__syncthreads_and(there)",
        f"{_ASYNC}::test_a_broken_group_uses_nothing",
    ),
    Mutant("kernels/async_collectives/kernel.cu", "== gridDim.x - 1", "== 0", f"{_ASYNC} -k changing"),
    Mutant(
        "kernels/async_collectives/kernel.cu", "if (peer == 0) p.watch.words[p.buffer.left] = 0;", "", _CALLS
    ),
    Mutant(
        "kernels/async_collectives/kernel.cu",
        "if (peer == 0) p.watch.words[p.buffer.epoch] = epoch;",
        "",
        _CALLS,
    ),
    Mutant(
        "kernels/async_collectives/cuda_kernel.py",
        "self._engine.join(buffer)  # also",
        "pass  # also",
        _CALLS,
    ),
    Mutant(
        "kernels/device/comm/acquire.cu",
        "p.buffer.done + peer, last, weft::WAIT_FREE",
        "p.buffer.done + peer, last - 1, weft::WAIT_FREE",
        f"{_ACQUIRE}::test_the_gate_stays_shut_for_one_that_has_not",
    ),
    Mutant(
        "kernels/device/comm/acquire.cu", "bool free = !serves || blamed == 0;", "bool free = true;", _ACQUIRE
    ),
    Mutant(
        "kernels/device/comm/abort_notice.cuh",
        "post_flag(on_rank(watch.fault, watch, buffer, peer) + ABORT_NOTICE + watch.rank, 1 + blamed);",
        "",
        f"{_ACQUIRE} {_LATE}",
    ),
    Mutant(
        "kernels/device/comm/copy_engine.py", "self._stream.wait_event(begin)", "pass", f"{_CALLS} {_LATE}"
    ),
    Mutant(
        "kernels/device/comm/credits.cuh",
        "            hear(epoch - 1);\n",
        "",
        f"{_ROUNDS}::test_many_epochs_in_a_launch -k None",
    ),
    Mutant(
        "kernels/device/collective/exact.cuh",
        "reset_payload_word(word);",
        "",
        f"{_ROUNDS}::test_many_epochs_in_a_launch -k None",
    ),
    Mutant(
        "kernels/device/comm/ll_exchange.cuh",
        "return turn + 1;",
        "return WORLD_SIZE;",
        f"{_IN_TURN}::test_one_peer_after_the_other",
    ),
    Mutant(
        "kernels/all_reduce/kernel.cu",
        "load_from<WHOLE, true>",
        "load_from<WHOLE, false>",
        f"{_IN_TURN}::test_results_are_the_same -k all_reduce",
    ),
    Mutant(
        "fused_ops/dispatch/plan.py",
        "where.world_size > 2 and where",
        "where",
        f"{_CHOICES}::test_over_pcie_collectives_send_in_turn",
    ),
    Mutant(
        "kernels/all_reduce_rms_norm/rows.cuh",
        "rsqrtf(squares / p.elements + p.eps)",
        "rsqrtf(squares / p.elements)",
        _FIBER_NORMS,
    ),
    # fused_ops/ops
    Mutant(
        "fused_ops/ops/all_reduce_rms_norm.py",
        "scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()",
        "scale = wide.square().mean(-1, keepdim=True).rsqrt()",
        f"{_NORMS}::test_eps_shows",
    ),
    Mutant(
        "fused_ops/ops/all_reduce_rms_norm.py",
        "- unit * (through * unit).mean(-1, keepdim=True)\n",
        "\n",
        f"tests/fused_ops/ops/test_all_reduce_layer_norm.py {_NORMS} -k 'gradients or eps'",
    ),
    Mutant(
        "fused_ops/ops/reduce_scatter.py",
        "        grad = grad / resolve_group(group_name).size()",
        "        pass",
        "tests/fused_ops/ops/test_reduce_scatter.py -k gradient",
    ),
    Mutant(
        "fused_ops/ops/matmul_reduce_scatter.py",
        "grad_residual = grad.to(ctx.dtype) if needs_residual else None",
        "grad_residual = 2 * grad.to(ctx.dtype) if needs_residual else None",
        "tests/fused_ops/ops/test_reduce_scatter_terms.py",
    ),
    Mutant(
        "fused_ops/ops/all_gather_matmul.py",
        "grad_shard = rest if grad_shard is None else grad_shard + rest",
        "grad_shard = rest",
        "tests/fused_ops/ops/test_all_gather_matmul.py -k gradient",
    ),
    # passes
    Mutant(
        "fused_ops/passes/memory/hazards.py",
        "before.update(read.pop(each, ()))",
        "read.pop(each, ())",
        "tests/fused_ops/passes/memory/test_memory.py tests/fused_ops/passes/order/test_reorder.py",
    ),
    Mutant(
        "fused_ops/passes/memory/hazards.py",
        "segment += 2",
        "segment += 0",
        "tests/fused_ops/passes/memory/test_memory_accounts.py",
    ),
    Mutant(
        "fused_ops/passes/norms/norm.py",
        "return node.args == (x, 2)",
        "return node.args[0] is x",
        "tests/fused_ops/passes/norms/test_norms_left_alone.py tests/fused_ops/passes/norms/test_norm_forms.py",
    ),
    Mutant(
        "fused_ops/passes/graph/row_wise.py",
        "return reduced_dims(node) == [val(x).dim() - 1]",
        "return True",
        "tests/fused_ops/passes/norms/test_norms_left_alone.py "
        "tests/fused_ops/passes/norms/test_layer_norms_left_alone.py",
    ),
    Mutant(
        "fused_ops/passes/norms/norm.py",
        "return FoundNorm(nodes[-1], weight.node, eps, nodes, read, weight.offset, bias.node, layer)",
        "return FoundNorm(nodes[-1], weight.node, 1e-5, nodes, read, weight.offset, bias.node, layer)",
        "tests/fused_ops/passes/norms/test_norm_forms.py",
    ),
    Mutant(
        "fused_ops/passes/records/entry.py",
        "number == parts[-1][-1] + 1",
        "number == parts[-1][-1] + 2",
        "tests/fused_ops/passes/records/test_report_groups.py",
    ),
    Mutant(
        "fused_ops/passes/patterns/one_product.py",
        "if i > 1 and early > 2 * (largest + _made_and_used(at, node)):",
        "if i > 1 and early > 20 * (largest + _made_and_used(at, node)):",
        "tests/fused_ops/passes/order/test_at_once.py",
    ),
    Mutant(
        "fused_ops/passes/order/exposure.py",
        "now += late",
        "now += 0",
        "tests/fused_ops/passes/order/test_costs.py tests/fused_ops/passes/order/test_order_picture.py "
        "tests/fused_ops/passes/order/test_reorder.py",
    ),
    Mutant(
        "fused_ops/passes/agreement/signature.py",
        "lines += [_computed(node) for node in graph.nodes if COMPARED in node.meta]",
        "",
        "tests/fused_ops/passes/sequence_parallel/test_own_rows_left.py::test_what_meets_own_rows_is_compared",
    ),
    Mutant(
        "fused_ops/passes/sequence_parallel/same.py",
        " or len(weights) > 1",
        "",
        "tests/fused_ops/passes/sequence_parallel/test_own_rows_left.py::test_which_gradients_are_whole",
    ),
    # experts
    Mutant(
        "fused_ops/ops/experts/grouped_matmul_sums.py",
        "[chosen // choices]",
        "[chosen.clamp(max=grad.shape[0])]",
        f"{_SUMS}::test_backward",
    ),
    Mutant(
        "fused_ops/ops/experts/grouped_matmul_sums.py",
        "dots = dots + (added.float() * of_rows).sum(1)",
        "pass",
        f"{_SUMS}::test_backward",
    ),
    Mutant(
        "fused_ops/ops/experts/grouped_matmul_sums.py",
        "unweighted = torch.where(here, unweighted, 0).float()",
        "unweighted = unweighted.float()",
        f"{_SUMS}::test_backward",
    ),
    Mutant(
        "fused_ops/layers/conjugates.py",
        "return torch.zeros_like(x) if rank else x.clone()",
        "return x.clone()",
        "tests/fused_ops/layers/test_layers_experts.py::test_like_plain_experts",
    ),
]
