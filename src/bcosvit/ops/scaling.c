/* MaxOut of at most two units and the cosine scaling with B = 2, in one pass over the units.

   Rows of units have the first units of all outputs, then all second ones. A factor is
   scale * min(|unit| / norm, 1), negative where the second unit was larger. */

#include <math.h>

static inline __attribute__((always_inline)) void scale_row(
    const float *one, const float *two, float *out, float *factor, long outputs, float slope,
    float scale)
{
    /* A result may replace the unit that it is computed from, and no other one. */
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (long c = 0; c < outputs; c++) {
        float first = one[c], second = two ? two[c] : first;
        /* What is not a number stays so. */
        float unit = first >= second || first != first ? first : second;
        float size = fabsf(unit) * slope;
        size = size > scale ? scale : size;
        out[c] = size * unit;
        if (factor)
            factor[c] = second > first ? -size : size;
    }
}

/* Rows `begin` to `end`; `factor` is null where nobody asks for factors. */
void bcosvit_scale(const float *units, const float *norm, float *out, float *factor, long outputs,
                   long maxout, float scale, long begin, long end)
{
    for (long row = begin; row < end; row++) {
        const float *one = units + row * maxout * outputs, *two = one + outputs;
        float *y = out + row * outputs, *f = factor + row * outputs;
        float slope = 1 / norm[row] * scale;
        if (factor)
            scale_row(one, maxout == 2 ? two : one, y, f, outputs, slope, scale);
        else if (maxout == 2)
            scale_row(one, two, y, 0, outputs, slope, scale);
        else
            scale_row(one, 0, y, 0, outputs, slope, scale);
    }
}
