"""Which tile should FlashAttention-2 take on an MP31, and what does a wrong one cost?"""

from iosim import Attention, InputError, run

problem = Attention(n_q=2048, d=128, heads=8)
times = {}
for block_q in (64, 128, 256):
    for block_k in (32, 64, 128):
        tile = f"{block_q} x {block_k}"
        try:
            found = run(problem, hardware="mp31", schedule={"block_q": block_q, "block_k": block_k}, check=False)
        except InputError as refused:
            print(f"{tile:>9}  {str(refused).partition(';')[0].partition(': ')[2]}")
            continue
        times[tile] = found.timeline.makespan_ps
        sram, resident = found.footprint.sram_bytes // 1024, found.footprint.resident
        print(f"{tile:>9}  {found.seconds * 1e6:6.1f} us  {found.peak_share:4.0%} of peak  {sram:3} KiB of SRAM, "
              f"{resident} resident")  # fmt: skip

best, worst = min(times, key=times.get), max(times, key=times.get)
chosen = run(problem, hardware="mp31", check=False)
print(f"\nTake {best}: {worst} takes {times[worst] / times[best]:.2f} times as long.")
print(f"The rule of iosim takes {chosen.schedule.block_q} x {chosen.schedule.block_k}, "
      f"{chosen.timeline.makespan_ps / times[best]:.2f} times the best: {chosen.why}.")  # fmt: skip
