"""Kernels for Hopper (sm_90a) in Gluon: warp roles, TMA and wgmma, FlashAttention-3's design."""
