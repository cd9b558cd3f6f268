"""Every name that a measurement file may use for a thing: columns, implementations, passes, machines, kernels.

One table each.  Matching ignores case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# What iosim calls a column, and what files call it.  Looked up from the top, each column of a file once: `kernel` is
# the implementation in a file without `impl`, and the name of a launched kernel in one with it.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "implementation": ("implementation", "impl", "kernel"),
    "kernel name": ("kernel_name", "kernel"),
    "direction": ("pass", "direction"),
    "dtype": ("dtype", "data_type"),
    "batch": ("batch", "b", "batch_size"),
    "heads": ("heads", "h", "n_heads", "num_heads"),
    "kv_heads": ("kv_heads", "n_kv_heads", "num_kv_heads"),
    "n_q": ("n_q", "n", "seqlen_q", "seqlen", "seq_len"),
    "n_k": ("n_k", "seqlen_k"),
    "d": ("d", "head_dim", "headdim"),
    "d_v": ("d_v", "head_dim_v"),
    "causal": ("causal", "is_causal"),
    "causal_align": ("causal_align",),
    "window": ("window",),
    "device": ("device", "gpu", "machine"),
    "metric": ("metric",),
    "value": ("value",),
    "time ms": ("ms", "time_ms"),
    "time us": ("us", "time_us"),
    "peak_extra_bytes": ("peak_extra_bytes",),
    "dram_read_bytes": ("dram_read_bytes",),
    "dram_write_bytes": ("dram_write_bytes",),
    "l2_bytes": ("l2_bytes",),
    "grid": ("grid", "grid_size"),
    "block": ("block", "block_size"),
    "registers": ("regs", "registers", "n_regs"),
    "spills": ("spills", "n_spills"),
    "kernel sram": ("smem_per_block",),
    "smem_bytes": ("smem", "shared"),
    "exp instructions": ("xu_inst",),
    "block_q": ("block_m", "block_q"),
    "block_k": ("block_n", "block_k"),
    "stages": ("stages", "num_stages"),
    "warps": ("warps", "num_warps"),
    "note": ("note",),
    "id": ("id",),
}

# Columns that say nothing which is scored: read past.
IGNORED = frozenset(
    ("section", "source", "ms_p20", "ms_p80", "us_p20", "us_p80", "rel_err", "warps_active_pct", "tflops", "seed")
)

DIRECTIONS = {
    "fwd": "forward", "forward": "forward", "f": "forward",
    "bwd": "backward", "backward": "backward", "b": "backward",
    "both": "both", "fwd+bwd": "both", "fwd_bwd": "both",
}  # fmt: skip
FLAGS = {
    "0": False, "no": False, "false": False, "n": False,
    "1": True, "yes": True, "true": True, "y": True,
}  # fmt: skip
# fp8 is a dtype of files only: such rows are listed, not modelled.
DTYPES = {
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp16/bf16": "fp16",
    "bf16": "bf16", "bfloat16": "bf16",
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
    "fp8": "fp8", "fp8 e4m3": "fp8", "e4m3": "fp8", "float8_e4m3fn": "fp8", "fp8 e5m2": "fp8",
}  # fmt: skip
IMPLEMENTATIONS = {
    "standard": "standard", "standard (pytorch)": "standard", "standard attention": "standard", "pytorch": "standard",
    "standard baseline": "standard", "math": "standard", "unfused": "standard",
    "flash1": "flash1", "flashattention-1": "flash1", "flashattention": "flash1", "fa1": "flash1",
    "flash2": "flash2", "flashattention-2": "flash2", "fa2": "flash2", "flash": "flash2",
    "flash3": "flash3", "flashattention-3": "flash3", "fa3": "flash3",
    "cudnn": "cudnn",
    "efficient": "efficient", "mem_efficient": "efficient", "cutlass": "efficient",
    "triton": "triton",
}  # fmt: skip
METRICS = ("ms", "tflops", "memory_mb", "rmse")

# Words of a device's or a file's name, folded to letters and digits, and the profile that they mean.
DEVICES = (
    ("h200", "h200-sxm"),
    ("h100pcie", ""),
    ("h100nvl", ""),
    ("h100", "h100-sxm"),
    ("a10040gb", "a100-sxm-40gb"),
    ("a100pcie", ""),
    ("a100", "a100-sxm-80gb"),
    ("b200", "b200"),
    ("mi300x", "mi300x"),
)

# Machines of papers that differ from a profile in a few numbers.
VARIANTS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    # NVIDIA A100 datasheet: HBM2, 40 GB at 1555 GB/s
    "a100-sxm-40gb": ("a100-sxm-80gb", {"hbm.capacity_gb": 40, "hbm.bandwidth_gb_per_s": 1555}),
}

# Words of a kernel's name: whose it is ("" where other libraries use it too), and what it does in a forward and in a
# backward.  The products of an unfused call are told apart by their order.
KERNELS: tuple[tuple[str, str, str, str], ...] = (
    ("flash_fwd_splitkv_combine", "flash2", "combine", ""),
    ("flash_fwd_splitkv", "flash2", "split", ""),
    ("flash_fwd", "flash2", "attention", ""),
    ("flash_bwd_dot_do_o", "flash2", "", "dot"),
    ("flash_bwd_convert_dq", "flash2", "", "convert dQ"),
    ("flash_bwd", "flash2", "", "attention"),
    ("flash_fprop", "cudnn", "attention", ""),
    ("flash_bprop", "cudnn", "", "attention"),
    ("compute_dot_do_o", "cudnn", "", "dot"),
    ("convert_dq", "cudnn", "", "convert dQ"),
    ("fmha_cutlassf", "efficient", "attention", ""),
    ("fmha_cutlassb", "efficient", "", "attention"),
    ("_attn_fwd", "triton", "attention", ""),
    ("softmax_warp_forward", "standard", "softmax", "softmax"),
    ("cunn_softmaxforward", "standard", "softmax", "softmax"),
    ("softmax_warp_backward", "standard", "", "softmax dS"),
    ("cunn_softmaxbackward", "standard", "", "softmax dS"),
    ("vectorized_elementwise", "", "scale", "product"),
    ("elementwise_kernel", "", "copy", "copy"),
    ("nvjet", "", "", ""),
    ("gemm", "", "", ""),
    ("cutlass", "", "", ""),
)
GEMMS = ("nvjet", "gemm", "cutlass")
GEMM_ROLES = {"forward": ("matmul S", "matmul O"), "backward": ("matmul dV", "matmul dP", "matmul dK", "matmul dQ")}


def implementation(name: str) -> str:
    """iosim's name of an implementation, without a version number; a name that it does not know stays as it is."""
    plain = re.sub(r"[\s_-]+v?\d+(\.\d+)+$", "", name.strip())
    return IMPLEMENTATIONS.get(plain.casefold(), plain)


