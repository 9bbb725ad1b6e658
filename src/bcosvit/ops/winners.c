/* The adjoint of a convolution with MaxOut 2: of an output's two units only the larger one counts.

   A product of matrices would multiply the other one's zeros, which are half of all numbers. Here
   every number of a gradient is multiplied with the weights of the unit that won.

   Images, gradients and factors are [n][height][width][channel]. A factor is positive where the
   first unit won, and negative where the second one did. Weights are [tap down][chunk][output][unit]
   [number]: what a tap row adds to a row of the image, tap after tap, is cut into chunks of
   `vectors` vectors, the last one filled up with zeros. */

#include <math.h>
#include <string.h>

#include "lanes.h"

#define MOST 8                            /* vectors of a chunk, which lie in registers */
#define NUMBERS_AT_ONCE 8192              /* of weights, which stay in the first cache */
#define COLUMNS_AT_ONCE 64

const long bcosvit_lanes = LANES;

typedef struct {
    long rows, columns, channels;         /* of an image */
    long out_rows, out_columns, outputs;  /* of a gradient and of factors */
    long taps_down, taps_across, stride_down, stride_across, padding_down, padding_across;
    long chunks, vectors;
    long grad_image, grad_row, grad_pixel;/* distances in a gradient, whose channels lie together */
    long factors;                         /* images of factors, which are used again and again */
    long width;                           /* of a row with its padding and filling, in numbers */
} window;

/* Adds to some pixels of `row`, `step` apart, what some outputs contribute to a chunk. */
static inline __attribute__((always_inline)) void add_chunk(
    float *row, long step, long pixels, const char *weight, const float *value, const int *place,
    long outputs, long count, const int vectors)
{
    for (long q = 0; q < pixels; q++, row += step, value += outputs, place += outputs) {
        lanes sum[MOST] = {{0}}, *out = (lanes *)row;
        for (long c = 0; c < count; c++) {
            const lanes *u = (const lanes *)(weight + place[c]);
            for (int v = 0; v < vectors; v++)
                sum[v] += value[c] * u[v];
        }
        for (int v = 0; v < vectors; v++)
            out[v] += sum[v];
    }
}

/* Rows `begin` to `end` of all images. `scratch` has room for `width` numbers and for the values
   and places of `taps_down` rows of a gradient. */
void bcosvit_winners(const float *grad, const float *factor, const float *weight, float *image,
                     float *scratch, const window *w, long begin, long end)
{
    long outputs = w->outputs, numbers = w->out_columns * outputs, step = w->channels * w->stride_across;
    long chunk = w->vectors * LANES, chunk_bytes = 2 * outputs * chunk * (long)sizeof(float);
    float *row = scratch, *values = row + w->width;
    int *places = (int *)(values + w->taps_down * numbers);
    long most = NUMBERS_AT_ONCE / 2 / chunk, part = outputs < most ? outputs : most;
    long last = -1;                       /* row of all gradients that has been prepared */

    for (long at = begin; at < end; at++) {
        long n = at / w->rows, y = at % w->rows;
        memset(row, 0, w->width * sizeof(float));
        for (long k = w->taps_down - 1; k >= 0; k--) {
            long down = y + w->padding_down - k, r = down / w->stride_down;
            if (down < 0 || down % w->stride_down || r >= w->out_rows)
                continue;
            long slot = r % w->taps_down;
            float *value = values + slot * numbers;
            int *place = places + slot * numbers;
            if (n * w->out_rows + r > last) {
                last = n * w->out_rows + r;
                const float *f = factor + (n % w->factors * w->out_rows + r) * numbers;
                const float *g = grad + n * w->grad_image + r * w->grad_row;
                for (long q = 0; q < w->out_columns; q++, g += w->grad_pixel, f += outputs)
                    for (long c = 0; c < outputs; c++) {
                        value[q * outputs + c] = g[c] * fabsf(f[c]);
                        place[q * outputs + c] = (int)((2 * c + (f[c] < 0)) * chunk * sizeof(float));
                    }
            }
            for (long q = 0; q < w->out_columns; q += COLUMNS_AT_ONCE) {
                long pixels = w->out_columns - q < COLUMNS_AT_ONCE ? w->out_columns - q : COLUMNS_AT_ONCE;
                for (long j = 0; j < w->chunks; j++)
                    for (long c = 0; c < outputs; c += part) {
                        const char *u = (const char *)weight + (k * w->chunks + j) * chunk_bytes;
                        float *out = row + q * step + j * chunk;
                        const float *v = value + q * outputs + c;
                        const int *p = place + q * outputs + c;
                        long count = outputs - c < part ? outputs - c : part;
#define CASE(V) case V: add_chunk(out, step, pixels, u, v, p, outputs, count, V); break
                        switch (w->vectors) {
                            CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6); CASE(7); CASE(8);
                        }
                    }
            }
        }
        memcpy(image + at * w->columns * w->channels, row + w->padding_across * w->channels,
               w->columns * w->channels * sizeof(float));
    }
}
