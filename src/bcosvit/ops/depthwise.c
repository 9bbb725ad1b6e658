/* The B-cos transform of a depthwise convolution with B = 2, in one pass over the image.

   Images are [n][height][width][channel], weights [tap][channel], with rows of norm one. A patch a
   of one channel gives scale * min(|w.a| / sqrt(a.a + eps), 1) * w.a. There are at least
   2 * LANES channels. */

#include <math.h>
#include <string.h>

#include "lanes.h"
#include "share.h"

typedef struct {
    long rows, columns, channels;         /* of an image */
    long out_rows, out_columns;           /* of a result */
    long taps_down, taps_across;          /* of the kernel */
    long stride_down, stride_across, padding_down, padding_across, dilation_down, dilation_across;
} window;

/* The first tap of `count` inside an axis of `size`, and the one after the last. */
static long first_tap(long start, long dilation)
{
    return start < 0 ? (dilation - 1 - start) / dilation : 0;
}

static long end_of_taps(long start, long dilation, long count, long size)
{
    long end = start < size ? (size - start + dilation - 1) / dilation : 0;
    return end < count ? end : count;
}

static inline void finish(const lanes *unit, const lanes *squares, float *out, float scale,
                          float eps)
{
    /* Arrays, which compilers make vectors of where they cannot index a vector as one. */
    float units[2 * LANES], sums[2 * LANES];
    memcpy(units, unit, sizeof units);
    memcpy(sums, squares, sizeof sums);
    for (int i = 0; i < 2 * LANES; i++) {
        float cosine = fabsf(units[i]) / sqrtf(sums[i] + eps);
        /* Rounding alone can exceed 1; what is not a number stays so. */
        out[i] = scale * (cosine > 1 ? 1 : cosine) * units[i];
    }
}

typedef struct {
    const float *image, *weight;
    float *out;
    const window *w;
    float scale, eps;
} task;

/* Rows `begin` to `end` of all results, one image after the other. */
static void some_rows(const void *given, long begin, long end, long thread)
{
    const task *t = given;
    const float *image = t->image, *weight = t->weight;
    const window *w = t->w;
    float scale = t->scale, eps = t->eps;
    float *out = t->out + begin * w->out_columns * w->channels;
    long channels = w->channels, step = w->dilation_across * channels;
    (void)thread;
    for (long row = begin; row < end; row++) {
        const float *picture = image + row / w->out_rows * w->rows * w->columns * channels;
        long top = row % w->out_rows * w->stride_down - w->padding_down;
        long k0 = first_tap(top, w->dilation_down);
        long k1 = end_of_taps(top, w->dilation_down, w->taps_down, w->rows);
        for (long column = 0; column < w->out_columns; column++, out += channels) {
            long left = column * w->stride_across - w->padding_across;
            long l0 = first_tap(left, w->dilation_across);
            long l1 = end_of_taps(left, w->dilation_across, w->taps_across, w->columns);
            for (long c = 0; c < channels; c += 2 * LANES) {
                /* The last block overlaps the one before, and computes some channels again. */
                c = c + 2 * LANES > channels ? channels - 2 * LANES : c;
                lanes unit[2] = {{0}, {0}}, squares[2] = {{0}, {0}};
                for (long k = k0; k < k1; k++) {
                    long y = top + k * w->dilation_down, x = left + l0 * w->dilation_across;
                    const float *a = picture + (y * w->columns + x) * channels + c;
                    const float *u = weight + (k * w->taps_across + l0) * channels + c;
                    for (long l = l0; l < l1; l++, a += step, u += channels) {
                        lanes first = *(const lanes *)a, second = *(const lanes *)(a + LANES);
                        unit[0] += first * *(const lanes *)u;
                        unit[1] += second * *(const lanes *)(u + LANES);
                        squares[0] += first * first;
                        squares[1] += second * second;
                    }
                }
                finish(unit, squares, out + c, scale, eps);
            }
        }
    }
}

void bcosvit_depthwise(const float *image, const float *weight, float *out, const window *w,
                       float scale, float eps, long rows, long threads)
{
    task all = {image, weight, out, w, scale, eps};
    bcosvit_share(some_rows, &all, rows, threads);
}
