//! Compiles grammars on threads of its own, within limits, and keeps the last ones.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use llguidance::ParserFactory;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use octavo_wire::{GrammarPart, GrammarSource, Syntax};
use thiserror::Error;

pub use crate::limits::TIMEOUT;
use crate::limits::{self, MAX_CACHED, MAX_DEPTH, MAX_SOURCE_BYTES, MAX_WAITING};
use crate::matcher::Matcher;
pub use crate::vocabulary::Vocabulary;

/// Why there is no grammar.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GrammarError {
    /// The source is longer than is compiled.
    #[error("its source has {given} bytes, at most {max} are compiled")]
    TooLong {
        /// Bytes.
        given: usize,
        /// The limit.
        max: usize,
    },
    /// Brackets inside brackets.
    #[error("its brackets are more than {max} deep")]
    TooDeep {
        /// The limit.
        max: usize,
    },
    /// It does not compile, or would take more work or memory than is allowed.
    #[error("{0}")]
    Invalid(String),
    /// It took too long.
    #[error("it was not compiled within {} s", TIMEOUT.as_secs())]
    TimedOut,
    /// Too many are being compiled.
    #[error("{max} grammars wait to be compiled already")]
    Busy {
        /// The limit.
        max: usize,
    },
    /// A grammar ends with a token that the model does not have.
    #[error("the model has no end-of-sequence token")]
    NoEndOfSequence,
}

impl GrammarError {
    pub(crate) fn invalid(error: &impl fmt::Display) -> Self {
        Self::Invalid(shorten(&error.to_string()))
    }
}

/// A message as one line of a bounded length, without what llguidance puts in place of its state.
pub(crate) fn shorten(message: &str) -> String {
    const MAX_CHARS: usize = 300;
    let message = message.replace("<non-verbose/>", "");
    let words: Vec<&str> = message.split_whitespace().collect();
    words.join(" ").chars().take(MAX_CHARS).collect()
}

/// How llguidance calls a grammar that no token begins.
const DEAD_END: &str = "NoExtensionBias";

/// A compiled grammar.
pub struct Grammar {
    start: Mutex<llguidance::Matcher>,
    /// The automata that the matchers share have reached a limit: it has to be compiled anew.
    is_spent: Arc<AtomicBool>,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Grammar {
    /// The state at the beginning of an output. All matchers of a grammar share the automata that their masks build.
    #[must_use]
    pub fn matcher(&self) -> Matcher {
        Matcher::new(lock(&self.start).clone(), Arc::clone(&self.is_spent))
    }
}

/// Takes what became of a grammar.
type Reply = Box<dyn FnOnce(Result<Arc<Grammar>, GrammarError>) + Send>;

/// Compiles for one vocabulary. Its threads start with the first grammar, and end with it.
#[derive(Debug)]
pub struct Compiler {
    shared: Arc<Shared>,
    /// Sources that may wait at a time.
    max_waiting: usize,
    started: OnceLock<()>,
}

struct Shared {
    vocabulary: Vocabulary,
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
    state: Mutex<State>,
    /// Signalled when a source comes, or the end.
    changed: Condvar,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("vocabulary", &self.vocabulary)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<Arc<GrammarSource>>,
    /// Who waits for each source that is queued or being compiled.
    waiting: HashMap<Arc<GrammarSource>, Vec<Reply>>,
    cache: HashMap<Arc<GrammarSource>, Cached>,
    /// Counts the look-ups.
    clock: u64,
    is_closed: bool,
}

struct Cached {
    result: Result<Arc<Grammar>, GrammarError>,
    used_at: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whoever panicked has been reported; what is locked here is whole between statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Compiler {
    /// Nothing is computed yet. Any number of grammars may wait: for requests that were accepted.
    #[must_use]
    pub fn new(vocabulary: Vocabulary) -> Self {
        Self::with_waiting(vocabulary, usize::MAX)
    }

    /// One that refuses grammars while many wait: for requests that come from outside.
    #[must_use]
    pub fn bounded(vocabulary: Vocabulary) -> Self {
        Self::with_waiting(vocabulary, MAX_WAITING)
    }

    fn with_waiting(vocabulary: Vocabulary, max_waiting: usize) -> Self {
        Self {
            max_waiting,
            shared: Arc::new(Shared {
                vocabulary,
                factory: OnceLock::new(),
                state: Mutex::default(),
                changed: Condvar::new(),
            }),
            started: OnceLock::new(),
        }
    }

    /// What it compiles for.
    #[must_use]
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.shared.vocabulary
    }

    /// Waits until the vocabulary's trie is built, which takes up to seconds and else is done with the first grammar.
    pub fn prepare(&self) {
        self.shared.factory();
    }

    /// Calls `reply` with the grammar: at once if it is cached or cannot be compiled, else from a thread that compiles.
    pub fn request(
        &self,
        source: Arc<GrammarSource>,
        reply: impl FnOnce(Result<Arc<Grammar>, GrammarError>) + Send + 'static,
    ) {
        match self.enqueue(source, Box::new(reply)) {
            Ok(()) => {}
            Err((reply, result)) => reply(result),
        }
    }

    /// Waits for the grammar, at most [`TIMEOUT`].
    ///
    /// # Errors
    /// Why there is none.
    pub fn compile(&self, source: Arc<GrammarSource>) -> Result<Arc<Grammar>, GrammarError> {
        self.prepare();
        let (sender, receiver) = mpsc::channel();
        self.request(source, move |result| {
            // A caller that waits no longer does not listen.
            let _ = sender.send(result);
        });
        receiver
            .recv_timeout(TIMEOUT)
            .unwrap_or(Err(GrammarError::TimedOut))
    }

