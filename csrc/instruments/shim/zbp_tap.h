/* zbp_tap.h - lets recordings see every block that torch's CPU allocator hands out and takes back.
 *
 * Note [How the CPU allocator is tapped]
 *
 * While something records, an allocator of ours stands in front of the one that is installed
 * (c10::SetAllocator). It forwards every call and gives each block a deleter of its own, which
 * tells the recordings and then calls the deleter that the block came with. So all threads are
 * seen, the engine's workers too, and whoever frees a block; and torch.profiler, which the
 * allocator behind ours reports to, sees what it always sees.
 *
 * The other way in, c10::MemoryReportingInfoBase, was weighed and left: it hangs on a thread and on
 * the engine's copies of that thread's state, so other threads go unseen; and torch.profiler owns
 * its one slot, and casts what it finds there to its own type.
 *
 * - A block keeps our deleter for life. When nothing records any more our allocator is taken out,
 *   and blocks that outlive the recordings are freed as they would have been; resizing their
 *   storages comes through our allocator, which then only forwards. It lives as long as the
 *   process.
 * - context == data stays true for blocks of allocators that promise it, so raw_allocate() works.
 *   For others the block gets a context of ours around theirs.
 * - An allocator that somebody installs while we record stays; what goes past ours is not seen, and
 *   zbp_tap_stop says so. Chains (theirs forwards to ours) are seen once.
 * - A storage allocates again, when it grows, from the allocator that it names: the one behind ours
 *   if it was made while nothing recorded. So when a recording begins, the storages that Python's
 *   collector knows of are made to name ours (zbp_tap_adopt), and do so for life.
 * - Not seen: blocks from before the first recording; memory that is not the CPU allocator's
 *   (shared memory, numpy's, oneDNN's scratch); storages that are made while something records and
 *   name the default allocator themselves (torch.UntypedStorage(n), torch.load); the growth of an
 *   older storage that no Python tensor shows when the recording begins (one that C++ alone holds,
 *   or that gc.freeze() has hidden). None of these is noticed, hence none is in
 *   Recording.incomplete.
 *
 * Threads: the recordings are fed under one lock, a leaf: nothing is called under it that takes
 * another, and no Python. c10::SetAllocator is a plain store, as torch itself uses it. A forked
 * child inherits recordings that go on counting for it alone; fork waits for the lock, so none is
 * torn. If memory runs out for a recording, the program goes on and the recording says what it
 * lacks.
 */
#pragma once

#include <Python.h>

#include "core/base/zbp_c.h"
#include "instruments/core/zbp_record.h"
#include "shim/torch/zbp_error.h"

ZBP_BEGIN_C

/* What feeds the recordings. While it is locked nothing may run that could free a tensor, Python's
 * collector included: no Python call. Never destroyed: tensors are freed until the process ends. */
zbp_tally *zbp_tap_tally(void);

/* Begins `record` (uninitialised; the caller's, and at rest until zbp_tap_stop) and feeds it.
 * Errors, with nothing changed: MemoryError, or RuntimeError when the installed allocator cannot
 * be replaced. With the GIL. */
ZBP_MUST_USE int zbp_tap_start(zbp_record *record, uint64_t max_events, zbp_error *error);

/* Ends feeding `record`, which then is the caller's alone. *displaced_out: 1 if somebody installed
 * another allocator meanwhile, else 0. Cannot fail. With the GIL, from any thread. */
void zbp_tap_stop(zbp_record *record, int *displaced_out);

/* Lets the CPU storage of a tensor or a torch.UntypedStorage that names the allocator behind
 * ours name ours, so that its growth is seen. Other objects are passed over. With the GIL, while
 * something is fed; runs no Python. */
void zbp_tap_adopt(PyObject *object);

/* Likewise a c10::StorageImpl*; does nothing while nothing is fed. */
void zbp_tap_adopt_storage(void *storage);

/* Whether memory from a c10::Allocator* is seen, while something is fed: it is ours or the one
 * behind it. */
int zbp_tap_feeds(const void *allocator);

/* The blocks in use with serials from `since` on: an array that is the caller's to free() (NULL for
 * none), in that order, and their count. Error: ZBP_ENOMEM. Any thread. O(n log n) for n blocks
 * in use. */
ZBP_MUST_USE int zbp_tap_blocks(uint64_t since, zbp_block **blocks_out, size_t *count_out);

ZBP_END_C
