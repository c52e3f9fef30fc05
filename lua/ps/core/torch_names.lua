-- SPDX-License-Identifier: BSD-3-Clause
-- Names that PyTorch has and psluajit lacks. An error about such a name says that psluajit lacks the function. It does
-- not suggest a similar name, because a similar name would mean another function (foreign.lua). foreign_names.lua has
-- formulas for some of these functions. Some tables of psluajit have functions named trace, fold and unfold, but these
-- functions do not compute the same as PyTorch's functions.
return {
  -- functions and methods of tensors
  ops = [[
    absolute acos acosh addbmm addr adjoint alpha_dropout aminmax angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh are_deterministic_algorithms_enabled argwhere as_strided as_strided_scatter as_tensor asarray asin asinh
    atan atan2 atanh atleast_1d atleast_2d atleast_3d bartlett_window bilinear binomial bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag
    broadcast_shapes broadcast_tensors broadcast_to byte cartesian_prod chain_matmul channel_shuffle char
    cholesky_inverse cholesky_solve column_stack combinations concat concatenate cond conj conj_physical
    constant_pad_nd conv3d conv_transpose3d copysign corrcoef cosh cov cross ctc_loss cummax cummin
    cumulative_trapezoid data_ptr deg2rad dequantize det diag_embed diagflat diagonal_scatter digamma dist divide
    dsplit dstack eig element_size empty_strided erfc erfinv exp2 fix fliplr flipud float_power fmax fmin frac frexp
    frobenius_norm from_dlpack frombuffer gcd ger get_default_device get_default_dtype get_device
    get_float32_matmul_precision get_num_interop_threads get_num_threads gradient greater greater_equal grid_sampler
    hamming_window hann_window hardshrink heaviside histc histogram histogramdd hsplit hstack hypot i0 igamma
    igammac index index_reduce initial_seed inner instance_norm is_floating_point
    is_nested is_nonzero is_pinned is_quantized is_same_size is_shared is_signed is_sparse is_sparse_csr isin
    isneginf isposinf isreal itemsize kaiser_window kron kthvalue lcm ldexp less less_equal lgamma logaddexp
    logaddexp2 logcumsumexp logdet logical_xor logit logspace lstsq lu lu_solve mH mT matrix_exp matrix_power
    matrix_rank max_pool3d mode moveaxis msort multiply mvlgamma nanmean nanmedian nanquantile nansum ndimension
    negative nelement new new_empty_strided new_tensor nextafter normal not_equal nuclear_norm pca_lowrank pdist
    pin_memory pinverse pixel_unshuffle poisson poisson_nll_loss polygamma positive promote_types put qr rad2deg
    range ravel register_post_accumulate_grad_hook renorm repeat resize resize_as result_type retains_grad rot90
    row_stack rrelu rsub scalar_tensor select_scatter set_default_tensor_type set_float32_matmul_precision
    set_flush_denormal set_num_interop_threads set_num_threads set_printoptions sgn short signbit sinc sinh
    slice_scatter slogdet split_with_sizes std_mean storage storage_offset storage_type subtract svd_lowrank take
    take_along_dim tan tensor_split tensordot threshold to_dense to_dlpack to_sparse trace trapezoid trapz
    triangular_solve true_divide unique_consecutive unravel_index untyped_storage use_deterministic_algorithms
    vander var_mean vdot vmap vsplit vstack xlogy
  ]],
  F = [[
    adaptive_avg_pool3d adaptive_max_pool3d affine_grid avg_pool3d dropout3d fold fractional_max_pool2d
    fractional_max_pool3d gumbel_softmax linear_cross_entropy local_response_norm lp_pool1d lp_pool2d lp_pool3d
    max_unpool1d max_unpool2d max_unpool3d multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
    soft_margin_loss softshrink tanhshrink triplet_margin_with_distance_loss unfold upsample upsample_bilinear
    upsample_nearest
  ]],
  nn = [[
    AdaptiveAvgPool3d AdaptiveLogSoftmaxWithLoss AdaptiveMaxPool3d AlphaDropout Bilinear Buffer CTCLoss
    ChannelShuffle CircularPad1d CircularPad2d CircularPad3d ConstantPad3d ConvTranspose3d CrossMapLRN2d
    FeatureAlphaDropout Fold FractionalMaxPool2d FractionalMaxPool3d Hardshrink LPPool1d LPPool2d LPPool3d
    LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d LazyConvTranspose1d
    LazyConvTranspose2d LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d LazyLinear
    LinearCrossEntropyLoss LocalResponseNorm MaxUnpool1d MaxUnpool2d MaxUnpool3d MultiLabelMarginLoss
    MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss2d PairwiseDistance PixelUnshuffle PoissonNLLLoss RNNBase
    RNNCellBase RReLU ReflectionPad3d ReplicationPad3d SoftMarginLoss Softmax2d Softshrink Tanhshrink Threshold
    TripletMarginWithDistanceLoss Unfold UpsamplingBilinear2d UpsamplingNearest2d ZeroPad3d
  ]],
}
