"""Flow: what an expression means for sharded tensors, worked out before anything is sent.

The way from text to a recipe: `reading` opens groups and `...` into atoms; `rules` solves their sizes, hands the splits
of dims down to them, compares these with the left side, and applies the four rules of the notation; `recipe` is the
result, and `transpose` derives the recipe of each operand's gradient from it.

>>> from axes.algebra.mesh import Mesh
>>> mesh = Mesh("dp=2 tp=2")
>>> x, w = mesh.sharding("b@dp s f@tp"), mesh.sharding("f@tp d")
>>> print(recipe("einsum", "b s f@tp, f@tp d -> b s@tp d", "sum", (x, w), ((8, 4, 16), (16, 6)), mesh))
b s f@tp, f@tp d -> b s@tp d
  operand 1  b@dp s f@tp    [8, 4, 16]
  operand 2  f@tp d    [16, 6]
  result     b@dp s d | sum@tp  ->  b@dp s@tp d    [8, 4, 6]
"""

from axes.algebra.expressions.recipe import Recipe, Shardings, unmoved
from axes.algebra.expressions.rules import recipe
from axes.algebra.expressions.transpose import gradient, required

__all__ = ["Recipe", "Shardings", "gradient", "recipe", "required", "unmoved"]
