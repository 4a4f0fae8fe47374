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
    grid_sampler_3d grid_sample linspace logspace unravel_index rot90 kron cosine_embedding_loss gaussian_nll_loss
    hinge_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
    poisson_nll_loss triplet_margin_loss triplet_margin_with_distance_loss
"""


def register_builtin_rules(registry: RuleRegistry) -> None:
    """Register every built-in rule.

    Raises:
        ValueError: an operation is in two tables.
    """
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
