"""What would an MP31 gain from twice the exp rate?  The machine with one number changed, all else held."""

from iosim import Attention, load_hardware, run

NAME = "exp.ops_per_clock"
machine = load_hardware("mp31")
rate = next(fact.value for fact in machine.fields() if fact.name == NAME)
gains, surprises = [], []
for d in (64, 128):
    problem = Attention(n_q=4096, d=d, heads=16)
    print(f"d {d}, N {problem.n_q:,}")
    seconds = {}
    for each in (rate // 2, rate, 2 * rate):
        found = run(problem, hardware=machine.with_value(NAME, each), check=False)
        seconds[each] = found.seconds
        units, whole = found.timeline.units, machine.processors * found.timeline.makespan_ps
        exp, waits = units["exp"].busy_ps / whole, units["matrix"].stalls_ps["vector"] / whole
        print(f"  {each} a clock: {found.seconds * 1e6:5.1f} us; exp units busy {exp:.0%}, matrix units wait for "
              f"softmax {waits:.0%} of the time")  # fmt: skip
    gains.append(seconds[rate] / seconds[2 * rate])
    surprises.append(seconds[rate] / seconds[rate // 2])


print(f"""
Twice the rate makes it {max(gains):.2f} times as fast at most: other vector work of the softmax takes as long.""")
if max(surprises) > 1.01:
    print("""Half the rate is predicted to be faster: the warp groups of a block, in step at today's rate, then run
apart, and the matrix units wait less for softmax. Keeping groups apart is worth more than a faster exp unit.""")
