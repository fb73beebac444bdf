//! Threads that wait for work between calls.

use std::sync::{Arc, Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// The workers besides the calling threads; grows when a call asks for more.
static WORKERS: Mutex<Option<Arc<ThreadPool>>> = Mutex::new(None);

/// Run `work` on every item, on the calling thread and up to `threads - 1` others.
///
/// Each thread takes the next item when it is done with one, so a late or slow thread delays the others by one item at most. If the
/// system gives no threads, the calling thread does everything.
pub(crate) fn for_each<T: Send>(items: Vec<T>, threads: usize, work: impl Fn(T) + Sync) {
    let helpers = threads.min(items.len()).saturating_sub(1);
    let Some(pool) = (helpers > 0).then(|| workers(threads - 1)).flatten() else {
        return items.into_iter().for_each(work);
    };
    let queue = Mutex::new(items.into_iter());
    let take = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let drain = || {
        while let Some(item) = take() {
            work(item);
        }
    };
    pool.in_place_scope(|scope| {
        for _ in 0..helpers {
            scope.spawn(|_| drain());
        }
        drain();
    });
}

/// A pool of at least `count` threads.
fn workers(count: usize) -> Option<Arc<ThreadPool>> {
    let mut pool = WORKERS.lock().unwrap_or_else(PoisonError::into_inner);
    if pool
        .as_ref()
        .is_none_or(|pool| pool.current_num_threads() < count)
    {
        *pool = ThreadPoolBuilder::new()
            .num_threads(count)
            .thread_name(|index| format!("octavo-cpu-{index}"))
            .build()
            .ok()
            .map(Arc::new);
    }
    pool.clone()
}
