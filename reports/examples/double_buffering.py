"""Is double buffering worth it?  One tile at 1, 2 and 3 buffers for K and V, on two machines."""

from iosim import Attention, InputError, run

problem = Attention(n_q=2048, d=64, heads=16)
for machine in ("mp31", "h200-sxm"):
    print(f"{machine}, 128 x 64 tiles")
    before = None
    for stages in (1, 2, 3):
        tile = {"block_q": 128, "block_k": 64, "stages": stages}
        try:
            found = run(problem, hardware=machine, schedule=tile, check=False)
        except InputError as refused:
            print(f"  {stages}: {refused}")
            continue
        matrix = found.timeline.units["matrix"]
        waits = matrix.stalls_ps["data"] / (matrix.instances * found.timeline.makespan_ps)
        gain = "" if before is None else f", {before / found.seconds:.2f}x the speed of one buffer less"
        print(f"  {stages}: {found.seconds * 1e6:.0f} us, {found.footprint.resident} resident, "
              f"matrix units wait for data {waits:.0%}{gain}")  # fmt: skip
        before = found.seconds
