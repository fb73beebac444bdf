//! The masks of steps in flight, made on threads while the device computes.
//!
//! A mask is begun as soon as the tokens before it are known, and collected when the step is to be drawn from. Whoever collects helps.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use octavo_core::ids::{RequestId, StepId};
use octavo_core::scheduler::Core;
use octavo_grammar::compiler::Grammar;
use octavo_grammar::matcher::Matcher;

/// Threads that make masks besides the one that collects them.
const MAX_THREADS: usize = 8;

/// The matchers of all requests with a grammar, and the masks being made.
#[derive(Debug)]
pub(crate) struct Masks {
    /// Words of a mask: `ceil(V / 32)`.
    width: usize,
    requests: HashMap<RequestId, Matchers>,
    steps: VecDeque<Arc<Board>>,
    pool: Pool,
}

/// Of one request.
#[derive(Debug)]
struct Matchers {
    grammar: Arc<Grammar>,
    choices: HashMap<u32, Follower>,
}

/// Of one choice.
#[derive(Debug)]
struct Follower {
    matcher: Arc<Mutex<Matcher>>,
    /// Outputs that it was given.
    num_tokens: usize,
}

/// Which masks of a step are done.
#[derive(Debug, Default)]
struct BoardState {
    /// Rows and their masks.
    done: Vec<(u32, Vec<i32>)>,
    /// How many are not.
    missing: usize,
}

/// The masks of one step.
#[derive(Debug)]
struct Board {
    step: StepId,
    state: Mutex<BoardState>,
    done: Condvar,
}

/// One mask to be made.
#[derive(Debug)]
struct Job {
    board: Arc<Board>,
    row: u32,
    matcher: Arc<Mutex<Matcher>>,
    /// To be followed first.
    tokens: Vec<u32>,
    width: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // llguidance's panics are errors of the matcher; nothing else here can leave something half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Masks {
    pub(crate) fn new(vocab_size: u32) -> Self {
        Self {
            width: vocab_size.div_ceil(32) as usize,
            requests: HashMap::new(),
            steps: VecDeque::new(),
            pool: Pool::default(),
        }
    }

    /// Takes a request that the core has taken.
    pub(crate) fn insert(&mut self, id: RequestId, grammar: Arc<Grammar>) {
        let choices = HashMap::new();
        self.requests.insert(id, Matchers { grammar, choices });
    }

    /// Why the grammar of a choice leaves no token, if it is that.
    pub(crate) fn error(&self, id: RequestId, choice: u32) -> Option<String> {
        let follower = self.requests.get(&id)?.choices.get(&choice)?;
        lock(&follower.matcher).error().map(str::to_owned)
    }

    /// A choice has ended.
    pub(crate) fn remove(&mut self, id: RequestId, choice: u32, core: &Core) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.choices.remove(&choice);
            if !core.has_request(id) {
                self.requests.remove(&id);
            }
        }
    }

    /// Begins the masks of a step in flight, if its tokens are known and it has any.
    pub(crate) fn begin(&mut self, core: &Core, step: StepId) {
        let is_begun = self.steps.iter().any(|board| board.step == step);
        if self.requests.is_empty() || is_begun || core.waits_for_masks(step) {
            return;
        }
        let board = Arc::new(Board {
            step,
            state: Mutex::default(),
            done: Condvar::new(),
        });
        let mut jobs = Vec::new();
        for masked in core.masked_rows(step) {
            let Some(request) = self.requests.get_mut(&masked.id) else {
                continue;
            };
            let grammar = &request.grammar;
            let follower = request
                .choices
                .entry(masked.choice)
                .or_insert_with(|| Follower {
                    matcher: Arc::new(Mutex::new(grammar.matcher())),
                    num_tokens: 0,
                });
            jobs.push(Job {
                board: Arc::clone(&board),
                row: masked.row,
                matcher: Arc::clone(&follower.matcher),
                tokens: masked.outputs[follower.num_tokens..].to_vec(),
                width: self.width,
            });
            follower.num_tokens = masked.outputs.len();
        }
        if !jobs.is_empty() {
            lock(&board.state).missing = jobs.len();
            self.steps.push_back(board);
            self.pool.push(jobs);
        }
    }

    /// What `collect` needs, so that nothing is locked while it waits.
    pub(crate) fn take(&mut self, step: StepId) -> Collection {
        let place = self.steps.iter().position(|board| board.step == step);
        Collection {
            board: place.and_then(|place| self.steps.remove(place)),
            queue: Arc::clone(&self.pool.queue),
            width: self.width,
        }
    }
}

/// The masks of a step, to be waited for.
#[derive(Debug)]
pub(crate) struct Collection {
    board: Option<Arc<Board>>,
    queue: Arc<Queue>,
    width: usize,
}

impl Collection {
    /// All masks `[num_rows * ceil(V / 32)]`; rows without one allow every token.
    pub(crate) fn collect(self, num_rows: usize) -> Vec<i32> {
        let mut masks = vec![-1; num_rows * self.width];
        let Some(board) = self.board else {
            return masks;
        };
        loop {
            // A lock that lived on in the loop's condition would keep the threads from the queue.
            let job = lock(&self.queue.jobs).0.pop_front();
            let Some(job) = job else { break };
            job.run();
        }
        let mut state = lock(&board.state);
        while state.missing > 0 {
            state = board
                .done
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        for (row, mask) in state.done.drain(..) {
            let first = row as usize * self.width;
            masks[first..first + self.width].copy_from_slice(&mask);
        }
        masks
    }
}

impl Job {
    fn run(self) {
        let mut mask = vec![0; self.width];
        let mut matcher = lock(&self.matcher);
        matcher.advance(&self.tokens);
        matcher.fill(&mut mask);
        drop(matcher);
        let mut state = lock(&self.board.state);
        state.done.push((self.row, mask));
        state.missing -= 1;
        if state.missing == 0 {
            self.board.done.notify_all();
        }
    }
}

#[derive(Debug, Default)]
struct Queue {
    /// Jobs, and whether no more will come.
    jobs: Mutex<(VecDeque<Job>, bool)>,
    came: Condvar,
}

/// Threads that start with the first job and end with the pool.
#[derive(Debug, Default)]
struct Pool {
    queue: Arc<Queue>,
    is_started: bool,
}

impl Pool {
    fn push(&mut self, jobs: Vec<Job>) {
        if !self.is_started {
            self.is_started = true;
            let cores = thread::available_parallelism().map_or(1, usize::from);
            for _ in 0..cores.saturating_sub(1).clamp(1, MAX_THREADS) {
                let queue = Arc::clone(&self.queue);
                let thread = thread::Builder::new().name("octavo-masks".to_owned());
                // Without threads the one that collects does all the work.
                drop(thread.spawn(move || queue.work()));
            }
        }
        lock(&self.queue.jobs).0.extend(jobs);
        self.queue.came.notify_all();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.queue.jobs).1 = true;
        self.queue.came.notify_all();
    }
}

impl Queue {
    fn work(&self) {
        while let Some(job) = self.next() {
            job.run();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut jobs = lock(&self.jobs);
        while !jobs.1 {
            if let Some(job) = jobs.0.pop_front() {
                return Some(job);
            }
            jobs = self.came.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }
}
