"""What would an MP31 gain from twice the exp rate?  The machine with one number changed, the schedule chosen anew."""

from iosim import Attention, load_hardware, run

NAME = "exp.ops_per_clock"
machine = load_hardware("mp31")
rate = next(fact.value for fact in machine.fields() if fact.name == NAME)
gains = []
for d in (64, 128):
    for n in (1024, 4096):
        problem = Attention(n_q=n, d=d, heads=16)
        rates = (rate // 2, rate, 2 * rate)
        slower, now, faster = (run(problem, hardware=machine.with_value(NAME, r), check=False) for r in rates)
        gains.append(now.seconds / faster.seconds)
        busy = now.timeline.units["exp"].busy_ps / (machine.processors * now.timeline.makespan_ps)
        times = [f"{r.seconds * 1e6:6.1f} us at {each}" for r, each in zip((slower, now, faster), rates, strict=True)]
        print(f"d {d:3}, N {n:5,}: {', '.join(times)} a clock; at {rate} the unit is busy {busy:.0%} of the time")

print(f"\nTwice the rate makes it {max(gains):.2f} times as fast at most.")
if max(gains) < 1.01:
    print("Half of it would hurt: at today's rate other vector work of the softmax takes as long as its exp.")
