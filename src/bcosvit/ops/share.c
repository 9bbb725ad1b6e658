/* Rows are shared by the threads of OpenMP that PyTorch computes with.

   Threads of one's own would wait for a processor: those of OpenMP go on asking for work for a
   while after they have done theirs. */

#include <stddef.h>

#include "share.h"

/* Of the library that PyTorch has loaded; null where there is none. */
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*count)(void), (*number)(void);

typedef struct {
    part run;
    const void *task;
    long rows;
} shared;

void bcosvit_threads(void *parallel_, void *count_, void *number_)
{
    parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel_;
    count = (int (*)(void))count_;
    number = (int (*)(void))number_;
}

static void run_one(void *given)
{
    const shared *s = given;
    /* There may be fewer threads than were asked for. */
    long threads = count(), thread = number();
    s->run(s->task, s->rows * thread / threads, s->rows * (thread + 1) / threads, thread);
}

void bcosvit_share(part run, const void *task, long rows, long threads)
{
    shared all = {run, task, rows};
    if (threads > 1 && parallel)
        parallel(run_one, &all, (unsigned)threads, 0);
    else
        run(task, 0, rows, 0);
}