    /// The reply comes back with what it is to be told, if that is known already.
    fn enqueue(
        &self,
        source: Arc<GrammarSource>,
        reply: Reply,
    ) -> Result<(), (Reply, Result<Arc<Grammar>, GrammarError>)> {
        if let Err(error) = check_size(&source) {
            return Err((reply, Err(error)));
        }
        let mut state = lock(&self.shared.state);
        if let Some(result) = state.cached(&source) {
            return Err((reply, result));
        }
        if let Some(replies) = state.waiting.get_mut(&source) {
            replies.push(reply);
            return Ok(());
        }
        if state.waiting.len() >= self.max_waiting {
            let max = self.max_waiting;
            return Err((reply, Err(GrammarError::Busy { max })));
        }
        self.started.get_or_init(|| self.start());
        state.waiting.insert(Arc::clone(&source), vec![reply]);
        state.queue.push_back(source);
        self.shared.changed.notify_one();
        Ok(())
    }

    fn start(&self) {
        for _ in 0..limits::NUM_THREADS {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new()
                .name("octavo-grammar".to_owned())
                .stack_size(limits::STACK_BYTES);
            // Without a thread, callers are told that it takes too long.
            drop(thread.spawn(move || shared.work()));
        }
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        lock(&self.shared.state).is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl State {
    fn cached(
        &mut self,
        source: &Arc<GrammarSource>,
    ) -> Option<Result<Arc<Grammar>, GrammarError>> {
        self.clock += 1;
        let is_spent = |cached: &Cached| {
            let grammar = cached.result.as_ref();
            grammar.is_ok_and(|grammar| grammar.is_spent.load(Ordering::Relaxed))
        };
        if self.cache.get(source).is_some_and(is_spent) {
            self.cache.remove(source);
        }
        let found = self.cache.get_mut(source)?;
        found.used_at = self.clock;
        Some(found.result.clone())
    }

    /// Puts in a result, in place of the one whose last use is the longest ago.
    fn insert(&mut self, source: Arc<GrammarSource>, result: Result<Arc<Grammar>, GrammarError>) {
        if self.cache.len() >= MAX_CACHED {
            let oldest = self.cache.iter().min_by_key(|(_, cached)| cached.used_at);
            if let Some(oldest) = oldest.map(|(source, _)| Arc::clone(source)) {
                self.cache.remove(&oldest);
            }
        }
        self.clock += 1;
        let used_at = self.clock;
        self.cache.insert(source, Cached { result, used_at });
    }
}

impl Shared {
    /// A thread that compiles.
    fn work(&self) {
        while let Some(source) = self.next() {
            let result = self.build(&source);
            let mut state = lock(&self.state);
            state.insert(Arc::clone(&source), result.clone());
            let replies = state.waiting.remove(&source).unwrap_or_default();
            drop(state);
            for reply in replies {
                reply(result.clone());
            }
        }
    }

    fn next(&self) -> Option<Arc<GrammarSource>> {
        let mut state = lock(&self.state);
        while !state.is_closed {
            if let Some(source) = state.queue.pop_front() {
                return Some(source);
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    fn factory(&self) -> &Result<ParserFactory, GrammarError> {
        self.factory.get_or_init(|| self.vocabulary.factory())
    }

    fn build(&self, source: &GrammarSource) -> Result<Arc<Grammar>, GrammarError> {
        let factory = self.factory().as_ref().map_err(Clone::clone)?;
        let grammars = source.parts.iter().map(part).collect::<Result<_, _>>()?;
        let parser = factory.create_parser(TopLevelGrammar {
            grammars,
            max_tokens: None,
        });
        let mut start = llguidance::Matcher::new(parser);
        // The first mask shows whether there is any output at all, and what the automata cost.
        match start.compute_mask_or_eos() {
            Ok(mask) if mask.num_set() > 0 => Ok(Arc::new(Grammar {
                start: Mutex::new(start),
                is_spent: Arc::default(),
            })),
            Err(error) if !error.to_string().starts_with(DEAD_END) => {
                Err(GrammarError::invalid(&error))
            }
            _ => Err(GrammarError::Invalid("no output is possible".to_owned())),
        }
    }
}

fn part(part: &GrammarPart) -> Result<GrammarWithLexer, GrammarError> {
    let mut grammar = GrammarWithLexer {
        name: Some(part.name.clone()),
        ..GrammarWithLexer::default()
    };
    match part.syntax {
        Syntax::Lark => grammar.lark_grammar = Some(part.text.clone()),
        Syntax::JsonSchema => {
            let schema = serde_json::from_str(&part.text);
            grammar.json_schema = Some(schema.map_err(|error| GrammarError::invalid(&error))?);
        }
    }
    Ok(grammar)
}

fn check_size(source: &GrammarSource) -> Result<(), GrammarError> {
    let given = source.num_bytes();
    if given > MAX_SOURCE_BYTES {
        return Err(GrammarError::TooLong {
            given,
            max: MAX_SOURCE_BYTES,
        });
    }
    // JSON has a limit of its own.
    let mut texts = source
        .parts
        .iter()
        .filter(|part| part.syntax == Syntax::Lark);
    if texts.any(|part| crate::lark::depth(&part.text) > MAX_DEPTH) {
        return Err(GrammarError::TooDeep { max: MAX_DEPTH });
    }
    Ok(())
}
