"""How the drawn scenes are drawn: a small software renderer, in numpy alone.

Nothing here knows of classes as labels, of splits or of data sets; that is `data.scenes`. One reads
in this order: `dice` (chance), `fields` (arithmetic, noise, distances), `stage` (light, shadow,
compositing), then what stands on the stage: `grounds`, `clutter`, `outlines`, `objects`,
`materials`.

Two rules make a scene the same bits on every machine. Chance comes from raw PCG64 output only,
since numpy may change its derived distributions. Pixels come from operations that IEEE 754 rounds
exactly (+ − × ÷ √, comparisons, rounding); sines, powers and matrix products, whose last bit
depends on the processor, are replaced by polynomials and explicit sums.

Lengths are fractions of the picture's side, x to the right, y downwards, so that a scene is the
same at every size. Colors are linear light; `ink` turns what one would pick on a screen into it.
"""
