"""How a plan is made: `candidates` (what could be done, between states in digits), `exchange` (who sends what).

The way of a plan: two shardings -> their states in common digits -> the dozen sequences of collectives that
could be best (`candidates`), each with its elements sent and received in closed form -> the cheapest by the
cost model -> steps (`axes.algebra.plan`), which know, for any rank, exactly which boxes go where (`exchange`).
Only that last part looks at ranks, and only at those of one group.
"""
