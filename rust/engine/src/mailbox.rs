//! Where one caller waits for news of its requests.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use octavo_core::ids::RequestId;

/// Ids of requests with news, each at most once: a slow reader gets one larger update instead of a growing queue.
#[derive(Debug, Default)]
pub struct Mailbox {
    ready: Mutex<VecDeque<RequestId>>,
    news: Condvar,
}

impl Mailbox {
    /// Notes that `id` has news. The collector calls this once until the news is fetched.
    pub(crate) fn notify(&self, id: RequestId) {
        self.ready
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back(id);
        self.news.notify_one();
    }

    /// Waits for news, at most for `timeout`, and takes the ids that have some.
    pub(crate) fn wait(&self, timeout: Duration) -> Vec<RequestId> {
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut ready, _) = self
            .news
            .wait_timeout_while(ready, timeout, |ready| ready.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        ready.drain(..).collect()
    }
}
