"""The pair of products of attention in a peer, S = Q K^T and O = P V of one head, run by the peer's own Python.

    python peers.py KIND N D COUNT

KIND is "scalesim" (SCALE-Sim, every cycle of a systolic array), "zigzag" (ZigZag, which searches the loop order, as
it does by default) or "zigzag-order" (ZigZag with the loop order given: one evaluation of its cost model a product).
COUNT configurations differ in how much SRAM there is.  The machine is one processor like MP31's: 2,048 multiply-adds a
clock, up to 192 KiB of SRAM.  Prints JSON: "seconds" of processor time without start-up, and the "cycles" of each
configuration.  What SCALE-Sim writes goes into the working directory; ZigZag's stages that write files and draw are
left out, which makes it faster.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, COLUMNS = 64, 32  # multiply-adds of a clock: 2,048
KIB = (192, 160, 128, 96)  # of SRAM, by configuration
LPF_LIMIT = 6  # ZigZag's default: how finely loops are cut before their orders are tried

Cost = Callable[[int], float]  # cycles of the pair, by KiB of SRAM


# ---------------------------------------------------------------- SCALE-Sim


def scalesim(n: int, d: int) -> Cost:
    from scalesim.scale_sim import scalesim as Simulator  # noqa: N812

    layers = {"scores": (n, n, d), "output": (n, d, n)}
    rows = "".join(f"{name},{','.join(map(str, size))},\n" for name, size in layers.items())
    Path("pair.csv").write_text(f"Layer,M,N,K,\n{rows}")
    ones = "1," * 20
    Path("layout.csv").write_text("".join(f"{name},{ones}\n" for name in ("Layer", *layers)))

    def cost(kib: int) -> float:
        Path("machine.cfg").write_text(_scalesim_config(kib))
        files = {"config": "machine.cfg", "topology": "pair.csv", "layout": "layout.csv"}
        Simulator(save_disk_space=True, verbose=False, input_type_gemm=True, **files).run_scale(top_path="reports")
        header, *lines = Path("reports/pair/COMPUTE_REPORT.csv").read_text().splitlines()
        column = header.split(", ").index("Total Cycles")
        return sum(float(line.split(", ")[column]) for line in lines)

    return cost


def _scalesim_config(kib: int) -> str:
    """A third of the SRAM for each operand; the bandwidth that the run takes is worked out by SCALE-Sim itself."""
    third = kib // 3
    presets = {"ArrayHeight": ROWS, "ArrayWidth": COLUMNS, "IfmapSramSzkB": third, "FilterSramSzkB": third,
               "OfmapSramSzkB": third, "IfmapOffset": 0, "FilterOffset": 10**7, "OfmapOffset": 2 * 10**7,
               "Dataflow": "os", "Bandwidth": 10, "ReadRequestBuffer": 512, "WriteRequestBuffer": 512}  # fmt: skip
    banks = {f"{of}{what}": value for of in ("Ifmap", "Filter")
             for what, value in {"CustomLayout": False, "SRAMBankBandwidth": 10, "SRAMBankNum": 10,
                                 "SRAMBankPort": 2}.items()}  # fmt: skip
    sections: dict[str, dict[str, Any]] = {
        "general": {"run_name": "pair"},
        "architecture_presets": presets,
        "layout": banks,
        "sparsity": {"SparsitySupport": False},
        "run_presets": {"InterfaceBandwidth": "CALC", "UseRamulatorTrace": False},
    }
    return "".join(f"[{s}]\n" + "".join(f"{k} = {v}\n" for k, v in own.items()) for s, own in sections.items())


# ---------------------------------------------------------------- ZigZag


def zigzag(n: int, d: int, *, order: bool = False) -> Cost:
    from zigzag.mapping.temporal_mapping import TemporalMappingType
    from zigzag.stages.evaluation.cost_model_evaluation import CostModelStage
    from zigzag.stages.main import MainStage
    from zigzag.stages.mapping.spatial_mapping_generation import SpatialMappingGeneratorStage
    from zigzag.stages.mapping.temporal_mapping_generator_stage import TemporalMappingGeneratorStage
    from zigzag.stages.parser.accelerator_parser import AcceleratorParserStage
    from zigzag.stages.parser.workload_parser import WorkloadParserStage
    from zigzag.stages.results.reduce_stages import MinimalLatencyStage, SumStage
    from zigzag.stages.workload_iterator import WorkloadStage

    logging.disable(logging.CRITICAL)
    stages = [
        WorkloadParserStage, AcceleratorParserStage, SumStage, WorkloadStage, MinimalLatencyStage,
        SpatialMappingGeneratorStage, MinimalLatencyStage, TemporalMappingGeneratorStage, CostModelStage,
    ]  # fmt: skip
    pair = [_gemm(0, n, d, n, {}), _gemm(1, n, n, d, {"I": 0})]
    Path("mapping.yaml").write_text(json.dumps(_mapping(n, d, order=order)))  # JSON is YAML

    def cost(kib: int) -> float:
        Path("machine.yaml").write_text(json.dumps(_accelerator(kib)))
        found = MainStage(
            stages, accelerator="machine.yaml", workload=pair, mapping="mapping.yaml", loma_lpf_limit=LPF_LIMIT,
            loma_show_progress_bar=False, nb_mappings_generated=3, enable_mix_spatial_mapping_generation=False,
            access_same_data_considered_as_no_access=True, temporal_mapping_type=TemporalMappingType.UNEVEN,
        ).run()  # fmt: skip
        return float(found[0][0].latency_total2)

    return cost


def _gemm(number: int, rows: int, inner: int, columns: int, source: dict[str, int]) -> dict[str, Any]:
    """O[rows, columns] = I[rows, inner] W[inner, columns] in fp16, accumulated in fp32."""
    return {
        "id": number, "name": f"product{number}", "operator_type": "Gemm", "equation": "O[b][k]+=I[b][c]*W[c][k]",
        "dimension_relations": [], "loop_dims": ["B", "C", "K"], "loop_sizes": [rows, inner, columns],
        "operand_precision": {"W": 16, "I": 16, "O": 32, "O_final": 16}, "operand_source": source,
    }  # fmt: skip


def _mapping(n: int, d: int, *, order: bool) -> list[dict[str, Any]]:
    """Columns by the rows of the array, the summed axis by its columns; with `order` all loops, innermost first:
    tiles of 64 rows, a whole row of the left operand inside."""
    both = {"spatial_mapping": {"D1": [f"K, {ROWS}"], "D2": [f"C, {COLUMNS}"]},
            "memory_operand_links": {"O": "O", "W": "I2", "I": "I1"}}  # fmt: skip
    if not order:
        return [{"name": "default", **both}]
    sizes = {"product0": (d, n), "product1": (n, d)}
    loops = {
        name: [["C", inner // COLUMNS], ["B", 64], ["K", columns // ROWS], ["B", n // 64]]
        for name, (inner, columns) in sizes.items()
    }
    named = [{"name": name, **both, "temporal_ordering": [l for l in own if l[1] > 1]} for name, own in loops.items()]
    return [*named, {"name": "default", **both}]


def _accelerator(kib: int) -> dict[str, Any]:
    """Accumulators at the array, SRAM, and device memory at 14 bytes a clock, MP31's for one processor."""

    def port(name: str, kind: str, bits: int, *moves: str) -> dict[str, Any]:
        return {"name": f"{name}_port_1", "type": kind, "bandwidth_min": 16, "bandwidth_max": bits,
                "allocation": list(moves)}  # fmt: skip

    def level(size: int, cost: float, operands: list[str], served: list[str], *ports: dict[str, Any]) -> dict[str, Any]:
        return {"size": size, "r_cost": cost, "w_cost": cost, "area": 0, "latency": 1, "operands": operands,
                "served_dimensions": served, "ports": list(ports)}  # fmt: skip

    array, every = ["D1", "D2"], ["I1", "I2", "O"]
    up = [f"{operand}, {move}" for operand, moves in {"I1": ("tl",), "I2": ("tl",), "O": ("tl", "th")}.items()
          for move in moves]  # fmt: skip
    down = [f"{operand}, {move}" for operand, moves in {"I1": ("fh",), "I2": ("fh",), "O": ("fh", "fl")}.items()
            for move in moves]  # fmt: skip
    near = [port(name, kind, 32, f"O, {move}") for name, kind, move in
            (("r", "read", "tl"), ("w", "write", "fh"))]  # fmt: skip
    near += [{**port(name, kind, 32, f"O, {move}"), "name": f"{name}_port_2"} for name, kind, move in
             (("r", "read", "th"), ("w", "write", "fl"))]  # fmt: skip
    return {
        "name": "processor",
        "memories": {
            "accumulators": level(32, 0.02, ["O"], [], *near),
            "sram": level(kib * 8192, 10, every, array, port("r", "read", 1024, *up), port("w", "write", 1024, *down)),
            "device": level(10**12, 700, every, array, port("rw", "read_write", 112, *up, *down)),
        },
        "operational_array": {"unit_energy": 0.04, "unit_area": 1, "dimensions": array, "sizes": [ROWS, COLUMNS]},
    }  # fmt: skip


KINDS: dict[str, Callable[[int, int], Cost]] = {
    "scalesim": scalesim,
    "zigzag": zigzag,
    "zigzag-order": lambda n, d: zigzag(n, d, order=True),
}


def main(kind: str, n: int, d: int, count: int) -> dict[str, Any]:
    """Cost `count` configurations; a small pair comes first, so that nothing is left to load."""
    KINDS[kind](128, 64)(KIB[0])
    cost = KINDS[kind](n, d)
    start = time.process_time()
    cycles = [cost(KIB[number % len(KIB)]) for number in range(count)]
    return {"kind": kind, "configurations": count, "seconds": time.process_time() - start, "cycles": cycles}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
