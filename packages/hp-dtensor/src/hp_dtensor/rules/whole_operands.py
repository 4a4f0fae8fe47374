"""Operations that every rank computes on whole operands: no part of a result comes of a part of the operands alone.

Cut and partial operands are gathered, as torch's DTensor does; results are replicated. `explicit_redistribution` raises
where that sends anything, and `CommDebugMode` counts the gathers. Each of them is pure: it writes no argument, draws no
random numbers and does not look at strides.
"""

from __future__ import annotations

from hp_dtensor.rules.engine.registry import RuleRegistry

WHOLE = """
    _chunk_cat _softmax_backward_data _unsafe_masked_index _unsafe_masked_index_put_accumulate
    _upsample_bilinear2d_aa addbmm addr block_diag broadcast_tensors cartesian_prod combinations constant_pad_nd
    corrcoef cov
    ctc_loss cumulative_trapezoid diagflat diagonal_scatter dist gradient hash_tensor histc histogram histogramdd isin
    item linalg_cond linalg_ldl_solve linalg_lstsq linalg_lu_solve linalg_matrix_norm linalg_matrix_rank
    linalg_multi_dot linalg_solve_ex linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot
    local_response_norm lu lu_solve lu_unpack masked_scatter max_unpool1d max_unpool2d max_unpool3d msort
    native_group_norm native_layer_norm ormqr pdist put qr renorm segment_reduce select_scatter slice_scatter
    stft istft sum_to_size svd take trapezoid trapz triangular_solve linear_cross_entropy
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices nonzero_static grid_sampler_2d
    grid_sampler_3d grid_sample linspace logspace unravel_index
"""


def register(registry: RuleRegistry) -> None:
    registry.register_whole(WHOLE)
