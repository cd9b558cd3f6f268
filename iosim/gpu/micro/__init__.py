"""The micro-benchmarks, one module each: `measure(gpu)` yields readings."""

MODULES = ("vector", "mma", "sram", "sync", "launch", "l2", "copies", "dram", "dot")
