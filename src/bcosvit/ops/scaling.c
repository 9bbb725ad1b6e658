/* MaxOut of at most two units and the cosine scaling with B = 2, in one pass over the units.

   Rows of units have the first units of all outputs, then all second ones. A factor is
   scale * min(|unit| / norm, 1), negative where the second unit was larger. */

#include <math.h>

#include "share.h"

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

typedef struct {
    const float *units, *norm;
    float *out, *factor;                  /* null where nobody asks for factors */
    long outputs, maxout;
    float scale;
} task;

static void some_rows(const void *given, long begin, long end, long thread)
{
    const task *t = given;
    const float *units = t->units, *norm = t->norm;
    float *out = t->out, *factor = t->factor, scale = t->scale;
    long outputs = t->outputs, maxout = t->maxout;
    (void)thread;
    for (long row = begin; row < end; row++) {
        const float *one = units + row * maxout * outputs, *two = one + outputs;
        float *y = out + row * outputs, *f = factor ? factor + row * outputs : 0;
        float slope = 1 / norm[row] * scale;
        if (factor)
            scale_row(one, maxout == 2 ? two : one, y, f, outputs, slope, scale);
        else if (maxout == 2)
            scale_row(one, two, y, 0, outputs, slope, scale);
        else
            scale_row(one, 0, y, 0, outputs, slope, scale);
    }
}

void bcosvit_scale(const float *units, const float *norm, float *out, float *factor, long outputs,
                   long maxout, float scale, long rows, long threads)
{
    task all = {units, norm, out, factor, outputs, maxout, scale};
    bcosvit_share(some_rows, &all, rows, threads);
}
