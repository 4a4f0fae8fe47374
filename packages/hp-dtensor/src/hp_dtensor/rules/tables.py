"""The registry of all sharding rules: the tables of this folder and the rules of plugins."""

from __future__ import annotations

import functools

from hp_dtensor.platform.plugins import plugin_manager
from hp_dtensor.rules import (
    cat_split_pad_roll,
    gather_scatter,
    indexing,
    layers,
    linear_algebra,
    losses,
    pointwise,
    random,
    reductions,
    views,
)
from hp_dtensor.rules.registry import RuleRegistry

TABLES = (
    pointwise,
    reductions,
    linear_algebra,
    views,
    cat_split_pad_roll,
    indexing,
    gather_scatter,
    layers,
    losses,
    random,
)

# A rank's shard of the operands does not determine any shard of these results. Sharded and partial operands are
# gathered first, as torch's DTensor does, and the results are replicated. Such a gather raises inside
# `explicit_redistribution` and is counted by `CommDebugMode`. An operation may be listed here only if it is pure: it
# writes no argument, draws no random numbers and does not depend on strides.
REPLICATED_OPERATIONS = """
    _chunk_cat _softmax_backward_data _unsafe_masked_index _unsafe_masked_index_put_accumulate
    _upsample_bilinear2d_aa adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices
    adaptive_max_pool3d_with_indices addbmm addr bilinear bincount block_diag broadcast_tensors cartesian_prod
    channel_shuffle cholesky cholesky_inverse cholesky_solve col2im combinations constant_pad_nd corrcoef
    cosine_embedding_loss cov ctc_loss cumulative_trapezoid det diagflat diagonal_scatter dist fft_fft fft_fft2
    fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft
    fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn gaussian_nll_loss geqrf
    gradient grid_sample grid_sampler_2d grid_sampler_3d hash_tensor hinge_embedding_loss histc histogram
    histogramdd im2col inverse isin istft item kron linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det
    linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
    linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor
    linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_matrix_norm linalg_matrix_power
    linalg_matrix_rank linalg_multi_dot linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
    linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander
    linalg_vecdot linear_cross_entropy linspace local_response_norm logdet logspace lu lu_solve lu_unpack
    margin_ranking_loss masked_scatter matrix_exp matrix_power max_pool1d_with_indices max_pool2d_with_indices
    max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d meshgrid msort multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss native_group_norm native_layer_norm nonzero_static ormqr
    pdist pinverse poisson_nll_loss put qr renorm rot90 segment_reduce select_scatter slice_scatter slogdet stft
    sum_to_size svd take trapezoid trapz triangular_solve triplet_margin_loss unravel_index
"""


def register_builtin_rules(registry: RuleRegistry) -> None:
    """Register every built-in rule."""
    for table in TABLES:
        table.register(registry)
    registry.register_replicated(REPLICATED_OPERATIONS)


@functools.cache
def rule_registry() -> RuleRegistry:
    """Return the registry of all sharding rules: the built-in ones, then those of plugins."""
    registry = RuleRegistry()
    register_builtin_rules(registry)
    plugin_manager().hook.hp_sharding_rules(registry=registry)
    return registry
