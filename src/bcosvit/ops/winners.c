/* The adjoint of a convolution with MaxOut 2: of an output's two units only the larger one counts.

   A product of matrices would multiply the other one's zeros, which are half of all numbers. Here
   every number of a gradient is multiplied with the weights of the unit that won. Two gradients of
   the same result read these weights together.

   Images, gradients and factors are [n][height][width][channel]. A factor is positive where the
   first unit won, and negative where the second one did. Weights are [tap down][chunk][output]
   [unit][number]: what a tap row adds to a row of the image, tap after tap, is cut into chunks of
   `vectors` vectors, the last one filled up with zeros. */

#include <math.h>
#include <string.h>

#include "lanes.h"
#include "share.h"

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
    long factors, gradients;              /* images of factors, and gradients for each of them */
    long width;                           /* of a row with its padding and filling, in numbers */
} window;

/* Adds to some pixels of `row`, `step` apart, what `count` outputs contribute to a chunk; the same
   for a second gradient, whose row and values lie `next_row` and `next_value` further. */
static inline __attribute__((always_inline)) void add_chunk(
    float *row, long step, long pixels, const char *weight, const float *value, const int *place,
    long outputs, long count, long next_row, long next_value, const int vectors, const int both)
{
    for (long q = 0; q < pixels; q++, row += step, value += outputs, place += outputs) {
        lanes sum[MOST] = {{0}}, other[MOST] = {{0}};
        for (long c = 0; c < count; c++) {
            const lanes *u = (const lanes *)(weight + place[c]);
            for (int v = 0; v < vectors; v++) {
                lanes w = u[v];
                sum[v] += value[c] * w;
                if (both)
                    other[v] += value[next_value + c] * w;
            }
        }
        lanes *out = (lanes *)row, *next = (lanes *)(row + next_row);
        for (int v = 0; v < vectors; v++) {
            out[v] += sum[v];
            if (both)
                next[v] += other[v];
        }
    }
}

typedef struct {
    const float *grad, *factor, *weight;
    float *image, *scratch;
    const window *w;
    long room;                            /* numbers of `scratch` for each thread */
} task;

/* Rows `begin` to `end` of all images, of which those of two gradients count as one. A thread has
   room for two rows of `width` numbers, and for `taps_down` rows of two gradients and of places. */
static void some_rows(const void *given, long begin, long end, long thread)
{
    const task *t = given;
    const float *grad = t->grad, *factor = t->factor, *weight = t->weight;
    float *image = t->image, *scratch = t->scratch + thread * t->room;
    const window *w = t->w;
    long outputs = w->outputs, numbers = w->out_columns * outputs, taps = w->taps_down;
    long step = w->channels * w->stride_across, length = w->columns * w->channels;
    long chunk = w->vectors * LANES, chunk_bytes = 2 * outputs * chunk * (long)sizeof(float);
    long most = NUMBERS_AT_ONCE / 2 / chunk, part = outputs < most ? outputs : most;
    float *row = scratch, *values = row + 2 * w->width;
    int *places = (int *)(values + 2 * taps * numbers);
    long last = -1;                       /* row of all gradients that has been prepared */

    for (long at = begin; at < end; at++) {
        long pair = at / w->rows, y = at % w->rows, n = pair % w->factors;
        /* The number of the first gradient's image, and how many gradients there are. */
        long first = pair / w->factors * 2 * w->factors + n;
        int both = first + w->factors < w->factors * w->gradients;
        memset(row, 0, (both + 1) * w->width * sizeof(float));
        for (long k = taps - 1; k >= 0; k--) {
            long down = y + w->padding_down - k, r = down / w->stride_down;
            if (down < 0 || down % w->stride_down || r >= w->out_rows)
                continue;
            float *value = values + r % taps * numbers;
            int *place = places + r % taps * numbers;
            if (pair * w->out_rows + r > last) {
                last = pair * w->out_rows + r;
                for (long g = 0; g <= both; g++) {
                    const float *f = factor + (n * w->out_rows + r) * numbers;
                    const float *from = grad + (first + g * w->factors) * w->grad_image;
                    from += r * w->grad_row;
                    for (long q = 0; q < numbers; q += outputs, from += w->grad_pixel)
                        for (long c = 0; c < outputs; c++)
                            value[g * taps * numbers + q + c] = from[c] * fabsf(f[q + c]);
                    for (long q = 0; q < numbers && !g; q += outputs)
                        for (long c = 0; c < outputs; c++)
                            place[q + c] = (2 * c + (f[q + c] < 0)) * chunk * sizeof(float);
                }
            }
            for (long q = 0; q < w->out_columns; q += COLUMNS_AT_ONCE) {
                long left = w->out_columns - q;
                long pixels = left < COLUMNS_AT_ONCE ? left : COLUMNS_AT_ONCE;
                for (long j = 0; j < w->chunks; j++)
                    for (long c = 0; c < outputs; c += part) {
                        const char *u = (const char *)weight + (k * w->chunks + j) * chunk_bytes;
                        long count = outputs - c < part ? outputs - c : part, o = q * outputs + c;
#define ADD(V, both) add_chunk(row + q * step + j * chunk, step, pixels, u, value + o, place + o, \
                               outputs, count, w->width, taps * numbers, V, both)
#define CASE(V) case V: if (both) ADD(V, 1); else ADD(V, 0); break
                        switch (w->vectors) {
                            CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6); CASE(7); CASE(8);
                        }
                    }
            }
        }
        for (long g = 0; g <= both; g++)
            memcpy(image + ((first + g * w->factors) * w->rows + y) * length,
                   row + g * w->width + w->padding_across * w->channels, length * sizeof(float));
    }
}

void bcosvit_winners(const float *grad, const float *factor, const float *weight, float *image,
                     float *scratch, const window *w, long room, long rows, long threads)
{
    task all = {grad, factor, weight, image, scratch, w, room};
    bcosvit_share(some_rows, &all, rows, threads);
}
