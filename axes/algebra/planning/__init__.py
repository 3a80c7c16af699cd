"""How a plan is made: `form` (digits), `candidates` (what could be done), `exchange` (who sends what).

The way of a plan: two states -> their common digits (`form`) -> the dozen sequences of collectives
that could be best (`candidates`), each with its elements sent and received in closed form -> the
cheapest by the cost model -> steps (`step`), which know, for any rank, exactly which boxes go where
(`exchange`, over the tiles of each side: `pieces`, `boxes`). Only that last part looks at ranks, and only at
those of one group.
"""
