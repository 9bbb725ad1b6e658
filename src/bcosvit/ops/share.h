/* The rows of a result, shared by threads. */

/* Computes the rows from `begin` to `end` of what `task` describes, as the thread of a number. */
typedef void (*part)(const void *task, long begin, long end, long thread);

void bcosvit_share(part run, const void *task, long rows, long threads);