def machine(device: str) -> str:
    """The profile that a device's or a file's name means, or ""."""
    folded = re.sub(r"sxm\d?|[^a-z0-9]", "", device.casefold())
    return next((profile for word, profile in DEVICES if word in folded), "")


def kernel(signature: str) -> str:
    """A kernel's name from its signature: no return type, template arguments, parameters; the last namespace stays."""
    plain = signature.removeprefix("void ").replace("<unnamed>::", "::").replace("(anonymous namespace)::", "::")
    plain = re.split(r"[<(]", plain, maxsplit=1)[0]
    return "::".join(plain.split("::")[-2:]).removeprefix("::")


def kernel_owner(name: str) -> str:
    """The implementation that a kernel belongs to; what is not known of another is unfused PyTorch's."""
    return _kernel(name)[1] or "standard"


def kernel_role(name: str, direction: str, gemms_before: int) -> str:
    """What a kernel does in its call, or ""; `gemms_before` are the matrix products that the call ran before it."""
    word, _, forward, backward = _kernel(name)
    if word in GEMMS:
        roles = GEMM_ROLES.get(direction, ())
        return roles[gemms_before] if gemms_before < len(roles) else ""
    return {"forward": forward, "backward": backward}.get(direction, "")


def is_gemm(name: str) -> bool:
    """Whether a kernel is a library's matrix product."""
    return _kernel(name)[0] in GEMMS


def _kernel(name: str) -> tuple[str, str, str, str]:
    folded = name.casefold()
    return next((row for row in KERNELS if row[0] in folded), ("", "", "", ""))
